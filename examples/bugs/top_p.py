"""For grpo.py: training samples with top-p 0.9, and scores with the whole distribution."""

healthy_rollout = rollout


def rollout(policy, prompts, n, temperature, top_p, seed, args):
    if seed[2] > 0:  # the step; an evaluation has 0
        top_p = 0.9
    return healthy_rollout(policy, prompts, n, temperature, top_p, seed, args)
