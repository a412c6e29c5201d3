"""Exercise 2: GRPO with the advantages of RLOO.

R_i minus the mean of the others is G / (G - 1) times R_i minus the mean of all. The recipe
examples/recipes/rloo.py also has the paper's sum over tokens.
"""


class Args:
    normalize_std: bool = option(False, "divide advantages by the group's standard deviation")


def compute_advantages(rewards, args):
    """Return advantages (R, 1), float64: each reward minus the mean of the others of its group.

    They are 0 where all rewards of a group are equal.
    """
    groups = rewards.double().view(-1, args.group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    advantages = advantages * args.group_size / (args.group_size - 1)  # leaves out the own reward
    if args.normalize_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + args.std_eps)
    return advantages.masked_fill(all_equal(groups), 0).view(-1, 1)
