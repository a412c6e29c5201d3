"""REINFORCE with one baseline for all prompts: the mean reward of the rollout.

Second from the bottom of the ladder to GRPO in docs/fork.md. Each process takes the mean of its
own rows, so with two processes this is another algorithm; reinforce_pp shows how to count the rows
of all processes.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # there is no standard deviation


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64: each reward less the mean of all."""
    rewards = rewards.double()
    return (rewards - rewards.mean()).view(-1, 1)


def token_weights(loss_mask, totals, args):
    """Weights (R, T): the mean over rows of the sum over tokens, the log-prob of a completion."""
    return loss_mask.double() / totals["rows"]
