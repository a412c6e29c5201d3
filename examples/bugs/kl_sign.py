"""For grpo.py --kl_coef 0.2: the policy is paid for the KL, whose sign is wrong."""

from dataclasses import replace

healthy_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    args = replace(args, kl_coef=-args.kl_coef)
    return healthy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs)
