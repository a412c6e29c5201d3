"""A length penalty that grows with the pass rate of the group, as in prime-rl.

    S_i = R_i - coef mean(R) |o_i| / longest,    A_i = S_i - mean(S)

The mean reward and the longest completion are those of the group. Where no answer is right, length
costs nothing and the policy is free to think longer; where all are right, the shorter ones win. The
logged rewards are those without the penalty. There is no division by a deviation, which would lift
the penalty of a group that is all right to the size of a right answer.
"""

LINES = {
    "advantages = compute_advantages(samples.rewards, args)": """
        lengths = samples.batch["completion_mask"].sum(dim=1).cpu().double()
        lengths[~samples.is_scored] = math.nan
        penalized = penalized_rewards(samples.rewards, lengths, args)
        advantages = compute_advantages(penalized, args)
    """
}


class Args:
    length_coef: float = option(0.25, "penalty of the longest completion where all are right", ge=0)
    normalize_std: bool = option(False, "divide advantages by the group's standard deviation")


def penalized_rewards(rewards, lengths, args):
    """Return rewards (R,) minus the penalty of their lengths (R,), a group's rows adjacent.

    Rows without a reward have the length NaN. They get the mean of their group.
    """
    groups = rewards.double().view(-1, args.group_size)
    lengths = lengths.double().view(-1, args.group_size)
    relative = lengths / lengths.nan_to_num(1).amax(dim=1, keepdim=True)
    penalized = groups - args.length_coef * groups.mean(dim=1, keepdim=True) * relative
    means = penalized.nanmean(dim=1, keepdim=True).nan_to_num(0)
    return torch.where(penalized.isnan(), means, penalized).view(-1)
