"""`completion_logprobs` of the scripts, and the chunks of fast/logprobs.py, against the logits of each row alone."""

from types import SimpleNamespace

import pytest
import torch

import grpo
from small_models import EVERY, backward, random_batch, random_lm
from testbed import ALL, args_of, embedded, hand_made_batch, largest_difference, script

TEMPERATURE = 0.7


def row_by_row(lm, batch, temperature):
    """Log-probs and entropies from the full logits of the model, one row at a time, without any padding."""
    logprobs, entropies = (torch.zeros(batch["completion_mask"].shape) for _ in range(2))
    for i, (prompt_mask, mask) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
        prompt, completion = batch["prompts"][i][prompt_mask], batch["completions"][i][mask]
        logits = lm(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        distribution = (logits / temperature).log_softmax(-1)
        logprobs[i, : len(completion)] = distribution.gather(-1, completion[:, None])[:, 0]
        entropies[i, : len(completion)] = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropies


def compare(lm, found, batch, temperature=TEMPERATURE):
    """Assert that log-probs [and entropies] and the gradient are those of each row alone."""
    weights = torch.rand(batch["completion_mask"].shape, generator=torch.Generator().manual_seed(1))
    expected = row_by_row(lm, batch, temperature)
    for values, other in zip(found, expected, strict=False):
        assert torch.allclose(values, other, atol=3e-5)
    gradient, other = (backward(lm, x[0], weights) for x in (found, expected))
    assert largest_difference(gradient, other) < 1e-5 * max(float(g.abs().max()) for g in other)


@pytest.mark.parametrize("name", EVERY)
def test_logprobs_of_architectures(name):
    """Padding, position ids, windows, a soft cap or a scale behind the head, recurrent states."""
    lm, batch = random_lm(name, scale=3.0), random_batch()
    compare(lm, grpo.completion_logprobs(lm, batch, grpo.Args(temperature=TEMPERATURE)), batch)


@pytest.mark.parametrize("name", [name for name in ALL if hasattr(script(name), "completion_logprobs")])
def test_logprobs_of_scripts(name):
    """With padding on both sides of all rows. dpo.py has no temperature, and no entropies."""
    module, lm, batch = script(name), random_lm("qwen2", scale=3.0), random_batch()
    sides = {"prompts": (2, 0), "prompt_mask": (2, 0)}
    batch = {key: torch.nn.functional.pad(column, sides.get(key, (0, 3))) for key, column in batch.items()}
    has_temperature = "temperature" in module.Args.__dataclass_fields__
    temperature = TEMPERATURE if has_temperature else 1.0
    found = module.completion_logprobs(lm, batch, args_of(module, temperature=temperature))
    found = found[:2] if has_temperature else [found]  # ppo.py also returns values
    compare(lm, found, batch, temperature)
    assert all((values[~batch["completion_mask"]] == 0).all() for values in found)


def test_gradient_checkpointing():
    _, args, tokenizer, lm = embedded()
    _, _, _, checkpointed = embedded(gradient_checkpointing=True)
    batch, _ = hand_made_batch(tokenizer, args)
    weights = batch["loss_mask"].float()
    a, b = (backward(x, grpo.completion_logprobs(x, batch, args)[0], weights) for x in (lm, checkpointed))
    assert largest_difference(a, b) < 1e-4 * max(float(g.abs().max()) for g in a)


# --- chunks of the head ---


@pytest.fixture
def logprobs():
    return pytest.importorskip("fast.logprobs")


def chunked(logprobs, lm, batch, head_is_last=True):
    states = logprobs.token_states(lm, batch, head_is_last)
    return logprobs.logprobs_of_states(lm, batch, states, head_is_last, TEMPERATURE)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_chunks_equal_full_logits(name, logprobs, monkeypatch):
    """Gemma 2 has a soft cap behind the head: there the chunks are of logits."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 40 * 5)
    lm, batch = random_lm(name, scale=3.0), random_batch()
    assert logprobs.has_last_head(lm) == (name == "qwen2")
    compare(lm, chunked(logprobs, lm, batch, name == "qwen2"), batch)


def test_cap_beyond_the_trial_is_found(logprobs, monkeypatch):
    """A soft cap changes the last bits of small logits too; one that cuts changes none."""
    lm = random_lm("qwen2")
    forward = lm.forward

    def capped(*inputs, **options):
        output = forward(*inputs, **options)
        return SimpleNamespace(logits=output.logits.clamp(-30, 30))

    assert logprobs.has_last_head(lm) and lm(torch.arange(8)[None]).logits.detach().abs().max() < 10
    monkeypatch.setattr(lm, "forward", capped)
    assert not logprobs.has_last_head(lm)


def test_no_tensor_holds_all_logits(logprobs, monkeypatch):
    # (R, T, V) copies run out of memory (trl#2598): the head sees a chunk of completion tokens at a time, no prompts.
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 40 * 5)
    lm, batch, seen = random_lm("qwen2"), random_batch(), []
    lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    chunked(logprobs, lm, batch)
    assert all(shape[-2] <= 5 for shape in seen)
    assert sum(shape[-2] for shape in seen) == int(batch["completion_mask"].sum())


def test_no_chunk_is_kept_for_backward(logprobs, monkeypatch):
    # Kept, all chunks together are the (R, T, V) copy.
    lm, batch, kept = random_lm("qwen2"), random_batch(), []
    rows = int(batch["completion_mask"].sum())

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    for size, any_kept in ((rows, True), (5, False)):  # all of them in one chunk are kept: it is small enough
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 40 * size)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunked(logprobs, lm, batch)
        assert any(shape[-1:] == (40,) and shape[0] <= size for shape in kept) == any_kept
