"""Policy of common/model.py: log-probs and entropies by chunks of the head, padding, and gradients.

Over two dozen architectures they are compared with full logits in test_architectures.py.
"""

import pytest
import torch

import common.model
from common.model import has_last_head
from small_models import backward, random_batch, random_lm, random_policy
from test_architectures import plain_forward
from testbed import embedded, hand_made_batch, largest_difference


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_chunks_of_the_head_have_the_numbers_and_gradient_of_full_logits(name, monkeypatch):
    """Gemma 2 has a soft cap behind the head: there the chunks are of logits."""
    monkeypatch.setattr(common.model, "CHUNK_ELEMENTS", 40 * 5)
    policy = random_policy(name, temperature=0.7, scale=3.0)
    batch, weights = random_batch(), torch.rand(6, 9)
    expected, expected_entropy = plain_forward(policy, batch)
    logprobs, entropy = policy(batch)
    assert torch.allclose(logprobs, expected, atol=2e-5)
    assert torch.allclose(entropy, expected_entropy, atol=2e-5)
    ours = backward(policy, logprobs, weights)
    plain = backward(policy, plain_forward(policy, batch)[0], weights)
    assert largest_difference(ours, plain) < 2e-6 * max(float(g.abs().max()) for g in plain)


def test_a_cap_that_the_logits_of_the_trial_do_not_reach_is_found(monkeypatch):
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
    monkeypatch.setattr(common.model, "CHUNK_ELEMENTS", 40 * 5)
    policy, batch, seen = random_policy("qwen2"), random_batch(), []
    policy.lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    policy(batch)
    assert all(shape[-2] <= 5 for shape in seen)
    assert sum(shape[-2] for shape in seen) == int(batch["completion_mask"].sum())


def test_no_chunk_of_logits_is_kept_for_the_backward_pass(monkeypatch):
    # Kept, all chunks together are the (R, T, V) copy.
    policy, batch, kept = random_policy("qwen2"), random_batch(), []
    rows = int(batch["completion_mask"].sum())

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    for size, any_kept in ((rows, True), (5, False)):  # all of them in one chunk are kept: it is small enough
        monkeypatch.setattr(common.model, "CHUNK_ELEMENTS", 40 * size)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy(batch, with_entropy=False)
        assert any(shape[-1:] == (40,) and shape[0] <= size for shape in kept) == any_kept


def test_gradient_checkpointing_gives_the_same_gradient():
    _, args, tokenizer, policy = embedded()
    _, _, _, checkpointed = embedded(gradient_checkpointing=True)
    batch, _ = hand_made_batch(policy, tokenizer, args)
    weights = batch["loss_mask"].float()
    a, b = (backward(p, p(batch)[0], weights) for p in (policy, checkpointed))
    assert largest_difference(a, b) < 1e-4 * max(float(g.abs().max()) for g in a)
