"""GMPO: Geometric-Mean Policy Optimization (arXiv 2507.20673).

The ratio of a completion is the geometric mean of its tokens' ratios, as in GSPO, but each token is
clipped before the mean, in log space and on one side:

    J_i = A_i exp( 1/|o_i| sum_t m_t ),  m_t = min(log r_t, 0.4) if A_i > 0, else max(log r_t, -0.4)

A token beyond its bound has no gradient, and the others of the row keep theirs; GSPO clips the
whole row. The bounds are exp(-0.4) and exp(0.4), far wider than GRPO's. There is no KL.
"""

from common.masked import log_ratio


class Args:
    clip_low: float = option(0.4, "a token's log-ratio is at least minus this where A < 0", gt=0)
    clip_high: float = option(0.4, "a token's log-ratio is at most this where A > 0", gt=0)
    del ratio_level  # tokens are clipped, rows have the ratio


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), -J of its row, and diagnostics.

    Log-probs are (R, T), advantages (R, 1), the mask is boolean.
    """
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    from_above = log_ratios.clamp(max=args.clip_high)
    from_below = log_ratios.clamp(min=-args.clip_low)
    clipped = torch.where(advantages > 0, from_above, from_below)
    lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (R, 1)
    ratio = (clipped.sum(dim=1, keepdim=True) / lengths).exp()  # (R, 1)
    losses = (-ratio * advantages).expand_as(log_ratios)
    stats = {
        "approx_kl": log_ratios.exp() - 1 - log_ratios,  # k3 of KL(old || new)
        "clip_fraction_low": (advantages < 0) & (log_ratios < -args.clip_low),
        "clip_fraction_high": (advantages > 0) & (log_ratios > args.clip_high),
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    return torch.where(loss_mask, losses, 0), stats
