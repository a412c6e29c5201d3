"""For ppo.py --micro_batch_size 16: the mean over micro-batches of their token means."""


def token_weights(loss_mask, totals, args):
    micro_batches = totals["rows"] / len(loss_mask)  # in the optimizer step
    return loss_mask / loss_mask.sum() / micro_batches
