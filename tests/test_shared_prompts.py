"""fast/shared_prompts.py: prompts computed once give the plain log-probs and gradients.

test_architectures.py does the same with two dozen architectures.
"""

import pytest
import torch

import fast.shared_prompts
from fast.shared_prompts import buckets_by_length, padding_budget
from fast.shortcuts import find_shortcuts
from small_models import backward, random_batch, random_lm
from sped_up import random_policy
from testbed import largest_difference


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mistral", "gemma3_text"])
@pytest.mark.parametrize("padded", [True, False])
def test_long_prompts_in_any_order(name, padded):
    """With a sliding window shorter than a prompt (Mistral, Gemma 3), a mask that replaces it is silently wrong."""
    policy = random_policy(name, scale=2.0)
    policy.lm.double()
    assert policy.shares_prompts
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(rows=12)
    index = torch.randint(0, 4, (12,), generator=generator)
    batch["prompts"] = torch.cat([batch["prompts"]] * 3, dim=1)[index]  # 21 tokens
    batch["prompt_mask"] = torch.arange(21)[None] >= (index * 5 if padded else index * 0)[:, None]
    weights = torch.rand(12, 9, generator=generator)
    expected, _ = policy(batch)
    expected_gradient = backward(policy.lm, expected, weights)
    logprobs, _ = policy(batch | {"prompt_index": index[:, None]})
    assert torch.allclose(logprobs, expected, atol=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradient)
    assert largest_difference(backward(policy.lm, logprobs, weights), expected_gradient) < 1e-6 * largest


def shares_prompts(lm):
    return find_shortcuts(lm, True).shares_prompts


def test_start_check_has_a_padded_prompt(monkeypatch):
    """Without padding, positions that count padding would be right too."""
    lm = random_lm("gpt2")
    assert shares_prompts(lm)
    count_all = lambda mask: torch.ones_like(mask).long().cumsum(dim=1) - 1  # noqa: E731
    monkeypatch.setattr(fast.shared_prompts, "positions", count_all)
    assert not shares_prompts(lm)


def test_start_check_refuses_a_detached_gradient(monkeypatch):
    """The log-probs are equal, but the prompts' keys and values get no gradient from the completions."""
    lm, select = random_lm("qwen2"), fast.shared_prompts.select_cache

    def detached(cache, rows):
        selected = select(cache, rows)
        for layer in selected.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return selected

    assert shares_prompts(lm)
    monkeypatch.setattr(fast.shared_prompts, "select_cache", detached)
    assert not shares_prompts(lm)
    assert not shares_prompts(lm.bfloat16())


@pytest.mark.parametrize("padding", [0, 10, 300, 1e9])
def test_buckets_cover_rows_with_little_padding(padding):
    generator = torch.Generator().manual_seed(0)
    lengths = (1 + torch.empty(128).exponential_(1 / 35, generator=generator)).int().tolist()
    buckets = buckets_by_length(lengths, padding)
    assert sorted(row for bucket in buckets for row in bucket) == list(range(128))
    wasted = [sum(max(lengths[row] for row in bucket) - lengths[row] for row in bucket) for bucket in buckets]
    assert max(wasted) <= padding
    longest = [max(lengths[row] for row in bucket) for bucket in buckets]
    assert longest == sorted(longest) and (padding < 1e9) == (len(buckets) > 1)


@pytest.mark.parametrize(
    ("device", "weights", "tokens"),
    [
        ("cpu", 108_096, 308.4),
        ("cpu", 999_999, 33.333),
        ("cpu", 1_041_667, 128),
        ("cpu", 134_515_008, 128),
        ("cuda", 134_515_008, 12390),
        ("cuda", 7e10, 32),
    ],
)
def test_padding_may_save_a_forward(device, weights, tokens):
    """With one forward per length, an update of a 134M model took a third longer."""

    class Model:
        def __init__(self):
            self.device = torch.device(device)

        def parameters(self):
            return [torch.empty(int(weights), device="meta")]

    assert padding_budget(Model()) == pytest.approx(tokens, rel=1e-3)


def test_similar_lengths_share_a_forward(monkeypatch):
    policy, passes = random_policy("qwen2"), []
    monkeypatch.setattr(fast.shared_prompts, "padding_budget", lambda lm: 3)
    policy.lm.model.register_forward_pre_hook(
        lambda module, inputs, named: passes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    batch = random_batch(rows=4) | {"prompt_index": torch.tensor([[0], [0], [1], [1]])}
    batch["prompts"], batch["prompt_mask"] = batch["prompts"][[0, 0, 1, 1]], batch["prompt_mask"][[0, 0, 1, 1]]
    batch["completion_mask"] = torch.arange(9) < torch.tensor([[9], [2], [8], [1]])
    policy(batch)
    assert passes == [(2, 7), (2, 1), (2, 8)]  # the last token of a completion predicts nothing
