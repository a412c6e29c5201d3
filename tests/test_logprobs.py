"""`completion_logprobs` of the scripts against the logits of each row alone."""

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
