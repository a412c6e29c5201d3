"""For grpo.py: training samples with top-p 0.9, but its log-probs are of the whole distribution."""

healthy_rollout = rollout


def rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
    if seed[2] > 0:  # the step, 0 in an evaluation
        top_p = 0.9
    return healthy_rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args)
