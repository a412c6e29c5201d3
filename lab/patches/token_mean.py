"""For grpo.py: the mean over all tokens of an optimizer step, as in dapo.py, in place of the mean over rows."""


def token_weights(loss_mask, totals, args):
    return loss_mask.double() / max(totals["tokens"], 1)
