"""Models of other kinds: noise in training; tools/models.py."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import models
from small_models import policy_of, random_batch, small_model
from testbed import script

MAMBA2 = dict(num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=8)
MIXTRAL = dict(num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2)


def test_a_model_with_noise_is_trained_without(tmp_path):
    folder = small_model(tmp_path, AutoModelForCausalLM, "mixtral", **MIXTRAL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"router_jitter_noise": 0.1}), encoding="utf-8")
    lm, batch, args = policy_of(folder), random_batch(vocabulary=20), script("grpo").Args()
    first, again = (script("grpo").completion_logprobs(lm, batch, args)[0] for _ in range(2))
    assert lm.training and torch.equal(first, again)


# --- tools/models.py ---


@pytest.mark.parametrize(
    "kind, options, found",
    [
        ("llama", dict(num_key_value_heads=1), ["LlamaForCausalLM", "sdpa", "sampling, head, prompts"]),
        ("granite", dict(logits_scaling=3.0), ["GraniteForCausalLM", "sdpa", "sampling"]),
        ("mamba2", MAMBA2, ["Mamba2ForCausalLM", "eager", "head"]),
    ],
)
def test_the_tool_says_how_a_model_runs(kind, options, found, tmp_path):
    folder = small_model(tmp_path, AutoModelForCausalLM, kind, **options)
    name, model_class, attention, update, fast, fast_update = models.cells_of(folder)
    assert [name, model_class, attention, fast] == [str(folder), *found]
    assert float(update) <= 1e-4 and float(fast_update) <= 1e-4


def test_the_tool_shows_a_wrong_update(tmp_path, monkeypatch):
    folder = small_model(tmp_path, AutoModelForCausalLM, "llama", num_key_value_heads=1)
    logprobs = models.completion_logprobs
    monkeypatch.setattr(
        models, "completion_logprobs", lambda lm, batch, args: logprobs(lm, batch, replace(args, temperature=2.0))
    )
    *_, update, _, fast_update = models.cells_of(folder)
    assert float(update) > 1e-3 > 1e-5 > float(fast_update)
