"""Exercise 5: GRPO with the advantages of RLOO.

R_i minus the mean of the others is G / (G - 1) times R_i minus the mean of all. The recipe
examples/recipes/rloo.py has the paper's sum over tokens too.
"""


class Args:
    normalize_std: bool = option(False, "divide advantages by the group's standard deviation")


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64: each reward less the mean of the others; 0 where all are equal."""
    groups = rewards.double().view(-1, args.group_size)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    advantages = advantages * args.group_size / (args.group_size - 1)  # less the mean of the others
    if args.normalize_std:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + args.std_eps)
    return advantages.masked_fill(all_equal(groups), 0).view(-1, 1)
