"""common/model.py with models of other kinds: noise in training."""

import json

import torch
from transformers import AutoModelForCausalLM

from small_models import policy_of, random_batch, small_model

MIXTRAL = dict(num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2)


def test_a_model_that_draws_noise_in_training_is_trained_without(tmp_path):
    folder = small_model(tmp_path, AutoModelForCausalLM, "mixtral", **MIXTRAL)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"router_jitter_noise": 0.1}), encoding="utf-8")
    policy, batch = policy_of(folder), random_batch(vocabulary=20)
    assert policy.training and torch.equal(policy(batch)[0], policy(batch)[0])
