"""REINFORCE++ with a baseline (arXiv 2501.03262).

The mean of the group is subtracted from a reward, and the result is divided by the standard
deviation over the tokens of the whole rollout, on all processes. The rest stays GRPO's: its KL, its
mean over rows, one update.
"""

from common.masked import moments


class Args:
    normalize_std: bool = option(True, "whiten the advantages over all tokens of the rollout")
    std_ddof: Literal[0, 1] = option(1, "ddof of the standard deviation over tokens")
    std_eps: float = option(1e-6, "added to that standard deviation", ge=0)


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64, not yet whitened: each reward less the mean of its group."""
    groups = rewards.double().view(-1, args.group_size)
    mean, _, _, zero = group_statistics(groups, args.std_ddof)
    advantages = groups - mean
    return advantages.masked_fill(zero, 0).view(-1, 1)


def whiten(accelerator, batch, args):
    """The advantages, whitened over the tokens of all processes. Every process has to call it."""
    counted = batch["loss_mask"] & ~batch["rewards"].isnan()[:, None]  # a row may have no reward
    tokens = batch["advantages"].expand(counted.shape)[counted]  # (N,) of this process
    mean, variance = moments(tokens, args.std_ddof, accelerator.reduce)
    return ((batch["advantages"] - mean) / (variance.sqrt() + args.std_eps)).float()


train_on = update


def update(accelerator, model, reference, optimizer, batch, step, args, metrics):
    """Whiten the advantages, then train on the rollout."""
    if args.normalize_std:
        batch["advantages"] = whiten(accelerator, batch, args)
    train_on(accelerator, model, reference, optimizer, batch, step, args, metrics)
