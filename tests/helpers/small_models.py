"""Models for the tests: random ones of any architecture with batches for them, and checkpoints on disk."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from common.errors import InputError
from common.harness.data import Prompt
from common.harness.embedded import EMBEDDED
from common.harness.ladder import find_shortcuts
from common.harness.loading import load_policy, load_tokenizer
from common.policy import Policy
from testbed import script

ARCHITECTURES = {
    "qwen2": dict(num_key_value_heads=2),
    "llama": dict(num_key_value_heads=2),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),  # absolute positions
    "mistral": dict(num_key_value_heads=2, sliding_window=8),  # a cache that forgets
}
LINEAR = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
MAMBA = dict(mamba_n_heads=2, mamba_d_state=4, mamba_chunk_size=8)
MIXED = ["linear_attention", "full_attention"]
HYBRIDS = {  # more in the cache than keys and values
    "qwen3_next": dict(**LINEAR, layer_types=MIXED, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8),
    "qwen3_5_text": dict(**LINEAR, layer_types=MIXED),
    "lfm2": dict(num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    "zamba2": dict(
        mamba_d_state=4, n_mamba_heads=2, mamba_ngroups=1, layers_block_type=["mamba", "hybrid"], num_mem_blocks=1
    ),
    "granitemoehybrid": dict(**MAMBA, layer_types=["mamba", "attention"], num_local_experts=0, logits_scaling=3.0),
    "falcon_h1": dict(**MAMBA, mamba_d_ssm=16, mamba_d_head=8, num_key_value_heads=2),
    "mamba2": dict(num_heads=2, head_dim=32, state_size=4, n_groups=1, chunk_size=8),
}
LLAMA4 = dict(head_dim=8, num_key_value_heads=2, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=8)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
IDS = dict(vocab_size=40, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def random_policy(name, seed=0, temperature=1.0, scale=4.0, **options):
    torch.manual_seed(seed)
    sizes = {} if name == "gpt2" else SIZES
    config = AutoConfig.for_model(name, **sizes | (ARCHITECTURES | HYBRIDS).get(name, {}) | IDS | options)
    lm = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in lm.parameters():  # freshly made models are nearly uniform: nothing would depend on anything
            parameter.mul_(scale) if parameter.dim() > 1 else None
    policy = Policy(lm, IDS["pad_token_id"], [IDS["eos_token_id"]], temperature, **find_shortcuts(lm))
    lm.generation_config = GenerationConfig()
    return policy


def random_batch(rows=6, seed=0, vocabulary=40):
    generator = torch.Generator().manual_seed(seed)
    prompt_mask = torch.arange(7)[None] >= torch.randint(0, 5, (rows, 1), generator=generator)
    completion_mask = torch.arange(9)[None] < torch.randint(1, 10, (rows, 1), generator=generator)
    ids = torch.randint(3, vocabulary, (rows, 16), generator=generator)
    batch = {"prompts": ids[:, :7], "prompt_mask": prompt_mask, "completions": ids[:, 7:], "loss_mask": completion_mask}
    return batch | {"completion_mask": completion_mask}


def backward(policy, logprobs, weights):
    policy.zero_grad()
    (logprobs * weights).sum().backward()
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)


def copy_of_embedded(folder, edit=lambda weights: None, **config):
    """The embedded model with other weights or another config.json."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    weights = load_file(EMBEDDED / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def hub_snapshot(cache, monkeypatch):
    """Where the files of the hub id some/model are, in a cache of the hub at this folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    repository = cache / "models--some--model"
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    snapshot.parent.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name, encoding="utf-8")
    return snapshot


def small_model(folder, auto_class, kind, tokenizer=None, **config):
    """A random model of an architecture, with the embedded tokenizer or another one."""
    torch.manual_seed(0)
    auto_class.from_config(AutoConfig.for_model(kind, **SMALL | config)).save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(EMBEDDED)).save_pretrained(folder)
    return folder


def policy_of(folder):
    args = script("grpo").Args(model_name_or_path=str(folder))
    return load_policy(args, load_tokenizer(args))


def reward_model_of(folder):
    args = script("reward_model").Args(model_name_or_path=str(folder))
    return script("reward_model").load_reward_model(args, load_tokenizer(args))


PROMPTS = [Prompt([4, 5], "1+2?", "3", {})]


def learned(folder):
    ppo = script("ppo")
    return ppo.learned_reward(ppo.Args(reward_model_path=str(folder)), PROMPTS, torch.device("cpu"))


def refused(load, folder):
    """The line that refuses a model."""
    with pytest.raises(InputError) as caught:
        load(folder)
    line = str(caught.value)
    assert line.startswith("--") and str(folder) in line and "\n" not in line and len(line) < 500
    return line


def save_reward_model(folder, tokenizer, **config):
    from transformers import AutoConfig

    from common.harness.embedded import EMBEDDED

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(EMBEDDED, num_labels=1, pad_token_id=tokenizer.pad_token_id, **config)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()
