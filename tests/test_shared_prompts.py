"""common/shortcuts/shared_prompts.py: a prompt computed once for its rows gives the plain log-probs and gradients."""

import pytest
import torch

import common.shortcuts.shared_prompts
from common.harness.ladder import find_shortcuts, layer_types
from common.shortcuts.shared_prompts import runs_of_similar_length, shared_states
from small_models import backward, random_batch, random_policy
from testbed import largest_difference


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "mistral", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("padded", [True, False])
def test_shared_prompts_give_the_plain_log_probs_and_gradients(name, padded):
    # Sliding windows shorter than a prompt (mistral, gemma3): a mask that replaces the window is silently wrong.
    options = {} if name in ("qwen2", "llama", "gpt2", "mistral") else dict(num_key_value_heads=2, head_dim=8)
    options |= dict(sliding_window=8) if name == "gemma3_text" else {}
    policy = random_policy(name, scale=2.0, **options).double().eval()
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(rows=12)
    index = torch.randint(0, 4, (12,), generator=generator)
    for column in ("prompts", "prompt_mask"):
        batch[column] = torch.cat([batch[column]] * 3, dim=1)[index]  # 21 tokens, one prompt for each index
    batch["prompt_mask"] = torch.arange(21)[None] >= (index * 5 if padded else index * 0)[:, None]
    weights, results = torch.rand(12, 9, generator=generator), []
    for extra in ({}, {"prompt_index": index[:, None]}):
        logprobs, entropy = policy(batch | extra)
        results.append((logprobs.detach(), entropy.detach(), backward(policy, logprobs, weights)))
    (plain, plain_entropy, plain_gradient), (shared, entropy, gradient) = results
    assert torch.allclose(plain, shared, atol=1e-6) and torch.allclose(plain_entropy, entropy, atol=1e-6)
    assert largest_difference(gradient, plain_gradient) < 1e-6 * max(float(g.abs().max()) for g in plain_gradient)
    assert name == "gemma3_text" or policy.shares_prompts


def test_the_probe_has_a_padded_prompt(monkeypatch):
    """Positions that count the padding are wrong for nothing else."""
    lm = random_policy("gpt2").lm
    assert find_shortcuts(lm)["shares_prompts"]
    monkeypatch.setattr(
        common.shortcuts.shared_prompts, "positions", lambda mask: torch.ones_like(mask).long().cumsum(dim=1) - 1
    )
    assert not find_shortcuts(lm)["shares_prompts"]


def test_layers_that_use_the_keys_of_another_one_share_prompts_where_the_gradient_is_that_of_whole_rows():
    # Gemma 4: its layers without keys and values have nothing to repeat, and the gradient reaches the keys they use.
    options = dict(num_key_value_heads=2, head_dim=8, global_head_dim=8, vocab_size_per_layer_input=40)
    options |= dict(num_kv_shared_layers=1, layer_types=["full_attention"] * 2, hidden_size_per_layer_input=4)
    policy = random_policy("gemma4_text", **options)
    assert layer_types(policy.lm) <= {"DynamicLayer", "DummyLayer"}  # the second since a version after 5.17
    assert policy.head_is_last and policy.plain_cache and policy.shares_prompts


def test_a_gradient_that_is_cut_off_refuses_shared_prompts(monkeypatch):
    """Log-probs are equal then, and the prompt's keys and values learn nothing from the completions."""
    cut = common.shortcuts.shared_prompts.select_cache

    def detached(cache, rows):
        selected = cut(cache, rows)
        for layer in selected.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return selected

    lm = random_policy("qwen2").lm
    assert find_shortcuts(lm)["shares_prompts"]
    monkeypatch.setattr(common.shortcuts.shared_prompts, "select_cache", detached)
    assert not find_shortcuts(lm)["shares_prompts"]


@pytest.mark.parametrize("most_padding", [0, 10, 300, 1e9])
def test_runs_of_similar_length_hold_every_row_and_waste_little(most_padding):
    generator = torch.Generator().manual_seed(0)
    lengths = (1 + torch.empty(128).exponential_(1 / 35, generator=generator)).int().tolist()
    runs = runs_of_similar_length(lengths, most_padding)
    assert sorted(row for run in runs for row in run) == list(range(128))
    padding = [sum(max(lengths[row] for row in run) - lengths[row] for row in run) for run in runs]
    assert max(padding) <= most_padding
    longest = [max(lengths[row] for row in run) for run in runs]
    assert longest == sorted(longest) and (most_padding < 1e9) == (len(runs) > 1)


@pytest.mark.parametrize(
    ("weights", "tokens"), [(108_096, 308.4), (999_999, 33.333), (1_041_667, 128), (134_515_008, 128)]
)
def test_a_further_pass_is_worth_some_padding_however_large_the_model(weights, tokens, monkeypatch):
    """With every distinct length in a pass of its own an update of a model of 134M weights took a third longer."""
    policy, asked = random_policy("qwen2").eval(), []
    batch = random_batch(rows=4) | {"prompt_index": torch.tensor([[0], [0], [1], [1]])}
    for column in ("prompts", "prompt_mask"):
        batch[column] = batch[column][[0, 0, 1, 1]]
    runs = common.shortcuts.shared_prompts.runs_of_similar_length

    def recorded(lengths, most_padding):
        asked.append(most_padding)
        return runs(lengths, most_padding)

    monkeypatch.setattr(common.shortcuts.shared_prompts, "runs_of_similar_length", recorded)
    shared_states(policy.lm, batch, weights)
    assert asked == [pytest.approx(tokens, rel=1e-3)]
