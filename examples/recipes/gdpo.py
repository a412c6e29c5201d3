"""GDPO: each reward term is standardized on its own (arXiv 2601.05242, Eq. 4 to 6).

With several rewards, GRPO standardizes their sum, so that a term that varies little is lost. Here

    A_ik = (R_ik - mean of term k in the group) / its standard deviation                    Eq. 4
    A_i  = sum over k of weight_k A_ik                                                      Eq. 5
    A_i  standardized over all rows of the rollout, on all processes                        Eq. 6

The weights are those of --reward_weights. A row to which a term does not apply counts in no
statistic of that term, and gets nothing from it; the authors' code takes its reward for 0. The
overlong penalty of dapo.py and the 0 that dr_grpo.py gives to truncated rows are no terms: both
are lost.
"""

from common.masked import moments


class Args:
    del normalize_std  # each term is divided by its standard deviation


LINES = {
    "advantages = compute_advantages(samples.rewards, args)": """
        sums = compute_advantages(reward_functions, samples.terms, args)
        advantages = over_rollout(accelerator, sums, samples.terms, args)
    """
}


def compute_advantages(reward_functions, terms, args):
    """Return weighted sums (R, 1), float64, of the advantages of `terms` {name: (R,)}, Eq. 4-5."""
    total = 0
    for reward in reward_functions:
        groups = terms[reward.name].double().view(-1, args.group_size)
        total = total + reward.weight * standardized(groups, args)
    return total.view(-1, 1)


def standardized(groups, args):
    """Return advantages (P, G) of one term, whose rewards are NaN where it does not apply (Eq. 4).

    They are 0 there, and where all rewards of a group are equal.
    """
    applies = ~groups.isnan()
    mean = groups.nanmean(dim=1, keepdim=True)
    groups = torch.where(applies, groups, mean)
    count = applies.sum(dim=1, keepdim=True)
    variance = (groups - mean).square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
    advantages = (groups - mean) / (variance.sqrt() + args.std_eps)
    return advantages.masked_fill(all_equal(groups) | (count == 0), 0)


def over_rollout(accelerator, sums, terms, args):
    """Standardize `sums` (R, 1) over the rows of all processes to which a term applies (Eq. 6)."""
    sums = sums.to(accelerator.device)
    applies = ~torch.stack([term.isnan() for term in terms.values()]).all(dim=0)
    mean, variance = moments(sums[applies.to(sums.device), 0], 1, accelerator.reduce)
    advantages = ((sums - mean) / (variance.sqrt() + args.std_eps)).float()
    return advantages.masked_fill(~applies[:, None].to(sums.device), 0)
