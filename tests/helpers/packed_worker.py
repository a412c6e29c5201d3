"""worker.py with packed forwards, as on a GPU in bfloat16; their attention is a loop here.

packed_worker.py <script> <folder>
"""

import sys

import attention
import worker
from fast import packing
from common.run import clean_exit
from testbed import pretend_gpus, script


def main(name, folder):
    module, passes = script(name), []
    load_policy = module.load_policy

    def packed_policy(*inputs):
        policy = load_policy(*inputs)
        attention.pack(policy)
        return policy

    def counted(*inputs, **options):
        passes.append(1)
        return attention.varlen_attn(*inputs, **options)

    module.load_policy, packing.varlen_attn = packed_policy, counted
    packing.register_packed_sdpa()
    worker.main(name, folder)
    assert passes


if __name__ == "__main__":
    pretend_gpus()
    with clean_exit():
        main(*sys.argv[1:])
