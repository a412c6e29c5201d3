"""REINFORCE with a single baseline for all prompts: the mean reward of the rollout.

examples/gradient_variance.py compares its noise with that of RLOO and GRPO.
"""

from common.masked import moments  # noqa: F401 (in LINES)


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # there is no standard deviation


LINES = {
    "advantages = compute_advantages(samples.rewards, args)": """
        scored = samples.rewards[samples.is_scored].to(accelerator.device)
        mean, _ = moments(scored, 0, accelerator.reduce)
        advantages = compute_advantages(samples.rewards, args, mean.cpu())
    """
}


def compute_advantages(rewards, args, mean=None):
    """Return advantages (R, 1), float64: each reward minus the mean of all [of these]."""
    rewards = rewards.double()
    mean = rewards.mean() if mean is None else mean
    return (rewards - mean).view(-1, 1)


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): mean over rows of the sum over tokens, as of sequence log-probs."""
    return loss_mask.double() / totals["rows"]
