"""For grpo.py and gspo.py: noise of 0.05 on the old log-probs, as another engine or another routing makes it."""

exact_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None, entropy=None):
    noise = 0.05 * torch.randn(old_logprobs.shape)
    return exact_loss(logprobs, old_logprobs + noise, advantages, loss_mask, args, ref_logprobs, entropy)
