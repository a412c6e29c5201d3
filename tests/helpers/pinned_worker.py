"""Started in one or several processes: a run in which each prompt has a random stream of its own.

pinned_worker.py <script> <options>

A run draws by (seed, rank, step, round), so that what is sampled depends on the number of processes. Here it depends on
the prompt, the step and the round, and all else of a run must come out the same.
"""

import sys

import torch
from torch.nn.utils.rnn import pad_sequence

from common.batches import left_pad
from common.errors import clean_exit
from testbed import script


def pinned(rollout):
    """The same completions of a prompt on whatever process, one prompt at a time, as one batch of `rollout`."""

    def by_prompt(model, prompts, n, temperature, top_p, seed, args):
        seed, _, *place = seed
        alone = [rollout(model, [p], n, temperature, top_p, (seed, *place, *p.ids), args) for p in prompts]
        ids, mask = left_pad([prompt.ids for prompt in prompts], model.pad_token, "cpu")
        batch = {"prompts": ids.repeat_interleave(n, dim=0), "prompt_mask": mask.repeat_interleave(n, dim=0)}
        for name, fill in (("completions", model.pad_token), ("completion_mask", False), ("rollout_logprobs", 0.0)):
            rows = [row for part in alone for row in part[name]]
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
        batch["truncated"] = torch.cat([part["truncated"] for part in alone])
        return batch | model.prompt_columns(len(prompts), n)

    return by_prompt


if __name__ == "__main__":
    module = script(sys.argv[1])
    module.rollout = pinned(module.rollout)
    with clean_exit():
        module.main(sys.argv[2:])
