"""Exercise 5: GRPO with the advantages of RLOO.

R_i minus the mean of the others is G / (G - 1) times R_i minus the mean of all. It assumes that
every row has a reward; examples/recipes/rloo.py does not, and has the paper's sum over tokens too.
"""


class Args:
    normalize_std: bool = option(False, "divide advantages by the group's standard deviation (Dr. GRPO: no)")


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64: each reward less the mean of the others; 0 where all are equal."""
    groups = rewards.double().view(-1, args.group_size)
    mean, _, std, zero = group_statistics(groups, args.std_ddof)
    advantages = (groups - mean) * args.group_size / (args.group_size - 1)  # R_i minus the mean of the others
    if args.normalize_std:
        advantages = advantages / (std + args.std_eps)
    return advantages.masked_fill(zero, 0).view(-1, 1)
