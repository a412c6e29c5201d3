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


split_rows = split_rollout


def split_rollout(accelerator, batch, args):
    """Split the rollout, and add the number of tokens (R, 1) of each row's group to `totals`."""
    lengths = batch["loss_mask"].sum(dim=1)  # (R,)
    tokens = lengths.view(-1, args.group_size).sum(dim=1).repeat_interleave(args.group_size)
    minibatches = split_rows(accelerator, batch | {"group_tokens": tokens[:, None]}, args)
    for micro in (micro for micro_batches in minibatches for micro in micro_batches):
        micro["totals"] = micro["totals"] | {"group_tokens": micro.pop("group_tokens")}
    return minibatches


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): the mean over all tokens of the optimizer step, or as in Eq. 8."""
    if args.token_mean == "group":
        return loss_mask.double() / totals["group_tokens"].clamp(min=1) / totals["prompts"]
    return loss_mask.double() / totals["tokens"]
