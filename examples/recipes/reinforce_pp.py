"""REINFORCE++ with a baseline (arXiv 2501.03262).

The mean of the group is subtracted from a reward, and the result is divided by the standard
deviation over the tokens of the whole rollout, on all processes. The rest stays GRPO's: its KL, its
mean over rows, one update.
"""

from common.masked import moments


class Args:
    normalize_std: bool = option(True, "whiten the advantages over all tokens of the rollout")


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64, not yet whitened: each reward less the mean of its group."""
    groups = rewards.double().view(-1, args.group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    return advantages.masked_fill(all_equal(groups), 0).view(-1, 1)


def whiten(accelerator, batch, args):
    """The advantages (R, 1), whitened over the tokens of all processes, each of which has to call it."""
    mask = batch["loss_mask"]
    tokens = batch["advantages"].expand(mask.shape)[mask]  # (N,) of this process
    mean, variance = moments(tokens, 1, accelerator.reduce)
    return ((batch["advantages"] - mean) / (variance.sqrt() + args.std_eps)).float()


train_on = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    """Whiten the advantages, then train on the rollout."""
    if args.normalize_std:
        batch["advantages"] = whiten(accelerator, batch, args)
    train_on(accelerator, model, reference, optimizer, batch, args, metrics)
