"""KL-Cov: a penalty on the few tokens whose log-prob and advantage vary together (2505.22617).

    loss = -r A + beta |log r| for the selected tokens, -r A for all others

Selected are the `--share` of the tokens with the highest

    (log pi(o_t) - mean log pi) (A_t - mean A),

the tokens that lower the entropy most: likely ones with a high advantage, and unlikely ones with a
low one. Means and ranks are over all tokens of the optimizer step, over its micro-batches and
processes, and equal covariances are selected together. There is no clip. The absolute log-ratio is
that of the authors' code. At ratio 1 it has no gradient, so that only later updates are penalized.

`--threshold micro_batch` selects within each micro-batch, and at least one token there, as verl
does: then the gradient depends on --micro_batch_size. The log-probs are those of the current
policy, which costs one more forward for each update.
"""

from common.masked import moments

LINES = {
    "step_loss = 0.0": """
        select_tokens(accelerator, model, micro_batches, args, metrics)
        step_loss = 0.0
    """,
    "loss = (losses * token_weights(mask, totals, args)).sum()": """
        penalties = args.penalty_coef * log_ratio(logprobs, old_logprobs, mask).abs()
        losses = losses + penalties * micro["selected"]
        loss = (losses * token_weights(mask, totals, args)).sum()
    """,
}


class Args:
    del clip_low, clip_high  # the penalty replaces the clip
    share: float = option(
        0.0002, "share of the tokens that are penalized, at least one", gt=0, le=1
    )
    penalty_coef: float = option(1.0, "beta, the coefficient of the penalty", ge=0)
    threshold: Literal["step", "micro_batch"] = option("step", "tokens that share a threshold")


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), -r A, and diagnostics; `update` adds the penalty."""
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    losses = -ratio * advantages
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new), on samples of the old policy
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    return torch.where(loss_mask, losses, 0), stats


def of_all_processes(accelerator, values):
    """Return the values (N,) of all processes, which may have different numbers of them."""
    counts = accelerator.gather(torch.tensor([len(values)], device=values.device))
    padding = int(counts.max()) - len(values)
    gathered = accelerator.gather(torch.nn.functional.pad(values, (0, padding), value=math.nan))
    return gathered[~gathered.isnan()]


@torch.no_grad()
def current_logprobs(model, micro, args):
    """Return the log-probs (R, T) of the policy before this update."""
    return completion_logprobs(model, micro, args)[0]


def select_tokens(accelerator, model, micro_batches, args, metrics):
    """Add the mask `selected` (R, T) to each micro-batch of an optimizer step."""
    for micro in micro_batches:
        micro["logprobs"] = current_logprobs(model, micro, args)
    scopes = [micro_batches]
    if args.threshold == "micro_batch":
        scopes = [[micro] for micro in micro_batches]
    for scope in scopes:
        mean_logprob, _ = moments(tokens_of(scope, "logprobs"), 0, accelerator.reduce)
        mean_advantage, _ = moments(tokens_of(scope, "advantages"), 0, accelerator.reduce)
        for micro in scope:
            deviations = micro["advantages"] - mean_advantage
            micro["covariance"] = (micro["logprobs"] - mean_logprob) * deviations  # (R, T)
        covariances = of_all_processes(accelerator, tokens_of(scope, "covariance"))
        lowest = math.inf  # a step may have no tokens
        if len(covariances):
            number = max(1, int(args.share * len(covariances)))
            lowest = covariances.topk(number).values[-1]
        for micro in scope:
            micro["selected"] = micro["loss_mask"] & (micro["covariance"] >= lowest)
            metrics.add("selected/share", micro["selected"], micro["loss_mask"])


def tokens_of(micro_batches, name):
    """Return the values (N,) of a column, (R, T) or (R, 1), at the tokens of the loss."""
    masks = [micro["loss_mask"] for micro in micro_batches]
    pairs = zip(micro_batches, masks, strict=True)
    return torch.cat([micro[name].expand(mask.shape)[mask] for micro, mask in pairs])
