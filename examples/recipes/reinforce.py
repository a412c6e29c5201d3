"""REINFORCE: the gradient of R log pi. Nothing is subtracted from the reward.

examples/gradient_variance.py compares its noise with that of RLOO and GRPO.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # there is no standard deviation


def compute_advantages(rewards, args):
    """Return advantages (R, 1), float64: the rewards."""
    return rewards.double().view(-1, 1)


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): mean over rows of the sum over tokens, as of sequence log-probs."""
    return loss_mask.double() / totals["rows"]
