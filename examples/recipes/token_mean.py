"""Token mean: the loss of GRPO, averaged over all tokens of an optimizer step (DAPO, arXiv 2503.14476, Eq. 8).

It is the one of DAPO's four changes that TRL has as its default, loss_type dapo. All tokens weigh the
same, so that a completion counts by its length. Groups are not filtered, and long completions are not
penalized: dapo.py does that too. There is no KL.
"""


class Args:
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)


def token_weights(loss_mask, totals, args):
    """Weights (R, T) of sum 1 over an optimizer step: the mean over its tokens."""
    return loss_mask.double() / totals["tokens"]
