import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import shutil
import sys

import pytest
from accelerate.state import AcceleratorState, GradientState

from common.errors import Process
from common.harness.run import close
from small_run import advance, start

PROCESS = {name: getattr(Process, name) for name in ("step", "bar", "training", "signal")}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Accelerate, and what a signal has to know of a run, keep their state in singletons; each test starts without.
    One thread: the models here are tiny."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    for name, value in PROCESS.items():
        monkeypatch.setattr(Process, name, value)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def ended(tmp_path_factory):
    """The folder of a run of the linear model of small_run.py that has ended, with a checkpoint."""
    run, optimizer, numbers = start(tmp_path_factory.mktemp("ended"))
    numbers.values = [0.1 + 0.2]
    advance(run, optimizer)
    close(run.accelerator)
    return run.folder


@pytest.fixture
def checkpoint(ended, tmp_path):
    """A checkpoint in a copy of that folder."""
    return shutil.copytree(ended, tmp_path / "run") / "checkpoints" / "step-00000001"


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with its cache in the test's own folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.fixture
def no_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
