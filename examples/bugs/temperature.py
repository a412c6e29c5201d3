"""For grpo.py --temperature 0.7: the log-probs in the loss are taken at temperature 1."""

healthy_load_policy = load_policy


def load_policy(args, tokenizer, accelerator):
    policy = healthy_load_policy(args, tokenizer, accelerator)
    policy.temperature = 1.0
    return policy
