"""Lite PPO: group mean, batch standard deviation, token mean (arXiv 2508.08221).

    A_i = (R_i - mean of its group) / standard deviation of all rewards of the rollout

on all processes. reinforce_pp.py also centers by the group, but divides by the standard deviation
of the centered rewards, over tokens. Here it is that of the raw rewards, over rows: it includes the
spread between prompts, so the advantages are smaller, and a group that is nearly all right is not
blown up. All tokens of an optimizer step have the same weight. There is no KL.
"""

from common.masked import moments


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    normalize_std: bool = option(True, "divide by the standard deviation of the rollout's rewards")


LINES = {
    "advantages = compute_advantages(samples.rewards, args)": """
        advantages = compute_advantages(samples.rewards, args)
        if args.normalize_std:
            scored = samples.rewards[samples.is_scored]
            advantages = divide_by_std(accelerator, advantages, scored, args)
    """
}


def compute_advantages(rewards, args):
    """Return centered rewards (R, 1), float64: each one minus the mean of its group."""
    groups = rewards.double().view(-1, args.group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    return advantages.masked_fill(all_equal(groups), 0).view(-1, 1)


def divide_by_std(accelerator, advantages, rewards, args):
    """Divide by the standard deviation of the rewards of all processes; each must call it."""
    _, variance = moments(rewards.to(accelerator.device), 1, accelerator.reduce)
    return advantages / (variance.sqrt().cpu() + args.std_eps)


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): the mean over all tokens of the optimizer step."""
    return loss_mask.double() / totals["tokens"]
