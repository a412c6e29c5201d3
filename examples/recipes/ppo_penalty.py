"""PPO with a KL penalty in place of the clip (arXiv 1707.06347, Eq. 8 and Section 4).

    L_t = r_t A_t - b KL(pi_old, pi)_t                                                        Eq. 8

After the updates of a rollout, b is halved or doubled if KL(pi_old, pi) is off its target by more
than a factor of 1.5. The coefficient is part of each checkpoint.
"""


class Args:
    penalty_coef: float = option(1.0, "b at first", gt=0)
    penalty_target: float = option(0.01, "KL(pi_old, pi) per token that b is moved towards", gt=0)
    del clip_low, clip_high, dual_clip


LINES = {
    "if 0 < args.dual_clip <= 1:": "",
    'raise Exit(f"--dual_clip {args.dual_clip}: must be above 1 (0 turns it off)")': "",
    "checkpoints = run.Checkpoints(accelerator, folder, args, sampler=sampler)": """
        penalty = kl_penalty(args)
        checkpoints = run.Checkpoints(accelerator, folder, args, sampler=sampler, penalty=penalty)
    """,
}


class Penalty:
    """The coefficient b."""

    def __init__(self, args):
        self.coef = args.penalty_coef
        self.target = args.penalty_target

    def move(self, kl):
        if kl < self.target / 1.5:
            self.coef /= 2
        elif kl > self.target * 1.5:
            self.coef *= 2

    def state_dict(self):
        return {"coef": self.coef}

    def load_state_dict(self, state):
        self.coef = state["coef"]


def kl_penalty(args):
    """Return the coefficient of this run, which `args` carries to where it is used."""
    if not hasattr(args, "penalty"):
        args.penalty = Penalty(args)
    return args.penalty


def policy_loss(
    logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None, entropy=None
):
    """Return the loss of each token (R, T), -L of Eq. 8 before averaging, and diagnostics."""
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    # k1 of KL(old || new): on samples of the old policy its gradient is that of the KL.
    losses = -(ratio * advantages + kl_penalty(args).coef * log_ratios)
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new), on samples of the old policy
        "ratio_max": ratio,
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
    if args.entropy_coef:
        losses = losses - args.entropy_coef * entropy
    return torch.where(loss_mask, losses, 0), stats


update_policy = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    """Train on one rollout, and move b by the KL between the policies before and after."""
    rows = list(range(len(batch["completions"])))
    micro_batches, _ = split(accelerator, batch, rows, args)
    before = logprobs_of(model, micro_batches, args)
    update_policy(accelerator, model, reference, optimizer, batch, args, metrics)
    after = logprobs_of(model, micro_batches, args)
    kl = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # sum, tokens
    for old, new, micro in zip(before, after, micro_batches, strict=True):
        estimate = kl_estimate(old, new, micro["loss_mask"], "k3")  # KL(old || new)
        metrics.add("policy/kl_old_new", estimate, micro["loss_mask"])
        kl += torch.stack([estimate.double().sum(), micro["loss_mask"].sum()])
    total, tokens = accelerator.reduce(kl).tolist()
    metrics.add("policy/penalty_coef", kl_penalty(args).coef)
    kl_penalty(args).move(total / max(tokens, 1))


@torch.no_grad()
def logprobs_of(model, micro_batches, args):
    """Return the log-probs (R, T) of each micro-batch under the current policy."""
    return [completion_logprobs(model, micro, args)[0] for micro in micro_batches]
