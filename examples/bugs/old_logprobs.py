"""For grpo.py --num_minibatches 4: the old log-probs are those of the moment, so every ratio is 1.

In `update` one would write `old_logprobs = logprobs.detach()`. That is also what `update` does
where a micro-batch has no old log-probs. So a micro-batch that does not keep them has the same
effect.
"""

healthy_split = split_rollout


class Forgetful(dict):
    def __setitem__(self, key, value):
        if key != "old_logprobs":
            super().__setitem__(key, value)


def split_rollout(accelerator, batch, args):
    minibatches = healthy_split(accelerator, batch, args)
    return [[Forgetful(micro) for micro in micro_batches] for micro_batches in minibatches]
