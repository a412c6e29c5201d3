"""On-policy distillation by a KL over the teacher's k likeliest tokens and a tail.

    forward    sum of p_teacher log(p_teacher / p)
    reverse    sum of p log(p / p_teacher)

at each token that the student sampled, over the k tokens and one more outcome that has the
probability of all others. With the tail both are KLs, of k + 1 outcomes: at least 0, at most the KL
over the whole vocabulary. A sum over the k tokens alone is neither, and falls as the student's mass
leaves them. Only k log-probs of the teacher are kept for each token.

The KL is the loss itself. Subtracted from the advantage it would teach nothing, since it does not
contain the sampled token (docs/corrections.md 40). The recipe `distill` has that token alone. The
tokens on which the KL is taken are the student's, and no gradient flows through their choice, as in
arXiv 2306.13649. Rewards teach with --reward_coef only, by policy gradient without a clip.
"""

from dataclasses import replace


class Args:
    del clip_low, clip_high
    teacher: str = option("runs/teacher/model", "hub id or folder, with the student's tokenizer")
    top_k: int = option(16, "tokens of the teacher that are no tail", gt=0)
    direction: Literal["forward", "reverse"] = option("reverse", "KL from the teacher, or to it")
    reward_coef: float = option(0.0, "coefficient of the advantages of grpo.py", ge=0)
    kl_coef: float = option(0.0, "beta of an additional KL to the teacher in the loss", ge=0)


LINES = {
    "reward_functions = load_rewards(args)": """
        if args.fast:
            raise Exit("--fast: it returns no logits")
        reward_functions = load_rewards(args)
    """,
    'micro["ref_logprobs"], _ = completion_logprobs(reference, micro, args)': """
        logits = completion_logits(reference, micro)
        micro["ref_logprobs"], _ = logprobs_of(logits, micro, args)
        micro["top_tokens"], micro["top_logprobs"] = likeliest(logits, args)
        del logits
    """,
    "logprobs, entropy = completion_logprobs(model, micro, args)": """
        logits = completion_logits(model, micro)
        logprobs, entropy = logprobs_of(logits, micro, args)
    """,
    "loss = (losses * token_weights(mask, totals, args)).sum()": """
        if reference is not None:
            kl = topk_kl(logits[mask], micro["top_tokens"][mask], micro["top_logprobs"][mask], args)
            losses = losses.masked_scatter(mask, losses[mask] + kl)
            metrics.add("distill/topk_kl", kl)
        loss = (losses * token_weights(mask, totals, args)).sum()
    """,
}


def load_reference(lm, args, accelerator):
    """Load the teacher, frozen, in place of the reference of grpo.py."""
    teacher_args = replace(args, model_name_or_path=args.teacher, lora_rank=0)
    _, teacher = load_policy(teacher_args, accelerator)
    return teacher.requires_grad_(False).eval().to(accelerator.device)


group_advantages = compute_advantages


def compute_advantages(rewards, args):
    """Return the advantages (R, 1) of grpo.py, times --reward_coef."""
    return args.reward_coef * group_advantages(rewards, args)


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of each token (R, T), -r A, and diagnostics; `update` adds the top-k KL."""
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


def completion_logits(model, batch):
    """Return the logits (R, T, V) that predict the tokens of the completions."""
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return model(
        input_ids=torch.cat([batch["prompts"], batch["completions"]], dim=1),
        attention_mask=mask.long(),
        position_ids=positions(mask),
        use_cache=False,
        logits_to_keep=batch["completions"].shape[1] + 1,
    ).logits[:, :-1]  # each token is predicted at the position before it


def logprobs_of(logits, batch, args):
    """Return log-probs and entropies (R, T) of the completions, 0 outside their mask."""
    kept = batch["completion_mask"]
    values = logprobs_and_entropy(logits[kept], batch["completions"][kept], args.temperature)
    zeros = torch.zeros(kept.shape, device=kept.device)
    return [zeros.masked_scatter(kept, x) for x in values]


def completion_logprobs(model, batch, args):
    """Return log-probs and entropies (R, T) of the completions, 0 outside their mask."""
    return logprobs_of(completion_logits(model, batch), batch, args)


def likeliest(logits, args):
    """Return the k likeliest tokens (..., k) of logits (..., V), and `with_tail` of them."""
    tokens = logits.topk(min(args.top_k, logits.shape[-1] - 1)).indices  # the tail is not empty
    return tokens, with_tail(logits, tokens, args)


def with_tail(logits, tokens, args):
    """Return log-probs (..., k + 1) of the `tokens` (..., k), and of all others together."""
    logits = logits.float() / args.temperature
    tail = logits.scatter(-1, tokens, -math.inf).logsumexp(dim=-1, keepdim=True)
    total = logits.logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits.gather(-1, tokens), tail], dim=-1) - total


def topk_kl(logits, tokens, teacher, args):
    """Return the KL (N,) of logits (N, V) to or from the log-probs `teacher` (N, k + 1)."""
    student = with_tail(logits, tokens, args)
    if args.direction == "forward":
        return (teacher.exp() * (teacher - student)).sum(dim=-1)
    return (student.exp() * (student - teacher)).sum(dim=-1)
