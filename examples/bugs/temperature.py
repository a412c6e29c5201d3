"""For grpo.py --temperature 0.7: the log-probs in the loss are those of temperature 1."""

healthy_load_policy = load_policy


def load_policy(args, tokenizer, accelerator, temperature=1.0):
    return healthy_load_policy(args, tokenizer, accelerator, temperature=1.0)
