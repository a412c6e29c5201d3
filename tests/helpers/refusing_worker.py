"""Run grpo.py in two processes, with a check that fails only on the second.

refusing_worker.py OPTIONS         those of grpo.py
"""

import os
import sys

import grpo
from fast import shortcuts
from common.run import clean_exit


def refuse(lm):
    raise RuntimeError("something is wrong here alone")


if os.environ["RANK"] == "1":
    shortcuts.has_plain_cache = refuse
with clean_exit():
    grpo.main(sys.argv[1:])
