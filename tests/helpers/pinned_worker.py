"""Started in one or several processes: a run in which each prompt has a random stream of its own.

pinned_worker.py <script> <options>

A run draws by (seed, rank, step, round), so that what is sampled depends on the number of processes. Here it depends on
the prompt, the step and the round, and all else of a run must come out the same.
"""

import sys

import torch

from common.batches import Samples, join_groups
from harness.errors import clean_exit
from testbed import script


def pinned(rollout):
    """The same completions of a prompt on whatever process, one prompt at a time, as one batch of `rollout`."""

    def by_prompt(policy, prompts, n, temperature, top_p, seed, args):
        seed, _, *place = seed
        seeds = [(seed, *place, *prompt.ids) for prompt in prompts]
        groups = []
        for prompt, own in zip(prompts, seeds, strict=True):
            batch = rollout(policy, [prompt], n, temperature, top_p, own, args)
            groups.append(Samples(batch, [prompt], [None] * n, torch.zeros(n), {}))
        return join_groups(groups).batch

    return by_prompt


if __name__ == "__main__":
    module = script(sys.argv[1])
    module.rollout = pinned(module.rollout)
    with clean_exit():
        module.main(sys.argv[2:])
