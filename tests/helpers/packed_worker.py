"""As worker.py, with packed passes, as a GPU in bfloat16 has them; their attention is a loop here.

packed_worker.py <script> <folder>
"""

import sys

import torch

import attention
import worker
from common.errors import clean_exit
from common.shortcuts import packing
from testbed import pretend_gpus, script


def main(name, folder):
    module, load_policy, fill, passes = script(name), script(name).load_policy, worker.fill, []
    group_size = worker.OPTIONS["group_size"]

    def packed_policy(*inputs):
        policy = load_policy(*inputs)
        policy.packs = True
        return policy

    def packed_batch(*inputs):
        batch = fill(*inputs)
        prompts = torch.arange(len(batch["completions"]) // group_size).repeat_interleave(group_size)[:, None]
        return batch | {"prompt_index": prompts, "packed": True}

    def counted(*inputs, **options):
        passes.append(1)
        return attention.varlen_attn(*inputs, **options)

    module.load_policy, worker.fill, packing.varlen_attn = packed_policy, packed_batch, counted
    packing.let_sdpa_take_layouts()
    worker.main(name, folder)
    assert passes


if __name__ == "__main__":
    pretend_gpus()
    with clean_exit():
        main(*sys.argv[1:])
