"""For grpo.py --temperature 0.7: the log-probs in the loss are those of temperature 1."""

from dataclasses import replace

healthy_logprobs = completion_logprobs


def completion_logprobs(model, batch, args):
    return healthy_logprobs(model, batch, replace(args, temperature=1.0))
