"""Shortcuts match the plain forward on small random models of two dozen architectures."""

import pytest
import torch

from common.masked import completion_mask
from small_models import ARCHITECTURES, EVERY, HYBRIDS, SCALED, backward
from sped_up import left_pad, random_policy, seeded
from testbed import largest_difference

pytestmark = pytest.mark.beside("fast")
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]]


def rows_of_three_prompts():
    """Six rows in any order; prompts of 5, 2 and 3 tokens, completions of 1 to 6."""
    index = torch.tensor([1, 0, 2, 0, 1, 0])
    ids, mask = left_pad(PROMPTS, 0)
    completions = torch.randint(3, 40, (6, 6), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([6, 1, 3, 6, 2, 5])
    return {
        "prompts": ids[index],
        "prompt_mask": mask[index],
        "prompt_index": index[:, None],
        "completions": completions,
        "completion_mask": torch.arange(6) < lengths[:, None],
    }


def plain_forward(policy, batch):
    """Log-probs and entropies from the full logits of the model, one row at a time, without any padding."""
    logprobs, entropies = (torch.zeros(batch["completion_mask"].shape) for _ in range(2))
    for i, (prompt_mask, mask) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
        prompt, completion = batch["prompts"][i][prompt_mask], batch["completions"][i][mask]
        logits = policy.lm(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        distribution = (logits / policy.temperature).log_softmax(-1)
        logprobs[i, : len(completion)] = distribution.gather(-1, completion[:, None])[:, 0]
        entropies[i, : len(completion)] = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropies


@pytest.mark.parametrize("name", EVERY)
def test_logprobs_and_gradient_match_full_logits(name):
    """Padding, position ids, windows, a soft cap or a scale behind the head; prompts computed once."""
    policy = random_policy(name, temperature=0.7, scale=3.0)
    assert policy.shortcuts.head_is_last == (name not in SCALED and name != "granitemoehybrid")
    assert policy.shortcuts.plain_cache == (name not in HYBRIDS)
    assert policy.shares_prompts == (name in ARCHITECTURES)
    batch = rows_of_three_prompts()
    weights = torch.rand(6, 6, generator=torch.Generator().manual_seed(1))
    expected, expected_entropy = plain_forward(policy, batch)
    expected_gradient = backward(policy.lm, expected + 0.1 * expected_entropy, weights)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradient)
    unshared = {key: column for key, column in batch.items() if key != "prompt_index"}
    for rows in (unshared, batch) if policy.shares_prompts else (unshared,):
        logprobs, entropy = policy(rows, entropy_grad=True)
        assert torch.allclose(logprobs, expected, atol=3e-5)
        assert torch.allclose(entropy, expected_entropy, atol=3e-5)
        gradient = backward(policy.lm, logprobs + 0.1 * entropy, weights)
        assert largest_difference(gradient, expected_gradient) < 1e-5 * largest


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_samples_match_generate_and_forward(name):
    """Greedy tokens of rows that end early and at different places; log-probs of sampled ones."""
    policy = random_policy(name, temperature=1.3, scale=3.0)
    policy.stop_tokens = list(range(2, 40, 5))  # one token in five
    prompts = [[5 + i, 6 + 2 * i % 7, 9 + i][: 1 + i % 3] for i in range(12)]
    ids, mask = left_pad(prompts, 0)
    is_hybrid = name in HYBRIDS  # their cache cannot drop rows, so stock `generate` samples
    stock = policy.sample(ids, mask, 0, stock=True).sequences
    found = policy.sample(ids, mask, 0, stock=is_hybrid).sequences
    assert torch.equal(found, stock)
    assert completion_mask(stock[:, 3:], policy.stop_tokens)[0].sum(dim=1).unique().numel() > 1
    with seeded(0):
        output = policy.sample(ids, mask, policy.temperature, n=2, stock=is_hybrid)
    completions = output.sequences[:, 3:]
    assert len(completions) == 24 and len({tuple(row) for row in completions.tolist()}) > 6
    if is_hybrid:
        return
    batch = {"prompts": ids.repeat_interleave(2, dim=0), "prompt_mask": mask.repeat_interleave(2, dim=0)}
    batch |= {"completions": completions, "completion_mask": completion_mask(completions, policy.stop_tokens)[0]}
    logprobs, _ = policy(batch)
    assert (logprobs - output.logprobs).abs().max() < 2e-5
