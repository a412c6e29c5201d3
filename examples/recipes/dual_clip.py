"""Dual clip: a bound on the loss of an unlikely token that became likely (arXiv 1912.09729, Eq. 5).

    L = max( min(r A, clip(r, 1-eps, 1+eps) A), c A )   where A < 0

With A < 0 the clip of PPO does not bound a ratio that grows, and a single token can dominate the
step. Beyond c the token has no gradient. c is 3 in verl.
"""


class Args:
    num_minibatches: int = option(4, "optimizer steps per pass; with one, nothing is clipped", gt=0)
    dual_clip: float = option(3.0, "c, the largest ratio where A < 0", gt=1)


LINES = {
    "losses = -torch.minimum(ratio * advantages, clipped * advantages)": """
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        bounded = torch.maximum(objective, args.dual_clip * advantages)
        losses = -torch.where(advantages < 0, bounded, objective)
    """,
    "return torch.where(loss_mask, losses, 0), stats": """
        stats["dual_clip"] = (advantages < 0) & (ratio > args.dual_clip)
        return torch.where(loss_mask, losses, 0), stats
    """,
}
