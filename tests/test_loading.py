"""What is loaded is what the checkpoint holds, or it is refused in one line; and where a completion ends."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

import grpo
import ppo
import reward_model
from common.errors import InputError
from common.harness.data import EMBEDDED, Prompt, encode_text, end_token
from common.harness.learned_reward import learned_reward
from common.harness.loading import check_vocabulary, find_stop_tokens, load_policy, load_tokenizer
from common.harness.pairs import load_pairs, pair_batch
from reward_model import load_reward_model

SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
PROMPTS = [Prompt([4, 5], "1+2?", "3", {})]


def copy_of_embedded(folder, edit=lambda weights: None, **config):
    """The embedded model with other weights or another config.json."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    weights = load_file(EMBEDDED / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def small_model(folder, auto_class, kind, tokenizer=None, **config):
    """A random model of an architecture, with the embedded tokenizer or another one."""
    torch.manual_seed(0)
    auto_class.from_config(AutoConfig.for_model(kind, **SMALL | config)).save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(EMBEDDED)).save_pretrained(folder)
    return folder


def policy_of(folder):
    args = grpo.Args(model_name_or_path=str(folder))
    return load_policy(args, load_tokenizer(args))


def reward_model_of(folder):
    args = reward_model.Args(model_name_or_path=str(folder))
    return load_reward_model(args, load_tokenizer(args))


def learned(folder):
    return learned_reward(ppo.Args(reward_model_path=str(folder)), PROMPTS, torch.device("cpu"))


def refused(load, folder):
    """The line that refuses a model."""
    with pytest.raises(InputError) as caught:
        load(folder)
    line = str(caught.value)
    assert line.startswith("--") and str(folder) in line and "\n" not in line and len(line) < 500
    return line


# --- weights ---


def drop(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def reshape(weights):
    weights["model.norm.weight"] = torch.ones(7)


def add_layer(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = torch.ones(192, 64)


def bare_with_layer(weights):
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)
    weights["layers.2.mlp.up_proj.weight"] = torch.ones(192, 64)


@pytest.mark.parametrize("load", [policy_of, reward_model_of])
@pytest.mark.parametrize(
    "edit, config, says",
    [
        (drop, {}, "lacks weights of a Llama{}: model.layers.1.mlp.up_proj.weight"),
        (reshape, {}, "has weights of other shapes than its config.json gives a Llama{}: model.norm.weight"),
        (add_layer, {}, "has weights that a Llama{} does not use: model.layers.2.mlp.up_proj.weight"),
        (bare_with_layer, {}, "has weights that a Llama{} does not use: layers.2.mlp.up_proj.weight"),
        (lambda weights: None, {"num_hidden_layers": 1}, "model.layers.1.mlp.gate_proj.weight and 6 more"),
        (lambda weights: None, {"dtype": "float99"}, "AttributeError: module 'torch' has no attribute"),
        (lambda weights: None, {"num_attention_heads": "four"}, "expected int, got str"),
        (lambda weights: None, {"hidden_act": "nope"}, "no model: KeyError: 'nope'"),
    ],
)
def test_a_checkpoint_that_is_not_the_model_is_refused(load, edit, config, says, tmp_path):
    kind = "ForCausalLM" if load is policy_of else "ForSequenceClassification"
    assert says.format(kind) in refused(load, copy_of_embedded(tmp_path / "model", edit, **config))


@pytest.mark.parametrize("load", [policy_of, reward_model_of])
def test_a_truncated_file_of_weights_is_one_line(load, tmp_path):
    path = copy_of_embedded(tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "no model: SafetensorError" in refused(load, path.parent)


def test_a_damaged_tokenizer_is_one_line(tmp_path):
    folder = copy_of_embedded(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert "no tokenizer could be loaded" in refused(policy_of, folder)


def test_weights_that_serve_other_ends_than_text_are_one_line(tmp_path, capsys):
    names = ["model.vision_tower.conv.weight", "mtp.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]

    def add(weights):
        weights |= {name: torch.ones(3) for name in [*names, "transformer.h.0.attn.attention.bias"]}

    policy = policy_of(copy_of_embedded(tmp_path / "model", add))
    (line,) = capsys.readouterr().out.splitlines()
    unused = "model.vision_tower.conv.weight, mtp.norm.weight, transformer.h.0.attn.attention.bias"
    assert line.endswith(f"a LlamaForCausalLM leaves weights unused: {unused}")
    own = AutoModelForCausalLM.from_pretrained(EMBEDDED).state_dict()
    assert all(torch.equal(value, own[name]) for name, value in policy.lm.state_dict().items())


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_is_no_policy(kind, tmp_path):
    folder = small_model(tmp_path / "encoder", AutoModelForMaskedLM, kind)  # all its weights fit
    assert "sees later tokens" in refused(policy_of, folder)


def test_a_classifier_is_no_policy(tmp_path):
    folder = small_model(tmp_path / "tied", AutoModelForSequenceClassification, "llama", tie_word_embeddings=True)
    assert "does not use: score.weight" in refused(policy_of, folder)
    folder = small_model(tmp_path / "untied", AutoModelForSequenceClassification, "llama")
    assert "lacks weights of a LlamaForCausalLM: lm_head.weight" in refused(policy_of, folder)


def test_a_classifier_made_of_a_language_model_has_a_new_head_alone(tmp_path):
    folder = small_model(tmp_path / "lm", AutoModelForCausalLM, "llama")  # lm_head is left unused
    lm, own = reward_model_of(folder).lm, AutoModelForCausalLM.from_pretrained(folder)
    assert not lm.score.weight.any()
    assert all(torch.equal(x, y) for x, y in zip(lm.model.parameters(), own.model.parameters(), strict=True))


def test_a_trained_classifier_without_its_head_is_refused(tmp_path):
    folder = small_model(tmp_path / "classifier", AutoModelForSequenceClassification, "llama", num_labels=1)
    weights = load_file(folder / "model.safetensors")
    save_file({name: x for name, x in weights.items() if name != "score.weight"}, folder / "model.safetensors")
    for load in (reward_model_of, learned):
        assert "lacks weights of a LlamaForSequenceClassification: score.weight" in refused(load, folder)


# --- what a reward model must be ---


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5"])
def test_a_classifier_that_does_not_read_the_last_token_is_refused(kind, tmp_path):
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2) if kind == "t5" else {}
    config = dict(num_labels=1, pad_token_id=0) | sizes
    folder = small_model(tmp_path / kind, AutoModelForSequenceClassification, kind, **config)
    for load in (reward_model_of, learned):
        assert "does not read its score at the last token: a causal model is needed" in refused(load, folder)


@pytest.mark.parametrize("kind, sizes", [("llama", {}), ("gpt2", {"n_embd": 16}), ("opt", {"word_embed_proj_dim": 16})])
def test_causal_classifiers_read_the_last_token(kind, sizes, tmp_path):
    config = dict(num_labels=1, pad_token_id=0, max_position_embeddings=1024) | sizes
    learned(small_model(tmp_path / kind, AutoModelForSequenceClassification, kind, **config))


@pytest.mark.parametrize("load", [policy_of, reward_model_of, learned])
def test_an_embedding_smaller_than_the_tokenizer_is_refused(load, tmp_path):
    auto_class = AutoModelForCausalLM if load is policy_of else AutoModelForSequenceClassification
    folder = small_model(tmp_path / "model", auto_class, "llama", vocab_size=19, num_labels=1, pad_token_id=0)
    assert r"its tokenizer has '\n' as 19, its embedding has 19 rows" in refused(load, folder)


def test_a_placeholder_for_images_needs_no_embedding():
    # Gemma 3 1B: <image_soft_token> is 262144 in an embedding of 262144 rows.
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    args = grpo.Args()
    with pytest.raises(InputError, match="'<image>' as 20"):
        check_vocabulary(args, "model_name_or_path", lm, tokenizer)
    tokenizer.image_token = "<image>"
    check_vocabulary(args, "model_name_or_path", lm, tokenizer)


@pytest.mark.parametrize(
    "load, sizes",
    [
        (policy_of, "--max_prompt_tokens 512 + --max_new_tokens 64"),
        (reward_model_of, "--max_length 1024"),
        (learned, "a prompt of 4 + --max_new_tokens 64"),
    ],
)
def test_rows_longer_than_a_table_of_positions_are_refused(load, sizes, tmp_path):
    auto_class = AutoModelForSequenceClassification if load is learned else AutoModelForCausalLM
    folder = small_model(
        tmp_path / "model", auto_class, "gpt2", n_embd=16, n_positions=60, pad_token_id=0, num_labels=1
    )
    assert f"positions for 60 tokens, less than {sizes}" in refused(load, folder)


# --- where a completion ends ---

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_STOP = ["<eos>", "<end_of_turn>"]
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]


def gemma_tokenizer(template=GEMMA):
    """One token a character; the chat template closes a turn with <end_of_turn>, as Gemma's does."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*GEMMA_SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    roles = dict(pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    tokenizer.add_special_tokens({"additional_special_tokens": GEMMA_SPECIAL[4:]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template, end, stop",
    [
        (None, "<eos>", ["<eos>"]),
        (GEMMA, "<end_of_turn>", GEMMA_STOP),
        ("{% for m in messages %}{{ m.content }} <end_of_turn>{% endfor %}", "<end_of_turn>", GEMMA_STOP),
        # the answer is left out: nothing follows it, whatever the template begins with
        ("<bos>{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "<eos>", ["<eos>"]),
        ("\u00e9{{ messages[0].content }}<pad>", "<eos>", ["<eos>"]),
        # the answer is followed by a character that the tokenizer does not know, or by ordinary text
        ("{% for m in messages %}{{ m.content }}\u00e9{% endfor %}", "<eos>", ["<eos>"]),
        ("{% for m in messages %}{{ m.content }}\n###<end_of_turn>{% endfor %}", "<eos>", ["<eos>"]),
    ],
)  # fmt: skip
def test_the_token_that_ends_a_completion(template, end, stop):
    tokenizer = gemma_tokenizer(template)
    assert tokenizer.convert_ids_to_tokens(end_token(tokenizer)) == end
    assert tokenizer.convert_ids_to_tokens(find_stop_tokens(tokenizer, GenerationConfig())) == stop


def test_a_template_that_refuses_an_answer_is_one_line():
    tokenizer = gemma_tokenizer("{{ raise_exception('user turns only') if messages[1:] }}{{ messages[0].content }}")
    with pytest.raises(InputError, match="the chat template refuses a question with its answer: user turns only"):
        end_token(tokenizer)


def pairs_of(folder, tokenizer, *rows):
    path = folder / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) + "\n" for row in rows)
    )
    args = reward_model.Args(dataset=str(path), eval_dataset=str(path))
    return load_pairs(args, tokenizer)[0]


@pytest.mark.parametrize("template, end", [(GEMMA, "<end_of_turn>"), (None, "<eos>")])
def test_given_pairs_end_with_what_the_template_puts_there(template, end, tmp_path):
    tokenizer = gemma_tokenizer(template)
    written = [("2+2?", "4", "5"), ("2+2?", "4<end_of_turn>", "5<eos>"), ("2+2?", "4<end_of_turn><eos>", "5")]
    for pair in pairs_of(tmp_path, tokenizer, *written[: 3 if template else 1]):
        assert [tokenizer.convert_ids_to_tokens(ids) for ids in pair[1:3]] == [["4", end], ["5", end]]


def test_a_reward_model_is_trained_and_asked_at_the_end_of_the_turn(tmp_path):
    # Through dialogues too: prompt, answer, <end_of_turn>, as the chat template renders them, and nothing behind.
    tokenizer = gemma_tokenizer()
    config = dict(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, hidden_size=32)
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", tokenizer, **config)
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")
    assert text.endswith("4<end_of_turn>")
    with torch.no_grad():
        expected = float(stock(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits)
        (pair,) = pairs_of(tmp_path, tokenizer, ("2+2?", "4", "5"))
        trained = reward_model_of(folder)(pair_batch([pair], "cpu"))
    asked = learned(folder)
    (score,) = asked.function(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert float(trained[0]) == pytest.approx(expected, abs=1e-6) and score == pytest.approx(expected, abs=1e-6)


# --- special tokens that are spelled ---


def unigram_tokenizer():
    """A tokenizer that has its end token among its ordinary pieces, where `split_special_tokens` does not reach."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -2.0) for character in "</s>ab")]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def test_a_spelled_special_token_is_text():
    tokenizer, text = gemma_tokenizer(), "1<eos>2<end_of_turn><<pad>3"
    (ids, plain) = encode_text([text, "12"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == list(text) and tokenizer.convert_ids_to_tokens(plain) == ["1", "2"]
    tokenizer = unigram_tokenizer()
    assert tokenizer.eos_token_id in tokenizer("a</s>b", split_special_tokens=True).input_ids
    (ids,) = encode_text(["a</s>b"], tokenizer)
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "a</s>b" and tokenizer.eos_token_id not in ids


def test_a_spelled_end_token_of_a_pair_is_text(tmp_path):
    (pair,) = pairs_of(tmp_path, gemma_tokenizer(), ("2+2?", "4<end_of_turn>5", "5"))
    assert len(pair.chosen) == len("4<end_of_turn>5") + 1


def test_a_completion_that_was_cut_does_not_score_like_a_finished_one(tmp_path):
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", num_labels=1, pad_token_id=0)
    scores = learned(folder).function(
        prompts=["1+2?"] * 3, completions=["3", "3<eos>", "3<pad>"], truncated=[False, True, True]
    )
    with torch.no_grad():
        tokenizer, model = (
            AutoTokenizer.from_pretrained(folder),
            AutoModelForSequenceClassification.from_pretrained(folder),
        )
        prompt, three, unknown = tokenizer("1+2?").input_ids, tokenizer("3").input_ids, [tokenizer.unk_token_id]
        for completion, score in zip(([tokenizer.eos_token_id], unknown * 5, unknown * 5), scores, strict=True):
            expected = float(model(torch.tensor([prompt + three + completion])).logits)
            assert score == pytest.approx(expected, abs=1e-6)
    assert abs(scores[0] - scores[1]) > 1e-3
