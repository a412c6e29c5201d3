"""Which device a run takes, its random numbers and its memory; and that the suite sees none but the CPU."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import conftest
import grpo
from common.generation import seeded
from common.harness.distributed import choose_device, launch, set_up_attention
from common.harness.metrics import Metrics, peak_memory_gb
from devices import VARIABLES, asks_for_gpu

# --- the suite ---


@pytest.mark.parametrize(
    "line, asked",
    [
        (["-m", "gpu"], True),
        (["-mgpu"], True),
        (["-xqm", "gpu", "tests"], True),
        (["-n", "0", "-m", "gpu and not slow", "-k", "a"], True),
        (["-m", "gpu", "-m", "needs"], False),
        (["-m", "not needs"], False),  # selects nearly all, on the CPU
        (["-k", "gpu"], False),
        (["-m", "gpu and"], False),
        (["tests/test_gpu.py"], False),
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


# --- what runs set for a GPU ---


def test_on_a_gpu_masks_are_not_looked_at_and_cudnn_has_no_attention(monkeypatch):
    registered, cudnn = {}, []
    monkeypatch.setattr(AttentionMaskInterface, "register", registered.__setitem__)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    set_up_attention()
    assert cudnn == [False]  # its gradient can be NaN
    rows = dict(batch_size=2, q_length=1, kv_length=4, attention_mask=torch.ones(2, 4, dtype=torch.bool), device="cpu")
    assert sdpa_mask(**rows) is None  # it looked, and would wait for the GPU
    assert registered["sdpa"](**rows) is not None


# --- the choice ---


def pretend(monkeypatch, kind):
    """torch says that it has devices of this kind."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: kind and torch.device(kind))


@pytest.mark.parametrize(
    "kind, chosen",
    # An XPU was a CPU, and nothing was said. The last one is an NPU before it has its name.
    [(None, "cpu"), ("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), ("privateuseone", "privateuseone")],
)
def test_the_accelerator_of_torch_is_used_unless_it_has_no_float64(kind, chosen, monkeypatch):
    pretend(monkeypatch, kind)
    assert choose_device().type == chosen
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert choose_device().type == "cpu"


def test_accelerate_is_given_the_choice(monkeypatch):
    pretend(monkeypatch, "xpu")
    given = []

    def accelerator(self, **options):
        given.append(options["cpu"])
        raise ZeroDivisionError

    monkeypatch.setattr("accelerate.Accelerator.__init__", accelerator)
    for asked in ("false", "true"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
        with pytest.raises(ZeroDivisionError):
            launch(grpo.Args())
    assert given == [False, True]


# --- what the device has of its own ---


def test_a_stream_of_random_numbers_leaves_the_device_as_it_was(monkeypatch):
    states = {"xpu": "before"}
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: states.update({str(device): state}))
    with seeded(0, torch.device("xpu")):
        states["xpu"] = "drawn from"
    assert states == {"xpu": "before"}


def test_peak_memory_is_that_of_the_device_where_it_tells(monkeypatch):
    # An XPU's was the resident memory of the process.
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda device: 3e9)
    assert peak_memory_gb(torch.device("xpu")) == 3.0
    monkeypatch.delattr(torch.xpu, "max_memory_allocated")
    assert peak_memory_gb(torch.device("xpu")) == -math.inf
    metrics, token = Metrics(), torch.zeros(1, 1)
    monkeypatch.setattr("common.harness.metrics.peak_memory_gb", lambda device: -math.inf)
    metrics.add_times({"completions": token, "completion_mask": token}, 0.0, 1.0, grpo.Args())
    found = metrics.reduce(launch(grpo.Args()))
    assert "memory/peak_gb" not in found and "time/rollout_s" in found
