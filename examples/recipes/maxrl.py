"""MaxRL: Maximum Likelihood Reinforcement Learning (arXiv 2602.02710, Algorithm 1).

The advantage is the reward minus the mean of its group, divided by that mean:

    A_i = (R_i - mean(R)) / mean(R), and 0 where no completion of the group is right

The fewer completions are right, the more each of them counts. With p the probability of a right
one, the expected gradient is that of -sum over k < G of (1 - p)^k / k, the first terms of log p
(Theorem 5 of version 3). That holds for rewards of 0 and 1, so others are refused. The log-prob is
that of the whole completion, the sum over its tokens.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # the mean replaces the standard deviation


LINES = {
    "advantages = compute_advantages(samples.rewards, args)": """
        check_binary(samples.rewards[samples.is_scored])
        advantages = compute_advantages(samples.rewards, args)
    """
}


def check_binary(rewards):
    """Raise Exit unless all rewards are 0 or 1."""
    others = rewards[(rewards != 0) & (rewards != 1)]
    if len(others):
        raise Exit(f"MaxRL needs rewards of 0 and 1, and there is one of {others[0]:g}")


def compute_advantages(rewards, args):
    """Return advantages (R, 1), float64: (R - mean) / mean of the group; 0 where all are equal."""
    groups = rewards.double().view(-1, args.group_size)
    mean = groups.mean(dim=1, keepdim=True)
    return ((groups - mean) / mean).masked_fill(all_equal(groups), 0).view(-1, 1)


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): mean over rows of the sum over tokens, as of sequence log-probs."""
    return loss_mask.double() / totals["rows"]
