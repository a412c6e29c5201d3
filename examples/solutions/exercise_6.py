"""Exercise 6: GRPO with the weights of DAPO, under which every token counts the same."""


def token_weights(loss_mask, totals, args):
    """Weights (R, T) of sum 1 over an optimizer step: the mean over its tokens."""
    return loss_mask.double() / totals["tokens"]  # of the optimizer step, not of this micro-batch
