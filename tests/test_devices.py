"""The device of a run, and that the suite sees only the CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

import conftest
import grpo
from devices import VARIABLES, asks_for_gpu
from common.run import Exit, make_accelerator, use_cpu

# --- the suite ---


@pytest.mark.parametrize(
    "line, asked",
    [
        (["-m", "gpu"], True),
        (["-xqm", "gpu", "tests"], True),
        (["-m", "gpu", "-m", "needs"], False),
        (["-m", "not needs"], False),  # selects nearly all, on the CPU
        (["-m", "gpu and"], False),
        ([], False),
    ],
    ids=str,
)
def test_gpu_mark_asks_for_a_gpu(line, asked):
    assert asks_for_gpu(line) == asked


def test_suite_sees_no_gpu():
    # Otherwise four workers share one GPU.
    assert VARIABLES["CUDA_VISIBLE_DEVICES"] == "" and VARIABLES.items() <= os.environ.items()
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert VARIABLES.items() <= json.loads(child.stdout).items()
    assert str(torch.accelerator.current_accelerator(check_available=True)) in ("None", "mps")  # no variable hides mps


def test_no_workers_on_a_gpu(monkeypatch):
    assert conftest.pytest_xdist_auto_num_workers(None) is None  # as many as xdist says
    monkeypatch.setattr(conftest, "ON_GPU", True)
    assert conftest.pytest_xdist_auto_num_workers(None) == 0


# --- the choice ---


def pretend(monkeypatch, kind):
    """Let torch report devices of this kind."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind and torch.device(kind))


@pytest.mark.parametrize(
    "kind, on_cpu",
    # MPS has no float64. The last one is an unnamed NPU.
    [(None, True), ("cuda", False), ("xpu", False), ("mps", True), ("privateuseone", False)],
)
def test_device_of_a_run(kind, on_cpu, monkeypatch):
    pretend(monkeypatch, kind)
    assert use_cpu() == on_cpu
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert use_cpu()


def test_accelerate_gets_the_device(monkeypatch):
    pretend(monkeypatch, "xpu")
    given = []

    def accelerator(self, **options):
        given.append(options["cpu"])
        raise ZeroDivisionError

    monkeypatch.setattr("common.run.Accelerator.__init__", accelerator)
    for asked in ("false", "true"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
        with pytest.raises(ZeroDivisionError):
            make_accelerator(grpo.Args())
    assert given == [False, True]


def test_fsdp2_on_a_cpu_is_refused(monkeypatch):
    """Accelerate silently trained with DDP."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(Exit, match="FSDP2 needs GPUs: use configs/ddp.yaml on a CPU"):
        make_accelerator(grpo.Args())


def test_cudnn_attention_is_off(monkeypatch):
    """With a mask its gradient can be NaN."""
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    make_accelerator(grpo.Args())
    assert asked == [False]
