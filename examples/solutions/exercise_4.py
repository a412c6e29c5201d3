"""Exercise 4: GRPO with the ratio of GSPO, one per completion.

`token_weights` takes the mean over rows of the mean over tokens. As all tokens of a row have the
same loss, this is exactly Eq. 5 of arXiv 2507.18071.
"""


class Args:
    num_minibatches: int = option(4, "optimizer steps per pass; with one, nothing is clipped", gt=0)
    clip_low: float = option(3e-4, "s is clipped at 1 - this where A < 0", gt=0, le=1)
    clip_high: float = option(4e-4, "s is clipped at 1 + this where A > 0", gt=0)
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), by the ratio of its row, and diagnostics."""
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (R, 1)
    log_s = log_ratios.sum(dim=1, keepdim=True) / lengths  # (R, 1), Eq. 7
    ratio = log_s.exp().expand_as(log_ratios)  # the same along a row
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    stats = {
        "approx_kl": log_ratios.exp() - 1 - log_ratios,  # of the tokens, as before
        "clip_fraction_low": (advantages < 0) & (ratio < 1 - args.clip_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1 + args.clip_high),
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    return torch.where(loss_mask, losses, 0), stats
