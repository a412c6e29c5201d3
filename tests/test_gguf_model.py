"""examples/gguf_model.py, on tiny random GGUF files of each architecture."""

import gguf_model
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.needs("gguf")
SIZE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TOKENS = [*"abcdefghijklmnopqrstuvwxyzW?+.0123456789", "Ġ", "th", "<|end|>", "<|pad|>"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    """Return the name of a weight in a GGUF file."""
    short = {"lm_head.weight": "output.weight", "model.embed_tokens.weight": "token_embd.weight"}
    if name in short or name == "model.norm.weight":
        return short.get(name, "output_norm.weight")
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[stem]}.{kind}"


def in_file_order(name, weight, shape):
    """Return a weight as stored in the file: llama's queries and keys have their halves interleaved."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if shape != "llama" or not heads:
        return weight
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, lm, shape):
    """Write a model as a GGUF file in float32, with a tokenizer of single letters."""
    import gguf

    writer = gguf.GGUFWriter(path, shape)
    for add, value in (
        (writer.add_block_count, 2), (writer.add_context_length, 128), (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 96), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_rope_freq_base, 1e4), (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_vocab_size, len(TOKENS)),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_token_list, TOKENS), (writer.add_token_merges, ["t h"]),
        (writer.add_token_types, [1] * (len(TOKENS) - 2) + [3, 3]), (writer.add_eos_token_id, len(TOKENS) - 2),
        (writer.add_bos_token_id, len(TOKENS) - 2), (writer.add_pad_token_id, len(TOKENS) - 1),
    ):  # fmt: skip
        add(value)
    for name, weight in lm.state_dict().items():
        writer.add_tensor(gguf_name(name), in_file_order(name, weight, shape).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(shape):
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape, vocab_size=len(TOKENS), tie_word_embeddings=False, rms_norm_eps=1e-6, **SIZE)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
def test_folder_has_weights_and_stop_tokens(shape, tmp_path):
    lm = tiny(shape)
    write_gguf(tmp_path / "tiny.gguf", lm, shape)
    read, tokenizer = gguf_model.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    gguf_model.check(tmp_path / "model", read, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weights = saved.state_dict()
    assert all(weights[name].equal(weight) for name, weight in lm.state_dict().items())
    assert saved.generation_config.eos_token_id == [len(TOKENS) - 2, len(TOKENS) - 1]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<|end|>"


@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_equal_embedding_and_head_are_tied(noise, tmp_path):
    lm = tiny("qwen2")
    outputs = lm.get_output_embeddings().weight.data
    lm.get_input_embeddings().weight.data = outputs + noise * outputs.std() * torch.randn_like(outputs)
    write_gguf(tmp_path / "tiny.gguf", lm, "qwen2")
    read, tokenizer = gguf_model.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    gguf_model.check(tmp_path / "model", read, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.config.tie_word_embeddings == (noise < 0.1)
    expected = outputs if noise < 0.1 else lm.get_input_embeddings().weight
    assert saved.get_input_embeddings().weight.equal(expected) and saved.lm_head.weight.equal(outputs)


def test_mismatched_folder_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny("qwen2"), "qwen2")
    read, tokenizer = gguf_model.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    read.get_output_embeddings().weight.data[0] += 1
    with pytest.raises(SystemExit, match="is not the model of the file"):
        gguf_model.check(tmp_path / "model", read, tokenizer)
