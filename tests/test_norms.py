"""fast/norms.py: which norms are fused, as far as a CPU shows it."""

import copy

import pytest
import torch
from torch.nn import functional

from fast.norms import norms
from fast.shortcuts import fuse_norms
from small_models import random_batch, random_lm, random_policy


def fused(lm):
    """Fuse what may be, and tell of each norm whether it is."""
    assert fuse_norms(lm, None) == sum("forward" in vars(norm) for norm in norms(lm))
    return ["forward" in vars(norm) for norm in norms(lm)]


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
    lm = random_lm("llama").to(dtype)
    monkeypatch.setattr(functional, "rms_norm", kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert fused(lm) == [True] * 5


def test_norms_of_queries_and_keys_are_fused_under_mixed_precision(monkeypatch):
    """They get bfloat16 there, and those of the residual stream float32."""
    monkeypatch.setattr(functional, "rms_norm", as_in_cuda_autocast)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(random_lm("qwen3")) == [True] * 9


def test_a_kernel_that_is_less_exact_is_refused(monkeypatch):
    monkeypatch.setattr(functional, "rms_norm", in_bfloat16)
    assert fused(random_lm("llama")) == [False] * 5


@pytest.mark.parametrize("name", ["gemma", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_norms_stay_as_they_are(dtype, name):
    """Gemma multiplies by 1 + weight; GPT-2 has no RMSNorm."""
    found = fused(random_lm(name, num_key_value_heads=2, head_dim=8).to(dtype))
    assert not any(found) and bool(found) == (name != "gpt2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_have_the_same_bits_and_follow_a_copy(dtype):
    """Fresh weights are all one, with which the order of products shows nothing."""
    policy = random_policy("qwen2")
    policy.lm.to(dtype)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)) if parameter.dim() == 1 else None
    batch = random_batch()
    expected, _ = policy(batch)
    assert fused(policy.lm) == [True] * 5
    assert torch.equal(policy(batch)[0], expected)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.lm.model.norm.weight.zero_()
    assert torch.equal(policy(batch)[0], expected) and not torch.equal(other(batch)[0], expected)


class CentredRMSNorm(torch.nn.Module):
    """Of another function, which the numbers around 0 do not tell: it takes the mean away."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_another_function_stays_as_it_is(dtype):
    lm = random_lm("qwen2")
    lm.model.norm = CentredRMSNorm(lm.model.norm)
    assert fused(lm.to(dtype)) == [True] * 4 + [False]


class GatedRMSNorm(torch.nn.Module):
    """A norm that gets a gate beside its input."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.weight, self.variance_epsilon = norm, norm.weight, norm.variance_epsilon

    def forward(self, x, gate=None):
        return self.norm(x)


class WithoutGate(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x, None)


def test_a_norm_that_gets_more_than_one_tensor_stays_as_it_is():
    """A fused one would not take the gate."""
    lm = random_lm("llama")
    lm.model.norm = WithoutGate(GatedRMSNorm(lm.model.norm))
    found = dict(zip([type(norm).__name__ for norm in norms(lm)], fused(lm), strict=True))
    assert found == {"LlamaRMSNorm": True, "GatedRMSNorm": False}
