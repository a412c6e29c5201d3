"""For grpo.py --num_minibatches 4: the old log-probs are the current ones, so every ratio is 1.

The usual way to get there is `old_logprobs = logprobs.detach()` in `update`, which is right only
with one update per rollout; `update` does it there, when a micro-batch has no old log-probs.
"""

healthy_logprobs = add_old_and_ref_logprobs


def add_old_and_ref_logprobs(accelerator, model, reference, micro_batches, several_updates):
    healthy_logprobs(accelerator, model, reference, micro_batches, several_updates=False)
