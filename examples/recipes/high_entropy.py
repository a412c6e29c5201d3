"""High-entropy tokens: only the fifth of the tokens with the highest entropy learns (2506.01939).

    J = 1/sum |o_i| sum over the tokens with H_it >= tau of min(r_it A_i, clip(r_it) A_i)

tau is the quantile of the entropies of all tokens of the optimizer step, over its micro-batches and
processes. A token below it has no policy term, but counts in the mean. A KL stays on all tokens.

`--threshold micro_batch` takes the quantile of each micro-batch, as TRL does: then the gradient
depends on --micro_batch_size.

The entropies are those of the policy that sampled, which come with the old log-probs, so all passes
over a rollout train the same tokens. The paper takes those of the current policy; in the first
update of a rollout they are equal.
"""

LINES = {
    "several_updates = args.num_epochs * args.num_minibatches > 1": """
        several_updates = True  # the entropies come with the old log-probs
    """,
    'micro["old_logprobs"], _ = completion_logprobs(model, micro, args)': """
        micro["old_logprobs"], micro["entropy"] = completion_logprobs(model, micro, args)
    """,
    "step_loss = 0.0": """
        select_tokens(accelerator, micro_batches, args, metrics)
        step_loss = 0.0
    """,
}


class Args:
    share: float = option(0.2, "share of the tokens that learn", gt=0, le=1)
    threshold: Literal["step", "micro_batch"] = option("step", "tokens that share a threshold")


def of_all_processes(accelerator, values):
    """Return the values (N,) of all processes, which may have different numbers of them."""
    counts = accelerator.gather(torch.tensor([len(values)], device=values.device))
    padding = int(counts.max()) - len(values)
    gathered = accelerator.gather(torch.nn.functional.pad(values, (0, padding), value=math.nan))
    return gathered[~gathered.isnan()]


def select_tokens(accelerator, micro_batches, args, metrics):
    """Set the advantage of all other tokens to 0; a second call of a step changes nothing."""
    scopes = [micro_batches]
    if args.threshold == "micro_batch":
        scopes = [[micro] for micro in micro_batches]
    for scope in scopes:
        entropies = torch.cat([micro["entropy"][micro["loss_mask"]] for micro in scope])
        entropies = of_all_processes(accelerator, entropies).double().cpu().numpy()
        lowest = math.inf  # a step may have no tokens
        if len(entropies):
            lowest = np.quantile(entropies, 1 - args.share)
        for micro in scope:
            selected = micro["entropy"].double() >= lowest
            micro["advantages"] = micro["advantages"] * selected  # (R, T)
            metrics.add("selected/share", selected, micro["loss_mask"])
