"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347, Eq. 5 and 6).

A sigmoid of the ratio r replaces GRPO's clipped ratio:

    f(r) = 4 / tau sigmoid(tau (r - 1)), with tau = tau_positive where A > 0, else tau_negative

Its slope is 1 at r = 1 and falls on both sides, so no token loses its gradient at once. The larger
tau makes it fall faster where A is negative. Only updates after the first one of a rollout differ
from GRPO, so there are four. The rest is GRPO's, without its KL.
"""


class Args:
    num_minibatches: int = option(4, "optimizer steps per pass; with one this is GRPO", gt=0)
    del clip_low, clip_high  # the sigmoid replaces them
    tau_positive: float = option(1.0, "steepness of the gate where A > 0", gt=0)
    tau_negative: float = option(1.05, "steepness of the gate elsewhere", gt=0)
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), -f(r) A, and diagnostics."""
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    tau = torch.full_like(ratio, args.tau_negative).masked_fill(advantages > 0, args.tau_positive)
    gate = (tau * (ratio - 1)).sigmoid()
    losses = -4 / tau * gate * advantages
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new), on samples of the old policy
        "gate_slope": 4 * gate * (1 - gate),  # the share of a token's gradient that is left
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    return torch.where(loss_mask, losses, 0), stats
