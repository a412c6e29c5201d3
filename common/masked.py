"""Masked arithmetic on (R, T) tensors: R rows (completions), T completion tokens, V vocabulary.

A mask is boolean and true on the tokens that count. Values where it is false may be anything, NaN included: they go
through `torch.where` before any sum or `exp`, since `nan * 0` is NaN, and a `where` on the finished result would make
the gradient NaN.
"""

import torch


def completion_mask(completions, stop_tokens):
    """Which tokens of `completions` (R, T) belong to the completion: all up to the first stop token, which is included.

    Only positions count, never the pad id: it may be a stop token, and it may be sampled inside a completion.
    Returns the mask (R, T) and `truncated` (R,), true for rows without a stop token.
    """
    is_stop = torch.isin(completions, torch.as_tensor(stop_tokens, device=completions.device))
    stops_before = is_stop.cumsum(dim=1) - is_stop.long()
    return stops_before == 0, ~is_stop.any(dim=1)


def log_ratio(logprobs, old_logprobs, mask):
    """log(pi / pi_old) (R, T), 0 where the mask is false; clamped to +-20, where `exp` is finite and the gradient 0."""
    return torch.where(mask, logprobs - old_logprobs, 0).clamp(-20, 20)


def kl_estimate(logprobs, ref_logprobs, mask, estimator):
    """Per-token estimate (R, T) of KL(pi || ref) from tokens sampled by pi (Schulman's k1, k2, k3).

    0 where the mask is false. In a loss their expected gradients differ: k1 has 0 (only noise), k2 that of
    KL(pi || ref), k3 that of KL(ref || pi).
    """
    difference = -log_ratio(logprobs, ref_logprobs, mask)  # d = log(ref / pi)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(difference) - difference
    raise ValueError(f"kl estimator {estimator!r} is not one of k1, k2, k3")


def logprobs_and_entropy(logits, tokens, temperature, with_entropy=True, entropy_grad=False):
    """Log-probs of `tokens` (N,) and entropies of the whole distribution (N,) from `logits` (N, V), in float32.

    At the sampling temperature: the ratio of two policies is an importance weight only for the distribution that was
    sampled from. Without `entropy_grad` the entropy stays out of the graph and keeps nothing for the backward pass;
    without `with_entropy` it is not computed and None.
    """
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    logsumexp = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - logsumexp
    if not with_entropy:
        return logprobs, None
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = logsumexp - (logits.softmax(dim=-1) * logits).sum(dim=-1)
    return logprobs, entropy


def moments(values, ddof, reduce):
    """Mean and variance (float64 scalars) of `values` (N,) over all processes; `reduce` sums a tensor over them.

    In two passes: the difference of sums of squares would lose a small variance beside a large mean.
    """
    values = values.double()
    count, total = reduce(torch.stack([torch.ones_like(values).sum(), values.sum()]))
    mean = total / count.clamp(min=1)
    squares = reduce((values - mean).square().sum())
    return mean, squares / (count - ddof).clamp(min=1)


def nearly_equal(low, high):
    """Whether rewards between `low` and `high` (float64 of any shape) are equal, up to the rounding of their sums."""
    return high - low <= 1e-9 * high.abs().clamp(min=1)


def group_statistics(groups, ddof):
    """Mean, variance and standard deviation (P, 1) of the rewards (P, G) of each group, and the rows (P, G) whose
    advantage is zero: those of a group of equal rewards, and those without a reward.

    No statistic counts a NaN, a row without a reward: the mean of the others stands in for it, and adds no square.
    """
    scored = ~groups.isnan()
    filled = torch.where(scored, groups, groups.nanmean(dim=1, keepdim=True))
    scale = (groups.shape[1] - ddof) / (scored.sum(dim=1, keepdim=True).double() - ddof).clamp(min=1)
    variance = filled.var(dim=1, keepdim=True, correction=ddof) * scale
    std = filled.std(dim=1, keepdim=True, correction=ddof) * scale.sqrt()
    equal = nearly_equal(*filled.aminmax(dim=1, keepdim=True))  # the variance of six times 0.3 is not exactly 0
    return filled.mean(dim=1, keepdim=True), variance, std, equal | ~scored


def pass_at_k(correct, k):
    """Unbiased estimate (P,) of the chance that one of k completions is right, from `correct` (P, n) of n >= k samples.

    1 - C(n - c, k) / C(n, k) for c right ones (Chen et al. 2021, arXiv 2107.03374, Eq. 1), as a product that does not
    overflow.
    """
    n = correct.shape[1]
    wrong = n - correct.double().sum(dim=1, keepdim=True)  # (P, 1)
    drawn = torch.arange(k, dtype=torch.float64, device=correct.device)
    return 1 - ((wrong - drawn).clamp(min=0) / (n - drawn)).prod(dim=1)


def positions(attention_mask):
    """Position ids (R, S) that count the tokens of a left-padded row from 0."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
