"""REINFORCE++ with a baseline (arXiv 2501.03262).

The mean of the group is subtracted from a reward, and the result is divided by the standard
deviation over the tokens of the whole rollout, on all processes. The rest stays GRPO's: its KL, its
mean over rows, one update.
"""

from common.masked import moments


class Args:
    normalize_std: bool = option(True, "whiten the advantages over all tokens of the rollout")


def compute_advantages(rewards, args):
    """Return centered rewards (R, 1), float64: each one minus the mean of its group."""
    groups = rewards.double().view(-1, args.group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    return advantages.masked_fill(all_equal(groups), 0).view(-1, 1)


def whiten(accelerator, batch, args):
    """Whiten the advantages (R, 1) over the tokens of all processes; each must call it."""
    mask = batch["loss_mask"]
    tokens = batch["advantages"].expand(mask.shape)[mask]  # (N,) of this process
    mean, variance = moments(tokens, 1, accelerator.reduce)
    return ((batch["advantages"] - mean) / (variance.sqrt() + args.std_eps)).float()


LINES = {
    'batch["advantages"] = advantages.float().to(accelerator.device)': """
        batch["advantages"] = advantages.float().to(accelerator.device)
        if args.normalize_std:
            batch["advantages"] = whiten(accelerator, batch, args)
    """
}
