"""Exercise 3: GRPO with the weights of DAPO, where every token counts the same."""


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): the mean over all tokens of the optimizer step."""
    return loss_mask.double() / totals["tokens"]  # of the optimizer step, not of this micro-batch
