"""Lite PPO: the mean of the group, the deviation of the batch, the token mean (arXiv 2508.08221).

    A_i = (R_i - mean of its group) / standard deviation of all rewards of the rollout

on all processes. reinforce_pp.py beside it also centres by the group, but divides by the deviation of
what is left, over tokens. Here the deviation is that of the rewards as they are, over rows: it also
counts how far apart the prompts are, so the advantages are smaller, and a group that is nearly all
right is not blown up. All tokens of an optimizer step weigh the same. There is no KL.
"""

from common.masked import moments


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    normalize_std: bool = option(True, "divide by the deviation of the rewards of the rollout")


LINES = {
    "advantages = compute_advantages(samples.rewards, args)": """
        advantages = compute_advantages(samples.rewards, args)
        if args.normalize_std:
            advantages = divide_by_std(accelerator, advantages, samples.rewards, args)
    """
}


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64, not yet divided: each reward less the mean of its group."""
    groups = rewards.double().view(-1, args.group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    return advantages.masked_fill(all_equal(groups), 0).view(-1, 1)


def divide_by_std(accelerator, advantages, rewards, args):
    """The advantages over the deviation of the rewards of all processes, each of which has to call it."""
    _, variance = moments(rewards.to(accelerator.device), 1, accelerator.reduce)
    return advantages / (variance.sqrt().cpu() + args.std_eps)


def token_weights(loss_mask, totals, args):
    """Weights (R, T) of sum 1 over an optimizer step: the mean over its tokens."""
    return loss_mask.double() / totals["tokens"]
