"""GDPO: each part of the reward is standardized by itself (arXiv 2601.05242, Eq. 4 to 6).

With several rewards, GRPO standardizes their sum, so that a part that varies little is lost. Here

    A_ik = (R_ik - mean of part k in the group) / its standard deviation                          Eq. 4
    A_i  = sum over k of weight_k A_ik                                                             Eq. 5
    A_i  standardized over all rows of the rollout, on all processes                               Eq. 6

The weights are those of --reward_weights. A row to which a part does not apply counts in no
statistic of that part, and gets nothing from it; the authors' code takes its reward for 0.
"""

from common.masked import moments


class Args:
    del normalize_std  # each part is divided by its standard deviation


LINES = {
    'batch["advantages"] = compute_advantages(rewards, args).to(accelerator.device, torch.float32)': """
        sums = compute_advantages(reward_functions, parts, args).to(accelerator.device, torch.float32)
        batch["advantages"] = over_rollout(accelerator, sums, batch["rewards"], args)
    """
}


def compute_advantages(reward_functions, parts, args):
    """The weighted sums (R, 1), float64, of the advantages of `parts` {name: (R,)}, Eq. 4 and 5."""
    total = 0
    for reward in reward_functions:
        groups = parts[reward.name].double().view(-1, args.group_size)
        mean, _, std, no_signal = group_statistics(groups, args.std_ddof)
        advantages = (groups - mean) / (std + args.std_eps)
        total = total + reward.weight * advantages.masked_fill(no_signal, 0)
    return total.view(-1, 1)


def over_rollout(accelerator, sums, rewards, args):
    """`sums` (R, 1), standardized over the rows of all processes that have a reward (Eq. 6)."""
    scored = ~rewards.isnan()
    mean, variance = moments(sums[scored, 0], args.std_ddof, accelerator.reduce)
    return ((sums - mean) / (variance.sqrt() + args.std_eps)).float()
