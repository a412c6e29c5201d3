"""Token mean: the loss of GRPO, averaged over all tokens of an optimizer step (arXiv 2503.14476).

This is one of DAPO's four changes, and TRL's default, loss_type dapo. All tokens have the same
weight, so a completion counts by its length. Groups are not filtered, and long completions are not
penalized: dapo.py does both. There is no KL.

DAPO's code averages over a step, but its Eq. 8 averages over the tokens of a group and then over
groups: --token_mean group.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    token_mean: Literal["step", "group"] = option("step", "tokens that share one mean")


LINES = {
    "loss = (losses * token_weights(mask, totals, args)).sum()": """
        totals["group_tokens"] = micro["group_tokens"]
        loss = (losses * token_weights(mask, totals, args)).sum()
    """
}

update_rows = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    """Train on one rollout, whose rows know the number of tokens (R, 1) of their group."""
    lengths = batch["loss_mask"].sum(dim=1)  # (R,)
    tokens = lengths.view(-1, args.group_size).sum(dim=1).repeat_interleave(args.group_size)
    batch["group_tokens"] = tokens[:, None]
    update_rows(accelerator, model, reference, optimizer, batch, args, metrics)


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): the mean over all tokens of the optimizer step, or as in Eq. 8."""
    if args.token_mean == "group":
        return loss_mask.double() / totals["group_tokens"].clamp(min=1) / totals["prompts"]
    return loss_mask.double() / totals["tokens"]
