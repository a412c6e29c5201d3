"""verl's loss, averages and clip metrics, written from what they are said to be.

Its loss is the clip of PPO with dual clip; `pg_clipfrac` is the share of tokens whose clipped loss is the larger one,
`pg_clipfrac_lower` that of tokens with A < 0 where c |A| is the smaller one, `ppo_kl` the mean of old less new.
"""

import torch

# of the tokens of batch B1, for PPO
ADVANTAGES = [[0.5, -0.3, 1.0, 0, 0], [-1.0, 0.4, -0.6, 0.2, -0.8], [-1.2, -0.7, 0, 0, 0], [0.9, 0.9, -0.1, 0.3, 0]]


def pg_losses(old, new, advantages, low, high, c):
    """Token by token, and which of the bounds has acted."""
    losses, clipped, lower = (torch.zeros_like(new) for _ in range(3))
    for i in range(len(new)):
        for t in range(new.shape[1]):
            ratio, A = (new[i, t] - old[i, t]).exp(), advantages[i, t]
            plain, bounded = -A * ratio, -A * min(max(ratio, 1 - low), 1 + high)
            losses[i, t] = larger = max(plain, bounded)
            clipped[i, t] = bounded > plain
            if A < 0:
                losses[i, t], lower[i, t] = min(-A * c, larger), larger > -A * c
    return losses, clipped, lower


def averaged(losses, mask, mode, scale=None):
    """`loss_agg_mode` over a whole optimizer step."""
    rows = [row[valid] for row, valid in zip(losses, mask, strict=True)]
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "seq-mean-token-sum":
        return sum(row.sum() for row in rows) / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(row.mean() for row in rows) / len(rows)
    assert mode == "seq-mean-token-sum-norm"
    return sum(row.sum() for row in rows) / (scale or mask.shape[1])  # no division by the rows
