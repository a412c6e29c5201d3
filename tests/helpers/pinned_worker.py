"""Started in one or several processes: a run in which each prompt has a random stream of its own.

pinned_worker.py <script> <options>

A run draws by (seed, rank, step, round), so that what is sampled depends on the number of processes. Here it depends on
the prompt, the step and the round, and all else of a run must come out the same.
"""

import sys

import torch
from torch.nn.utils.rnn import pad_sequence

from common.run import clean_exit
from testbed import script


def pinned(rollout):
    """Sample prompt by prompt, the same completions on any process; return them as one batch of `rollout`."""

    def by_prompt(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
        seed, _, *place = seed
        groups = []
        for prompt in prompts:
            own = (seed, *place, *prompt.ids)
            groups.append(rollout(lm, tokenizer, [prompt], n, temperature, top_p, own, args))
        return {name: joined(name, [group[name] for group in groups]) for name in groups[0]}

    return by_prompt


def joined(name, columns):
    """Concatenate the rows of several tensors, padded as in a rollout."""
    rows = [row for column in columns for row in column]
    if rows[0].dim() == 0:
        return torch.stack(rows)
    side = "left" if name.startswith("prompt") else "right"
    return pad_sequence(rows, batch_first=True, padding_side=side)


if __name__ == "__main__":
    module = script(sys.argv[1])
    module.rollout = pinned(module.rollout)
    with clean_exit():
        module.main(sys.argv[2:])
