"""For grpo.py --num_minibatches 4: the old log-probs are those of the moment, so every ratio is 1.

In `update` one would write `old_logprobs = logprobs.detach()`. That is also what `update` does
where a micro-batch has no old log-probs, as with one update per rollout.
"""

healthy_logprobs = add_old_and_ref_logprobs


def add_old_and_ref_logprobs(accelerator, model, reference, micro_batches, several_updates):
    healthy_logprobs(accelerator, model, reference, micro_batches, several_updates=False)
