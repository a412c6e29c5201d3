"""For grpo.py: training samples with top-p 0.9, and scores with the whole distribution."""

healthy_rollout = rollout


def rollout(policy, prompts, n, temperature, top_p, seed, args):
    _, _, step, _ = seed
    if step > 0:  # an evaluation has step 0
        top_p = 0.9
    return healthy_rollout(policy, prompts, n, temperature, top_p, seed, args)
