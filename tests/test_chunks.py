"""fast/logprobs.py: a chunked head matches full logits and keeps none in memory.

Over two dozen architectures they are compared with full logits in test_architectures.py.
"""

import pytest
import torch

import fast.logprobs
from fast.logprobs import has_last_head, prompt_indices
from small_models import backward, random_batch, random_lm
from sped_up import random_policy
from test_architectures import plain_forward
from testbed import largest_difference


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_chunked_gradient_matches_full_logits(name, monkeypatch):
    """Gemma 2 has a soft cap behind the head: there the chunks are of logits."""
    monkeypatch.setattr(fast.logprobs, "CHUNK_ELEMENTS", 40 * 5)
    policy = random_policy(name, temperature=0.7, scale=3.0)
    batch, weights = random_batch(), torch.rand(6, 9)
    expected, expected_entropy = plain_forward(policy, batch)
    logprobs, entropy = policy(batch)
    assert torch.allclose(logprobs, expected, atol=2e-5)
    assert torch.allclose(entropy, expected_entropy, atol=2e-5)
    ours = backward(policy.lm, logprobs, weights)
    plain = backward(policy.lm, plain_forward(policy, batch)[0], weights)
    assert largest_difference(ours, plain) < 2e-6 * max(float(g.abs().max()) for g in plain)


def test_cap_above_small_logits_is_detected(monkeypatch):
    """A soft cap changes the last bits of small logits too; one that cuts changes none."""
    lm = random_lm("qwen2")
    forward = lm.forward

    def capped(*inputs, **options):
        output = forward(*inputs, **options)
        output.logits = output.logits.clamp(-30, 30)
        return output

    assert has_last_head(lm) and lm(torch.arange(8)[None]).logits.detach().abs().max() < 10
    monkeypatch.setattr(lm, "forward", capped)
    assert not has_last_head(lm)


def test_no_tensor_holds_all_logits(monkeypatch):
    # (R, T, V) copies run out of memory (trl#2598): the head sees a chunk of completion tokens at a time, no prompts.
    monkeypatch.setattr(fast.logprobs, "CHUNK_ELEMENTS", 40 * 5)
    policy, batch, seen = random_policy("qwen2"), random_batch(), []
    policy.lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    policy(batch)
    assert all(shape[-2] <= 5 for shape in seen)
    assert sum(shape[-2] for shape in seen) == int(batch["completion_mask"].sum())


def test_backward_pass_keeps_no_chunk(monkeypatch):
    # If kept, the chunks together are the (R, T, V) copy.
    policy, batch, kept = random_policy("qwen2"), random_batch(), []
    rows = int(batch["completion_mask"].sum())

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    for size, any_kept in ((rows, True), (5, False)):  # all of them in one chunk are kept: it is small enough
        monkeypatch.setattr(fast.logprobs, "CHUNK_ELEMENTS", 40 * size)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy(batch)
        assert any(shape[-1:] == (40,) and shape[0] <= size for shape in kept) == any_kept


def test_prompts_are_compared_by_tokens():
    batch = {
        "prompts": torch.tensor([[0, 5, 6], [5, 5, 6], [7, 5, 6], [5, 5, 6]]),
        "prompt_mask": torch.tensor([[False, True, True], [True] * 3, [False, True, True], [True] * 3]),
    }
    assert prompt_indices(batch) == [0, 1, 0, 1]  # padding does not count
