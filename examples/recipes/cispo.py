"""CISPO: Clipped Importance Sampling Policy Optimization (arXiv 2506.13585, Eq. 4 and 5).

The importance weight is clipped and detached, and multiplies A log pi, so a token beyond the clip
keeps its gradient. All tokens of an optimizer step have the same weight, and there is no KL. There
is no lower bound (--clip_low 1.0, since a ratio cannot fall below 0). The upper bound of the
weight, 5, is our choice.
"""


class Args:
    num_minibatches: int = option(4, "optimizer steps per pass; with one, nothing is clipped", gt=0)
    clip_low: float = option(1.0, "the weight is at least 1 - this", gt=0, le=1)
    clip_high: float = option(4.0, "the weight is at most 1 + this", gt=0)
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), -weight A log pi, and diagnostics."""
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    weight = ratio.clamp(1 - args.clip_low, 1 + args.clip_high).detach()
    losses = -weight * advantages * logprobs
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new), on samples of the old policy
        "clip_fraction_low": ratio < 1 - args.clip_low,
        "clip_fraction_high": ratio > 1 + args.clip_high,
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    return torch.where(loss_mask, losses, 0), stats


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): the mean over all tokens of the optimizer step."""
    return loss_mask.double() / totals["tokens"]
