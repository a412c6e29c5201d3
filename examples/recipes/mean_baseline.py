"""REINFORCE with a single baseline for all prompts: the mean reward of the rollout.

The second rung of the ladder to GRPO in docs/fork.md. Each process uses the mean of its own rows,
so two processes run a different algorithm; reinforce_pp.py shows how to average over all of them.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # there is no standard deviation


def compute_advantages(rewards, args):
    """Return advantages (R, 1), float64: each reward minus the mean of all."""
    rewards = rewards.double()
    return (rewards - rewards.mean()).view(-1, 1)


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): mean over rows of the sum over tokens, as of sequence log-probs."""
    return loss_mask.double() / totals["rows"]
