"""For grpo.py: one mean and one standard deviation for the whole batch instead of each group."""

from dataclasses import replace

healthy_advantages = compute_advantages


def compute_advantages(rewards, args):
    return healthy_advantages(rewards, replace(args, group_size=len(rewards)))
