"""DPPO: Divergence Proximal Policy Optimization, binary total variation (arXiv 2602.04879).

GRPO's clip looks at how far a token's ratio is from 1. This one looks at how far its probability
moved:

    loss = -M r A,  M = 0 where |pi - pi_old| > delta and the ratio r moves away from 1, else 1

It moves away where A > 0 and r > 1, or A < 0 and r < 1. An unlikely token may grow by any factor as
long as it stays unlikely; a likely one is stopped sooner. M has no gradient. In the paper pi_old is
the sampler, whose log-probs come with its tokens; here it is the training forward, as in grpo.py.

`--square_coef` adds a penalty (log r)^2 for every token, also where M is 0, which pulls back to the
sampler what the mask only stops: prime-rl's default loss, after Kimi K2.5 (2602.02276). Unlike k2
it has no factor of one half.

The authors' code also caps r at a constant; here `log_ratio` does, at e^20. Weights and advantages
are GRPO's, and there is no KL.
"""


class Args:
    num_minibatches: int = option(4, "optimizer steps per pass; with one this is GRPO", gt=0)
    del clip_low, clip_high  # the divergence replaces them
    max_divergence: float = option(0.15, "delta, how far a probability may move", gt=0, lt=1)
    square_coef: float = option(0.0, "coefficient of the squared log-ratio (0: off)", ge=0)
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), -M r A plus the square, and diagnostics."""
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    old_probs = torch.where(loss_mask, old_logprobs, 0).exp()
    new_probs = torch.where(loss_mask, logprobs.detach(), 0).exp()
    moved = new_probs - old_probs  # above 0 exactly where the ratio is above 1
    too_low = (advantages < 0) & (moved < -args.max_divergence)
    too_high = (advantages > 0) & (moved > args.max_divergence)
    losses = (-ratio * advantages).masked_fill(too_low | too_high, 0)
    losses = losses + args.square_coef * log_ratios.square()
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new), on samples of the old policy
        "clip_fraction_low": too_low,
        "clip_fraction_high": too_high,
        "moved_max": moved.abs(),
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    return torch.where(loss_mask, losses, 0), stats
