"""For grpo.py --num_minibatches 4: the old log-probs are the current ones, so every ratio is 1.

The usual way to get there is `old_logprobs = logprobs.detach()` in `update`, which is right only
with one update per rollout; `update` does it there, when a micro-batch has no old log-probs.
"""

LINES = {"several_updates = args.num_epochs * args.num_minibatches > 1": "several_updates = False"}
