"""Which device a run takes, its random numbers; and that the suite sees none but the CPU."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch

import conftest
import grpo
from common.sampling import seeded_sampling
from devices import VARIABLES, asks_for_gpu
from harness.launch import make_accelerator, use_cpu

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
def test_only_the_mark_on_the_command_line_asks_for_a_gpu(line, asked):
    assert asks_for_gpu(line) == asked


def test_this_process_and_what_it_starts_see_no_gpu():
    # Four workers ran a suite that was written for a CPU on one GPU.
    assert VARIABLES["CUDA_VISIBLE_DEVICES"] == "" and VARIABLES.items() <= os.environ.items()
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert VARIABLES.items() <= json.loads(child.stdout).items()
    assert str(torch.accelerator.current_accelerator(check_available=True)) in ("None", "mps")  # no variable hides mps


def test_on_a_gpu_there_are_no_workers(monkeypatch):
    assert conftest.pytest_xdist_auto_num_workers(None) is None  # as many as xdist says
    monkeypatch.setattr(conftest, "ON_GPU", True)
    assert conftest.pytest_xdist_auto_num_workers(None) == 0


# --- the choice ---


def pretend(monkeypatch, kind):
    """torch says that it has devices of this kind."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind and torch.device(kind))


@pytest.mark.parametrize(
    "kind, on_cpu",
    # An XPU was a CPU, and nothing was said. MPS has no float64. The last one is an NPU before it has its name.
    [(None, True), ("cuda", False), ("xpu", False), ("mps", True), ("privateuseone", False)],
)
def test_the_accelerator_of_torch_is_used_unless_it_has_no_float64(kind, on_cpu, monkeypatch):
    pretend(monkeypatch, kind)
    assert use_cpu() == on_cpu
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert use_cpu()


def test_accelerate_is_given_the_choice(monkeypatch):
    pretend(monkeypatch, "xpu")
    given = []

    def accelerator(self, **options):
        given.append(options["cpu"])
        raise ZeroDivisionError

    monkeypatch.setattr("harness.launch.Accelerator.__init__", accelerator)
    for asked in ("false", "true"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
        with pytest.raises(ZeroDivisionError):
            make_accelerator(grpo.Args())
    assert given == [False, True]


def test_a_launch_switches_the_attention_of_cudnn_off(monkeypatch):
    """With a mask its gradient can be NaN."""
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    make_accelerator(grpo.Args())
    assert asked == [False]


# --- what the device has of its own ---


class OnXpu(torch.nn.Module):
    """A module that says that its weights are on an XPU."""

    def parameters(self):
        return iter([types.SimpleNamespace(device=torch.device("xpu"))])


def test_a_stream_of_random_numbers_leaves_the_device_as_it_was(monkeypatch):
    states = {"xpu": "before"}
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: states.update({str(device): state}))
    with seeded_sampling(OnXpu(), 0):
        states["xpu"] = "drawn from"
    assert states == {"xpu": "before"}
