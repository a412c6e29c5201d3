"""PPO whose KL coefficient beta moves towards a target KL (arXiv 1909.08593, Section 2.2).

After each rollout beta is multiplied by 1 + e N / horizon, where e is the relative distance of the
KL from its target, clipped to +-0.2, and N the number of completions. The KL is that of a token, as
in verl. The factor stays within 0.5 and 2. beta is part of each checkpoint.
"""


class Args:
    kl_coef: float = option(0.05, "beta at first", gt=0)
    kl_target: float = option(0.01, "KL per token that beta is moved towards", gt=0)
    kl_horizon: float = option(10000.0, "completions over which beta is moved", gt=0)
    del kl_in, kl_estimator  # the KL is in the rewards


LINES = {
    "checkpoints = run.Checkpoints(accelerator, folder, args, sampler=sampler)": """
        beta = adaptive_kl(args)
        checkpoints = run.Checkpoints(accelerator, folder, args, sampler=sampler, beta=beta)
    """,
    'ref_logprobs = micro.get("ref_logprobs") if args.kl_in == "loss" else None': """
        ref_logprobs = None
    """,
    "kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)": """
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, "k3")
    """,
}


class AdaptiveKL:
    """The coefficient beta."""

    def __init__(self, args):
        self.coef = args.kl_coef
        self.target = args.kl_target
        self.horizon = args.kl_horizon

    def move(self, kl, completions):
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= min(max(1 + error * completions / self.horizon, 0.5), 2)

    def state_dict(self):
        return {"coef": self.coef}

    def load_state_dict(self, state):
        self.coef = state["coef"]


def adaptive_kl(args):
    """Return the coefficient of this run, which `args` carries to where it is used."""
    if not hasattr(args, "beta"):
        args.beta = AdaptiveKL(args)
    return args.beta


def shape_rewards(rewards, kl, completion_mask, args):
    """Return rewards (R, T): minus the KL (R, T), and the row's reward (R,) at its last token."""
    last = completion_mask.sum(dim=1, keepdim=True).clamp(min=1) - 1
    return (-adaptive_kl(args).coef * kl).scatter_add(1, last, rewards[:, None].to(kl.dtype))


update_policy = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    """Train on one rollout, and move beta by the mean KL of its completions."""
    update_policy(accelerator, model, reference, optimizer, batch, args, metrics)
    metrics.add("policy/kl_coef", adaptive_kl(args).coef)
    if reference is None:
        return
    sums = torch.stack([torch.as_tensor(x) for x in metrics.sums["policy/kl_old_ref"]])
    total, rows = accelerator.reduce(sums.to(accelerator.device)).tolist()
    adaptive_kl(args).move(total / max(rows, 1), args.prompts_per_step * args.group_size)
