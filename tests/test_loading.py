"""Models of common/load.py: loading, end tokens and saving."""

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2PreTrainedModel,
    GenerationConfig,
)

import dpo
import grpo
import reward_model
from common.load import end_token, load_prompts, load_tokenizer, save_model
from common.pairs import load_pairs, read_pairs_or_prompts
from common.run import Exit
from rows import GEMMA, gemma_tokenizer
from small_models import (
    copy_of_embedded,
    policy_of,
    random_batch,
    random_lm,
    refused,
    reward_model_of,
    small_model,
)
from testbed import embedded

# --- weights ---


def drop(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def reshape(weights):
    weights["model.norm.weight"] = torch.ones(7)


def keep(weights):
    pass


@pytest.mark.parametrize(
    "load, edit, config, says",
    [
        (policy_of, drop, {}, ": model.layers.1.mlp.up_proj.weight"),
        (policy_of, reshape, {}, "model.norm.weight"),
        (policy_of, keep, {"num_hidden_layers": 3}, ": model.layers.2"),
        (policy_of, keep, {"hidden_act": "nope"}, "nope"),
        (reward_model_of, drop, {}, ": model.layers.1.mlp.up_proj.weight"),  # with a new head
    ],
)
def test_missing_weights_are_refused(load, edit, config, says, tmp_path):
    assert says in refused(load, copy_of_embedded(tmp_path / "model", edit, **config))


@pytest.mark.parametrize("text, ids", [('{"eos_token_id": [3, 0]}', [0, 1, 3]), ("{}", [1]), (None, [1])])
def test_eos_of_the_generation_config(text, ids, tmp_path):
    folder = copy_of_embedded(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    if text:
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    assert policy_of(folder).generation_config.eos_token_id == ids


def test_tokenizer_without_eos(tmp_path):
    folder = copy_of_embedded(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"eos_token": None}), encoding="utf-8")
    assert "no EOS" in refused(policy_of, folder)


def test_soft_cap_needs_eager_attention(tmp_path, monkeypatch):
    """In transformers 5.17 Gemma 2 accepts sdpa, which silently drops the soft cap and changes the log-probs."""
    folder = small_model(tmp_path, AutoModelForCausalLM, "gemma2", head_dim=8, num_key_value_heads=1)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert policy_of(folder).config._attn_implementation == "eager"
    assert policy_of(folder, attn_implementation="sdpa").config._attn_implementation == "eager"
    assert "eager if soft-capped" in grpo.Args.__dataclass_fields__["attn_implementation"].metadata["help"]


def test_attention_by_name():
    assert policy_of(attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(Exit, match="nope"):
        policy_of(attn_implementation="nope")


def test_damaged_files_print_one_line(tmp_path):
    folder = copy_of_embedded(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded" in refused(policy_of, folder)
    (folder / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    assert "no tokenizer" in refused(policy_of, folder)


def test_folders_that_hold_no_model(tmp_path):
    """transformers asked for "sentencepiece or tiktoken", or for an alphanumeric repo id."""
    (tmp_path / "args.json").write_text("{}", encoding="utf-8")
    assert f"the folder of a run; its model is {tmp_path}/model" in refused(policy_of, tmp_path)
    assert "there is no such folder" in refused(policy_of, tmp_path / "absent")


def test_architecture_without_language_model(tmp_path):
    """The error used to list all 200 architectures that have one."""
    line = refused(policy_of, small_model(tmp_path, AutoModel, "vit", image_size=16, patch_size=8))
    assert "ViTConfig" in line and len(line) < 300


def test_model_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    copy_of_embedded(tmp_path / "model")
    assert load_tokenizer("~/model").eos_token_id is not None


def test_no_remote_code(tmp_path):
    """A folder may name classes of its own (`auto_map`), which transformers runs under `trust_remote_code`."""
    folder = copy_of_embedded(tmp_path / "model", auto_map={"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.C"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}), encoding="utf-8")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    refused(policy_of, folder)
    assert not (tmp_path / "ran").exists()


# --- classifiers ---


def test_classifier_is_not_a_policy(tmp_path):
    folder = small_model(tmp_path / "untied", AutoModelForSequenceClassification, "llama")
    assert ": lm_head.weight" in refused(policy_of, folder)


def test_tied_classifier_is_not_a_policy(tmp_path):
    """Its head is the embedding, so no weight is missing."""
    folder = small_model(tmp_path / "tied", AutoModelForSequenceClassification, "llama", tie_word_embeddings=True)
    assert "is no language model" in refused(policy_of, folder)


@pytest.mark.parametrize(
    "kind, sizes",
    [("gpt2", dict(n_embd=32, n_layer=1, n_head=2, n_positions=16)), ("llama", dict(max_position_embeddings=16))],
)
def test_rows_longer_than_the_positions(kind, sizes, tmp_path):
    folder = small_model(tmp_path / "short", AutoModelForCausalLM, kind, **sizes)
    args = grpo.Args(model_name_or_path=str(folder), max_new_tokens=24)
    with pytest.raises(Exit, match="are longer than its 16 positions .--max_new_tokens"):
        load_prompts(args, load_tokenizer(str(folder)))
    args = reward_model.Args(model_name_or_path=str(folder), dataset="embedded-pairs")
    with pytest.raises(Exit, match="are longer than its 16 positions .*--max_length"):
        load_pairs(args, load_tokenizer(str(folder)))
    args = dpo.Args(model_name_or_path=str(folder), max_length=16, max_new_tokens=24)  # evaluation prompts
    with pytest.raises(Exit, match="are longer than its 16 positions .--max_new_tokens"):
        load_pairs(args, load_tokenizer(str(folder)), read_pairs_or_prompts)


def test_classifier_of_a_language_model(tmp_path):
    folder = small_model(tmp_path / "lm", AutoModelForCausalLM, "llama")  # lm_head is left unused
    lm, own = reward_model_of(folder).lm, AutoModelForCausalLM.from_pretrained(folder)
    assert not lm.score.weight.any()
    assert all(torch.equal(x, y) for x, y in zip(lm.model.parameters(), own.model.parameters(), strict=True))


# --- where a completion ends ---


@pytest.mark.parametrize(
    "template, end",
    [
        (None, "<eos>"),
        (GEMMA, "<end_of_turn>"),
        ("{% for m in messages %}{{ m.content }} <end_of_turn>{% endfor %}", "<end_of_turn>"),
        # a turn ends where the next one begins, as in GLM-4: docs/run.md says what follows
        ("{% for m in messages %}{{ '<start_of_turn>' + m.role }}\n{{ m.content }}{% endfor %}", "<eos>"),
        # the answer is left out: nothing follows it, whatever the template begins with
        ("<bos>{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "<eos>"),
        ("\u00e9{{ messages[0].content }}<pad>", "<eos>"),
        # the answer is followed by a character that the tokenizer does not know, or by ordinary text
        ("{% for m in messages %}{{ m.content }}\u00e9{% endfor %}", "<eos>"),
        ("{% for m in messages %}{{ m.content }}\n###<end_of_turn>{% endfor %}", "<eos>"),
    ],
)  # fmt: skip
def test_end_token(template, end):
    tokenizer = gemma_tokenizer(template)
    assert tokenizer.convert_ids_to_tokens(end_token(tokenizer)) == end


# --- loaded for training, and saved ---


@pytest.mark.parametrize("name, dropout", [("gpt2", "resid_pdrop"), ("qwen2", "attention_dropout")])
def test_training_is_float32_without_dropout(name, dropout, tmp_path):
    lm = random_lm(name)
    setattr(lm.config, dropout, 0.5)
    lm.to(torch.bfloat16).save_pretrained(tmp_path)
    embedded()[2].save_pretrained(tmp_path)
    loaded, batch = policy_of(tmp_path), random_batch()
    assert loaded.training and loaded.dtype == torch.float32  # whatever the config says
    first, again = (grpo.completion_logprobs(loaded, batch, grpo.Args())[0] for _ in range(2))
    assert torch.equal(first, again)


def test_generation_config_is_saved_unchanged(tmp_path):
    _, _, tokenizer, lm = embedded()
    lm.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=1)
    lm.save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    lm = policy_of(tmp_path / "a")
    assert lm.generation_config.top_k != 7  # sampling has options of its own
    accelerator = Accelerator(cpu=True)
    save_model(accelerator, accelerator.prepare(lm), tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.generation_config.top_k == 7
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")  # it is tied
    assert all(torch.equal(x, again.get_parameter(name)) for name, x in lm.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("1+1").input_ids == tokenizer("1+1").input_ids
