"""For dapo.py: the mean over rows of the mean over tokens, as in grpo.py."""


def token_weights(loss_mask, totals, args):
    lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
    return loss_mask.double() / lengths / totals["rows"]
