"""For grpo.py: the mean over prompts of the mean over a group's tokens, as DAPO's Eq. 8 is printed."""


def token_weights(loss_mask, totals, args):
    return loss_mask.double() / totals["group_tokens"].clamp(min=1) / totals["prompts"]
