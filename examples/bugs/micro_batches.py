"""For ppo.py --micro_batch_size 16: a mean over each micro-batch, and then the mean of these."""


def token_weights(loss_mask, totals, args):
    number = totals["rows"] / len(loss_mask)  # of micro-batches in the optimizer step
    return loss_mask / loss_mask.sum() / number
