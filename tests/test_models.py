"""Models of other kinds: noise in training; tools/models.py."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import models
from small_models import policy_of, random_batch, small_model

MAMBA2 = dict(num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=8)
MIXTRAL = dict(num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2)


def test_a_model_that_draws_noise_in_training_is_trained_without(tmp_path):
    folder = small_model(tmp_path, AutoModelForCausalLM, "mixtral", **MIXTRAL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"router_jitter_noise": 0.1}), encoding="utf-8")
    policy, batch = policy_of(folder), random_batch(vocabulary=20)
    assert policy.training and torch.equal(policy(batch)[0], policy(batch)[0])


# --- tools/models.py ---


@pytest.mark.parametrize(
    "kind, options, found",
    [
        ("llama", dict(num_key_value_heads=1), ["LlamaForCausalLM", "sdpa", "fast", "chunks", "once"]),
        ("granite", dict(logits_scaling=3.0), ["GraniteForCausalLM", "sdpa", "fast", "whole", "each row"]),
        ("mamba2", MAMBA2, ["Mamba2ForCausalLM", "eager", "stock", "chunks", "each row"]),
    ],
)
def test_the_tool_says_how_a_model_is_computed_and_how_exactly(kind, options, found, tmp_path):
    folder = small_model(tmp_path, AutoModelForCausalLM, kind, **options)
    name, *cells, update, sampled = models.cells_of(folder)
    assert name == str(folder) and cells == found
    assert float(update) <= 1e-4 and (sampled == "" or float(sampled) <= 1e-4)


def test_the_tool_shows_a_difference_of_the_update(tmp_path, monkeypatch):
    folder = small_model(tmp_path, AutoModelForCausalLM, "llama", num_key_value_heads=1)
    load = models.load_policy

    def with_another_temperature(*inputs):
        policy = load(*inputs)
        policy.temperature = 2.0  # of the update; sampling has its own
        return policy

    monkeypatch.setattr(models, "load_policy", with_another_temperature)
    *_, update, sampled = models.cells_of(folder)
    assert float(update) > 1e-3 > 1e-5 > float(sampled)
