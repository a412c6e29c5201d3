"""For grpo.py: advantages are in another order than the rows, as if by `repeat`."""

healthy_advantages = compute_advantages


def compute_advantages(rewards, args):
    advantages = healthy_advantages(rewards, args).view(-1, args.group_size)
    return advantages.T.reshape(-1, 1)
