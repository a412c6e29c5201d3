"""For grpo.py: the advantages are ordered unlike the rows, as `repeat` would order them."""

healthy_advantages = compute_advantages


def compute_advantages(rewards, args):
    advantages = healthy_advantages(rewards, args).view(-1, args.group_size)
    return advantages.T.reshape(-1, 1)
