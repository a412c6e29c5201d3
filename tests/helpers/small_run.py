"""A run of a linear model of four weights: all that stands in the folder of a run, within milliseconds."""

import errno
import gc
import importlib
import os

import pytest
import torch
from accelerate import Accelerator

from common.batches import Completion
from harness.data import Prompt
from harness.errors import InputError
from harness.loading import load_tokenizer
from harness.run import Run

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
QUICK = "--prompts_per_step 4 --group_size 4 --eval_prompts 4 --eval_samples 4 --max_new_tokens 16".split()


class Numbers:
    """A state with floats that decimal places would lose."""

    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def start(folder, script=None, **options):
    """A run of a linear model of four weights, at its last checkpoint with `resume=True`: run, optimizer, numbers."""
    script = script or importlib.import_module("grpo")
    accelerator, model, numbers = Accelerator(cpu=True), torch.nn.Linear(2, 2), Numbers()
    args = script.Args(output_dir=folder and str(folder), **options)
    run = Run(script.__name__, args, accelerator, load_tokenizer(args))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    run.start(numbers=numbers)
    return run, optimizer, numbers


def completion(text, ids=(2, 0), truncated=False):
    """A completion as `completion_texts` gives it."""
    made = Completion(text)
    made.ids, made.truncated, made.extra = list(ids), truncated, {}
    return made


def advance(run, optimizer, save=True):
    """One step of the linear model, its row in metrics.jsonl, and a checkpoint."""
    model = run.accelerator._models[0]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log.begin_step(run.step + 1)
    run.end_step({"reward/mean": 0.5}, [Prompt([1], "1+1", None)], [completion("2")], [0.5])
    if save:
        run.save()


def refusal(folder, **options):
    """What a start in `folder` says; nothing there changes, and no model/ appears."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(InputError) as error:
        start(folder, **options)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


def no_room(*arguments, **options):
    """In the place of torch.save."""
    raise FULL


def failure(function, *arguments):
    """The line of the InputError of a call, whose run lets go of its folder, as the end of a process does."""
    try:
        function(*arguments)
    except InputError as error:
        line = str(error)
    FULL.__traceback__ = None
    gc.collect()
    assert "\n" not in line
    return line


def train(folder, *arguments):
    """A run of grpo.py as a user starts it, of two short steps."""
    importlib.import_module("grpo").main(
        [*QUICK, "--output_dir", str(folder), "--max_steps", "2", *map(str, arguments)]
    )
