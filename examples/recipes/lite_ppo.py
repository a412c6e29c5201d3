"""Lite PPO: the mean of the group, the deviation of the batch, the token mean (arXiv 2508.08221).

    A_i = (R_i - mean of its group) / standard deviation of all rewards of the rollout

on all processes. reinforce_pp.py beside it also centres by the group, but divides by the deviation of
what is left, over tokens. Here the deviation is that of the rewards as they are, over rows: it also
counts how far apart the prompts are, so the advantages are smaller, and a group that is nearly all
right is not blown up. All tokens of an optimizer step weigh the same. There is no KL.
"""

from common.masked import moments


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference in the loss (0: no reference is loaded)", ge=0)
    normalize_std: bool = option(True, "divide by the standard deviation of the rewards of the rollout")
    std_ddof: Literal[0, 1] = option(1, "ddof of that standard deviation")


LINES = {
    'batch["advantages"] = compute_advantages(rewards, args).to(accelerator.device, torch.float32)': """
        batch["advantages"] = compute_advantages(rewards, args).to(accelerator.device, torch.float32)
        if args.normalize_std:
            batch["advantages"] = divide_by_std(accelerator, batch, args)
    """
}


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64, not yet divided: each reward less the mean of its group."""
    groups = rewards.double().view(-1, args.group_size)
    mean, _, _, no_signal = group_statistics(groups, args.std_ddof)
    return (groups - mean).masked_fill(no_signal, 0).view(-1, 1)


def divide_by_std(accelerator, batch, args):
    """The advantages over the deviation of the rewards of all processes. Every process has to call it."""
    scored = ~batch["rewards"].isnan()  # a row may have no reward
    _, variance = moments(batch["rewards"][scored], args.std_ddof, accelerator.reduce)
    return (batch["advantages"] / (variance.sqrt() + args.std_eps)).float()


def token_weights(loss_mask, totals, args):
    """Weights (R, T) of sum 1 over an optimizer step: the mean over its tokens."""
    return loss_mask.double() / max(totals["tokens"], 1)
