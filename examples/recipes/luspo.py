"""LUSPO: the loss of GSPO, times the length of the completion (2602.05261).

GSPO's ratio has the gradient of the mean of the log-probs, so that each token of a row weighs
1/|o_i|: a right answer is reinforced more per token the shorter it is, and a wrong one pushed down
less the longer it is. Times |o_i| all tokens weigh the same, at ratio 1 those of RLOO.
"""


def token_weights(loss_mask, totals, args):
    """Return weights (R, T): the mean over rows of the length times the mean over tokens."""
    return loss_mask.double() / totals["rows"]
