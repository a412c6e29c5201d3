"""Off-policy sequence mask: bad completions that the policy has left do not count (2512.02556).

    M_i = 0 where A_i < 0 and 1/|o_i| sum over t of log(pi_old / pi) > delta, else 1    (section 3.1)

multiplies the clipped objective of a row. The policy finds such a completion much less likely than
the policy that sampled it did, and pushing it down further teaches little. A good completion stays,
however far it is. The mask is of rows: with an advantage for each token their mean decides, where
slime looks at each token's own and masks a part of the row. A masked row still counts in the mean,
and keeps its KL.

In the paper pi_old is the inference engine; here it is the training forward before the first
update, as in grpo.py. delta is our choice. In the first update of a rollout nothing is masked.
"""


class Args:
    num_minibatches: int = option(4, "optimizer steps per pass; with one, nothing is masked", gt=0)
    max_divergence: float = option(0.1, "delta, the largest mean of log(pi_old / pi)", gt=0)
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)


def off_policy_rows(logprobs, old_logprobs, advantages, loss_mask, args):
    """Return the mask (R, 1) of the rows that leave the loss."""
    lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (R, 1)
    log_ratios = log_ratio(logprobs.detach(), old_logprobs, loss_mask)  # of pi to pi_old
    divergence = -log_ratios.sum(dim=1, keepdim=True) / lengths
    advantage = torch.where(loss_mask, advantages, 0).sum(dim=1, keepdim=True) / lengths
    return (advantage < 0) & (divergence > args.max_divergence)


clipped_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of grpo.py without the policy terms of the masked rows."""
    masked = off_policy_rows(logprobs, old_logprobs, advantages, loss_mask, args)
    advantages = advantages.masked_fill(masked, 0)
    inputs = logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs
    losses, stats = clipped_loss(*inputs)
    return losses, stats | {"masked_rows": masked}
