"""What processes agree on, and what a GPU adds to the probes of common/harness/, as far as a CPU shows it."""

import contextlib
import functools
import types

import pytest
import torch
from torch.nn import functional

from common.harness import gpu_probes, ladder
from common.harness.gpu_probes import fuse_norms, norms
from common.harness.ladder import find_shortcuts
from processes import run_processes
from small_models import random_policy
from testbed import metric_rows

QUICK = "--max_steps 1 --prompts_per_step 4 --group_size 4 --eval_prompts 2 --eval_samples 4 --eval_every 0".split()


# --- one process decides for itself ---


def test_a_shortcut_that_one_process_refuses_is_off_on_all_of_them(tmp_path):
    """Each took its own way, and the sums of metrics had different lengths: gloo aborted, NCCL would hang."""
    result = run_processes("tests/helpers/refusing_worker.py", *QUICK, "--output_dir", tmp_path / "run", processes=2)
    assert result.returncode == 0, result.stderr
    assert "another process refused it: samples as with --rollout hf" in result.stdout
    assert "rollout/logprob_gap" not in metric_rows(tmp_path / "run")[-1]  # stock `generate` sampled


def test_without_a_refusal_two_processes_take_the_shortcuts(tmp_path):
    result = run_processes("grpo.py", *QUICK, "--output_dir", tmp_path / "run", processes=2)
    assert result.returncode == 0, result.stderr
    assert "refused" not in result.stdout
    assert metric_rows(tmp_path / "run")[-1]["rollout/logprob_gap"] < 1e-5


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_short_memory_and_a_broken_device_are_no_property_of_the_model(error, monkeypatch):
    def fails(lm):
        raise error("CUDA error")

    monkeypatch.setattr(ladder, "has_plain_cache", fails)
    with pytest.raises(error):
        find_shortcuts(random_policy("qwen2").lm)


class OtherProcess:
    """An accelerator of two processes, of which the other one refuses what is at these places."""

    num_processes, device, is_fsdp2 = 2, torch.device("cpu"), False

    def __init__(self, *refused):
        self.refused = refused

    def autocast(self):
        return contextlib.nullcontext()

    def reduce(self, flags, how):
        other = torch.ones_like(flags)
        other[list(self.refused)] = 0
        return flags + other


def test_a_norm_that_another_process_does_not_fuse_is_not_fused_here(monkeypatch):
    lm = random_policy("llama").lm
    fuse_norms(lm)
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    monkeypatch.setattr(gpu_probes, "find_gpu_shortcuts", lambda lm, refused, **found: {"packs": True, "graphs": True})
    monkeypatch.setattr(ladder, "tried", lambda *inputs: True)
    second = len(ladder.EXACT) + 1
    found = find_shortcuts(lm, accelerator=OtherProcess(ladder.EXACT.index("packs"), second))
    fused = ["forward" in vars(norm) for norm in norms(lm)]
    assert fused == [True, False, True, True, True] and found["fused_norms"] == 4
    assert found["graphs"] and not found["packs"] and found["refused"] == {"packs": "another process refused it"}


def test_the_notes_say_why_a_shortcut_of_a_gpu_is_off(monkeypatch):
    policy = random_policy("qwen2")
    monkeypatch.setattr(type(policy.lm), "device", torch.device("cuda"))
    policy.graphs, policy.fused_norms = True, 5
    policy.refused = {"packs": "they need bfloat16"}
    tokenizer = types.SimpleNamespace(convert_ids_to_tokens=str)
    *_, line = policy.notes(tokenizer)
    packs = "passes without padding: False (they need bfloat16)"
    assert line == f"CUDA graphs for sampled tokens: True; {packs}; fused norms: 5"


# --- norms ---


def as_in_cuda_autocast(x, shape, weight=None, eps=None, plain=functional.rms_norm):
    """`rms_norm` of torch 2.13 on CUDA: autocast computes it in float32, and gives that back."""
    if not torch.is_autocast_enabled("cpu"):
        return plain(x, shape, weight, eps)
    with torch.autocast("cpu", enabled=False):
        return plain(x.float(), shape, weight, eps)


def in_float64(x, shape, weight=None, eps=None, plain=functional.rms_norm):
    """A kernel that adds up in another way, and so has other bits."""
    return plain(x.double(), shape, weight, eps).to(x.dtype)


def in_bfloat16(x, shape, weight=None, eps=None, plain=functional.rms_norm):
    """A kernel that is less exact than float32."""
    return plain(x.bfloat16(), shape, weight, eps).to(x.dtype)


KINDS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "mixed precision": (torch.float32, True),
}


@pytest.mark.parametrize("kernel", [as_in_cuda_autocast, in_float64])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_fused_in_each_precision_of_a_run(kind, kernel, monkeypatch):
    """Under mixed precision none was: a dtype was tried that no norm gets. Other bits are no fault where the error is
    no larger: the order of a sum is any."""
    dtype, autocast = KINDS[kind]
    lm = random_policy("llama").lm.to(dtype)
    monkeypatch.setattr(functional, "rms_norm", kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fuse_norms(lm)
    assert ["forward" in vars(norm) for norm in norms(lm)] == [True] * 5


def test_norms_of_queries_and_keys_are_fused_under_mixed_precision(monkeypatch):
    """They get bfloat16 there, and those of the residual stream float32."""
    lm = random_policy("qwen3", num_key_value_heads=2, head_dim=8).lm
    monkeypatch.setattr(functional, "rms_norm", as_in_cuda_autocast)
    with torch.autocast("cpu", torch.bfloat16):
        fuse_norms(lm)
    assert ["forward" in vars(norm) for norm in norms(lm)] == [True] * 9


def test_a_kernel_that_is_less_exact_is_refused(monkeypatch):
    lm = random_policy("llama").lm
    monkeypatch.setattr(functional, "rms_norm", in_bfloat16)
    fuse_norms(lm)
    assert not any("forward" in vars(norm) for norm in norms(lm))


@pytest.mark.parametrize("name", ["gemma", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_whose_weight_is_added_to_one_stays_as_it_is(dtype, name):
    lm = random_policy(name, num_key_value_heads=2, head_dim=8).lm.to(dtype)
    fuse_norms(lm)
    assert norms(lm) and not any("forward" in vars(norm) for norm in norms(lm))


def test_a_norm_that_gets_more_than_one_tensor_stays_as_it_is():
    """A fused one would not take the gate."""

    class Gated(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x, None)

    lm = random_policy("llama").lm
    inner = lm.model.norm
    type_of = type(inner)

    class GatedRMSNorm(type_of):
        def forward(self, x, gate=None):
            return super().forward(x)

    inner.__class__ = GatedRMSNorm
    lm.model.norm = Gated(inner)
    fuse_norms(lm)
    assert ["forward" in vars(norm) for norm in norms(lm)] == [True] * 4 + [False]


# --- a model that is sharded later ---


@pytest.mark.parametrize("fault", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_a_model_that_fsdp2_shards_is_tried_whole_on_the_gpu_and_goes_back(fault, monkeypatch):
    """Where it does not fit there, passes are padded, as they always were."""
    lm, moved, refused = random_policy("qwen2").lm, [], {}
    monkeypatch.setattr(lm, "to", lambda device: moved.append(device) or lm)

    def packing_is_exact(lm):
        moved.append("tried")
        if fault:
            raise fault
        return True

    monkeypatch.setattr(gpu_probes, "packing_is_exact", packing_is_exact)
    accelerator = types.SimpleNamespace(
        device="the GPU", autocast=functools.partial(torch.autocast, "cpu", torch.bfloat16)
    )
    assert gpu_probes.may_pack_sharded(lm, refused, accelerator) == (fault is None)
    assert moved == ["the GPU", "tried", torch.device("cpu")]
    assert refused == ({"packs": "OutOfMemoryError: CUDA out of memory"} if fault else {})


def test_packed_passes_are_tried_under_fsdp2_with_gpus_alone(monkeypatch):
    lm, tried = random_policy("qwen2").lm, []
    monkeypatch.setattr(gpu_probes, "may_pack_sharded", lambda *inputs: tried.append(1) or True)
    for kind, fsdp2, packs in (("cuda", True, True), ("cuda", False, None), ("cpu", True, None)):
        accelerator = OtherProcess()
        accelerator.device, accelerator.is_fsdp2 = types.SimpleNamespace(type=kind), fsdp2
        monkeypatch.setattr(ladder, "agree", lambda found, norms, refused, accelerator: found)
        assert find_shortcuts(lm, may_share=False, accelerator=accelerator).get("packs") == packs
    assert len(tried) == 1
