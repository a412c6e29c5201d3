"""Models for the tests: random ones of any architecture with batches for them, and checkpoints on disk."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from common.load import EMBEDDED, load_policy
from common.run import Exit
from testbed import script

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
IDS = dict(vocab_size=40, bos_token_id=1, eos_token_id=2, pad_token_id=0)
KEYS = dict(num_key_value_heads=2)  # fewer heads of keys than of queries
HEADS = dict(num_key_value_heads=2, head_dim=8)
WINDOW = dict(sliding_window=4)  # shorter than a row, so that the cache drops tokens
LINEAR = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
LINEAR |= dict(layer_types=["linear_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
MAMBA = dict(mamba_n_heads=2, mamba_d_state=4, mamba_chunk_size=8)
ZAMBA = dict(mamba_d_state=4, n_mamba_heads=2, mamba_ngroups=1, num_mem_blocks=1)
SHARED_KEYS = dict(num_kv_shared_layers=1, layer_types=["full_attention"] * 2)
PER_LAYER = dict(global_head_dim=8, vocab_size_per_layer_input=40, hidden_size_per_layer_input=4)

ARCHITECTURES = {  # {model type: settings beyond SIZES and IDS}
    "qwen2": KEYS,
    "llama": KEYS,
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),  # absolute positions
    "mistral": KEYS | dict(sliding_window=8),
    "qwen3": HEADS,
    "qwen3_moe": HEADS | EXPERTS,
    "gemma3_text": HEADS | WINDOW,
    "gemma4_text": HEADS | SHARED_KEYS | PER_LAYER,
    "olmo2": KEYS,
    "phi3": KEYS,
    "gpt_neox": {},
    "stablelm": KEYS,  # its layers drop keyword arguments
    "bloom": dict(n_layer=2, n_head=4),  # biases of position
}
SCALED = {  # something follows the head
    "gemma2": HEADS | WINDOW,
    "granite": KEYS | dict(logits_scaling=3.0),
    "cohere": HEADS,
    "llama4_text": HEADS | dict(intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=8),
}
HYBRIDS = {  # more in the cache than keys and values
    "qwen3_next": LINEAR | EXPERTS,
    "qwen3_5_text": LINEAR,
    "lfm2": KEYS | dict(layer_types=["conv", "full_attention"]),
    "zamba2": ZAMBA | dict(layers_block_type=["mamba", "hybrid"]),
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"], num_local_experts=0, logits_scaling=3.0),
    "falcon_h1": MAMBA | KEYS | dict(mamba_d_ssm=16, mamba_d_head=8),
    "mamba2": dict(num_heads=2, head_dim=32, state_size=4, n_groups=1, chunk_size=8),
}
EVERY = ARCHITECTURES | SCALED | HYBRIDS


def random_lm(name, seed=0, scale=4.0, **options):
    """A small random model of an architecture. Weights are scaled up: fresh ones are nearly uniform."""
    torch.manual_seed(seed)
    sizes = {} if name == "gpt2" else SIZES
    config = AutoConfig.for_model(name, **sizes | EVERY.get(name, {}) | IDS | options)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    lm = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    lm.generation_config = GenerationConfig(eos_token_id=[IDS["eos_token_id"]])
    return lm


def random_batch(rows=6, seed=0, vocabulary=40):
    generator = torch.Generator().manual_seed(seed)
    prompt_mask = torch.arange(7)[None] >= torch.randint(0, 5, (rows, 1), generator=generator)
    completion_mask = torch.arange(9)[None] < torch.randint(1, 10, (rows, 1), generator=generator)
    ids = torch.randint(3, vocabulary, (rows, 16), generator=generator)
    batch = {"prompts": ids[:, :7], "prompt_mask": prompt_mask, "completions": ids[:, 7:], "loss_mask": completion_mask}
    return batch | {"completion_mask": completion_mask}


def backward(lm, logprobs, weights):
    lm.zero_grad()
    (logprobs * weights).sum().backward()
    return [parameter.grad.clone() for parameter in lm.parameters() if parameter.grad is not None]


SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)


def copy_of_embedded(folder, edit=lambda weights: None, **config):
    """The embedded model with other weights or another config.json."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED["embedded"] / name, folder)
    weights = load_file(EMBEDDED["embedded"] / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def small_model(folder, auto_class, kind, tokenizer=None, **config):
    """A random model of an architecture, with the embedded tokenizer or another one."""
    torch.manual_seed(0)
    auto_class.from_config(AutoConfig.for_model(kind, **SMALL | config)).save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(EMBEDDED["embedded"])).save_pretrained(folder)
    return folder


def policy_of(folder="embedded", **options):
    args = script("grpo").Args(model_name_or_path=str(folder), **options)
    return load_policy(args, Accelerator(cpu=True))[1]


def logits(lm):
    with torch.no_grad():
        return lm.eval()(torch.arange(9)[None]).logits


def reward_model_of(folder):
    module = script("reward_model")
    return module.load_reward_model(str(folder), module.Args(model_name_or_path=str(folder)), new_head=True)


def refused(load, folder):
    """Return the error line for a model that is refused."""
    with pytest.raises(Exit) as caught:
        load(folder)
    line = str(caught.value)
    assert str(folder) in line and "\n" not in line
    return line


def save_reward_model(folder, tokenizer, **config):
    torch.manual_seed(1)
    config |= dict(num_labels=1, pad_token_id=tokenizer.pad_token_id)
    config = AutoConfig.from_pretrained(EMBEDDED["embedded"], **config)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval()
