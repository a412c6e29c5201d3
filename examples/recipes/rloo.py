"""RLOO: REINFORCE Leave-One-Out (arXiv 2402.14740).

The baseline of a completion is the mean reward of the others of its group:

    A_i = R_i - 1/(G-1) sum over j != i of R_j

The action is the whole completion, so its log-prob is the sum over its tokens. With one update per
rollout the ratio is 1, and the gradient is that of -A log pi. The paper's KL is part of the reward;
with --kl_coef it is part of the loss here, as in grpo.py.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
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


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): mean over rows of the sum over tokens, as of sequence log-probs."""
    return loss_mask.double() / totals["rows"]
