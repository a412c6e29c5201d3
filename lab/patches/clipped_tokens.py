"""For gspo.py: logs the share of tokens in clipped rows, the unit of GSPO's Fig. 2; it trains on the same losses."""

row_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None, entropy=None):
    losses, stats = row_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs, entropy)
    clipped = stats["clip_fraction_low"] | stats["clip_fraction_high"]  # (R, 1)
    return losses, stats | {"clipped_tokens": clipped.expand_as(loss_mask)}
