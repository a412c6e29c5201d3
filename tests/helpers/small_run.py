"""A run of a linear model: everything that a run writes, within milliseconds."""

import errno
import gc
import importlib
import os

import pytest
import torch

from common.batches import Completion, Samples
from harness.data import Prompt
from harness.errors import InputError
from harness.metrics import Metrics
from harness.run import Run
from testbed import metric_rows

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
    """Return a run of a linear model, at its newest checkpoint with `resume=True`, its optimizer, and its numbers."""
    script = script or importlib.import_module("grpo")
    model, numbers = torch.nn.Linear(2, 2), Numbers()
    run = Run(script.__name__, script.Args(output_dir=folder and str(folder), **options))
    model, optimizer = run.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    run.start(model, numbers=numbers)
    return run, optimizer, numbers


def completion(text, ids=(2, 0), truncated=False):
    """Return a completion as `decode_completions` does."""
    return Completion(text, list(ids), truncated)


def samples_of(rewards, texts=None, prompts=1, tokens=2, **terms):
    """Return `Samples` with these rewards [also the accuracy], completions of `tokens` tokens, and `prompts` prompts."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.ones(len(rewards), tokens, dtype=torch.long)
    batch = {"completions": ids, "completion_mask": ids.bool(), "truncated": torch.zeros(len(rewards)).bool()}
    completions = [completion(text, row) for text, row in zip(texts or ["2"] * len(rewards), ids.tolist(), strict=True)]
    terms = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()} or {"accuracy": rewards}
    return Samples(batch, [Prompt([1], "1+1", None)] * prompts, completions, rewards, terms)


def advance(run, optimizer, save=True):
    """Take a step of the linear model, write its row to metrics.jsonl, and save a checkpoint."""
    run.model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log.begin_step(run.step + 1)
    metrics = Metrics()
    metrics.add("reward/mean", 0.5)
    run.log_step(metrics, samples_of([0.5]))
    run.end_step()
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
    words = [*QUICK, "--output_dir", folder, "--max_steps", 2, *arguments]
    importlib.import_module("grpo").main(list(map(str, words)))


def same_run(a, b):
    """Assert that two runs have the same metrics, samples and weights."""
    assert metric_rows(a) == metric_rows(b)
    names = [name for name in ("samples.jsonl", "model/model.safetensors") if (a / name).exists()]
    assert names and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
