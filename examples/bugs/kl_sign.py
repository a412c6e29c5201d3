"""For grpo.py --kl_coef 0.2: the KL has the wrong sign, so the policy is paid for it."""

from dataclasses import replace

healthy_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    args = replace(args, kl_coef=-args.kl_coef)
    return healthy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs)
