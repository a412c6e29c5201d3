"""common/harness/loading.py: what is loaded is what the checkpoint holds, or it is refused in one line; where a
completion ends; and what is saved."""

import dataclasses
import json
import math

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2PreTrainedModel,
    GenerationConfig,
)

import grpo
import ppo
from common.errors import InputError
from common.harness import probes
from common.harness.embedded import EMBEDDED
from common.harness.loading import (
    find_stop_tokens,
    load_policy,
    load_tokenizer,
    save_pretrained,
)
from common.harness.probes import causal_problem, influence, ordinary_ids
from common.harness.prompts import end_token
from rows import GEMMA, GEMMA_STOP, gemma_tokenizer
from small_models import (
    SMALL,
    copy_of_embedded,
    learned,
    policy_of,
    random_batch,
    random_policy,
    refused,
    reward_model_of,
    small_model,
)
from testbed import embedded, script

# --- weights ---


def drop(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def reshape(weights):
    weights["model.norm.weight"] = torch.ones(7)


def add_layer(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = torch.ones(192, 64)


def keep(weights):
    pass


def bare_with_layer(weights):
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)
    weights["layers.2.mlp.up_proj.weight"] = torch.ones(192, 64)


@pytest.mark.parametrize(
    "load, edit, config, says",
    [
        (policy_of, drop, {}, "not those of a LlamaForCausalLM: model.layers.1.mlp.up_proj.weight"),
        (policy_of, reshape, {}, "not those of a LlamaForCausalLM: model.norm.weight"),
        (policy_of, add_layer, {}, "not those of a LlamaForCausalLM: model.layers.2.mlp.up_proj.weight"),
        (policy_of, keep, {"num_hidden_layers": 1}, "model.layers.1.mlp.gate_proj.weight and 6 more"),
        (policy_of, keep, {"hidden_act": "nope"}, "no model: KeyError: 'nope'"),
        # with a new head
        (reward_model_of, drop, {}, "not those of a LlamaForSequenceClassification: model.layers.1.mlp.up_proj.weight"),
        (reward_model_of, bare_with_layer, {}, "not those of a LlamaForSequenceClassification: layers.2.mlp.up_proj"),
    ],
)
def test_a_checkpoint_that_is_not_the_model_is_refused(load, edit, config, says, tmp_path):
    assert says in refused(load, copy_of_embedded(tmp_path / "model", edit, **config))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn", 5, 0, "", "float99", "Tensor", ["int8"]])
def test_a_dtype_that_would_destroy_the_saved_model_is_refused(dtype, tmp_path):
    # int8 wrote a model/ of zeros, which loaded without complaint; 5 failed at the end of the training.
    with_dtype = copy_of_embedded(tmp_path / "model", dtype=dtype)
    (with_dtype / "model.safetensors").unlink()  # it is refused before the weights are loaded
    for load in (policy_of, learned) if dtype == "int8" else (policy_of,):
        line = refused(load, with_dtype)
        assert "model/ would lose precision in its dtype " in line or "no tokenizer could be loaded: " in line


INSIDE = dict(model_type="gemma3", dtype=None, text_config={**SMALL, "num_key_value_heads": 1, "dtype": "int8"})


@pytest.mark.parametrize("values", [{"dtype": None, "torch_dtype": "int8"}, INSIDE])
def test_a_dtype_by_its_old_name_or_of_the_text_model_is_refused_too(values, tmp_path):
    assert "its dtype torch.int8" in refused(policy_of, copy_of_embedded(tmp_path / "model", **values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", None])
def test_a_dtype_of_floats_is_what_the_model_is_saved_in(dtype, tmp_path):
    policy = policy_of(copy_of_embedded(tmp_path / "model", dtype=dtype))
    assert policy.lm.origin.dtype == getattr(torch, dtype or "float32") and policy.lm.dtype == torch.float32


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "not a valid JSON file"),
        ('{"eos_token_id": [1, 2', "not a valid JSON file"),
        ("[1, 2]", "no model: TypeError"),
        ('{"eos_token_id": "<eos>"}', "its generation_config.json: TypeError"),
        ('{"eos_token_id": [1, [2]]}', "its generation_config.json: TypeError"),
    ],
)
def test_a_generation_config_that_is_damaged_or_has_other_eos_ids_is_one_line(text, says, tmp_path):
    # transformers left a damaged one out, with its list of EOS ids: completions then ended at one of them alone.
    folder = copy_of_embedded(tmp_path / "model")
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    assert says in refused(policy_of, folder)


@pytest.mark.parametrize("text, ids", [('{"eos_token_id": [3, 0]}', [0, 1, 3]), ("{}", [1]), (None, [1])])
def test_a_generation_config_gives_its_eos_ids_or_none(text, ids, tmp_path):
    folder = copy_of_embedded(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    if text:
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    assert policy_of(folder).stop_tokens == ids


FP8 = {"quantization_config": {"quant_method": "fp8"}}
TEXT = {**SMALL, "num_key_value_heads": 1}
INSIDE_FP8 = dict(model_type="gemma3", text_config=TEXT | FP8)
AROUND_FP8 = dict(model_type="gemma3", text_config=TEXT, **FP8)


@pytest.mark.parametrize("config", [FP8, {"quantization_config": {"load_in_4bit": True}}, INSIDE_FP8, AROUND_FP8])
def test_quantised_weights_are_refused(config, tmp_path):
    # Those of fp8 load without a message, as numbers that nothing can be learned with.
    assert "its weights are quantised" in refused(policy_of, copy_of_embedded(tmp_path / "model", **config))


SINKS = dict(num_local_experts=2, num_experts_per_tok=1, head_dim=8, num_key_value_heads=2)


@pytest.mark.parametrize(
    "kind, sizes", [("gemma2", {"head_dim": 8, "num_key_value_heads": 1}), ("bloom", {"n_head": 2}), ("gpt_oss", SINKS)]
)
def test_a_model_without_sdpa_runs_with_eager(kind, sizes, tmp_path):
    folder = small_model(tmp_path, AutoModelForCausalLM, kind, **sizes)
    policy = policy_of(folder)
    assert policy.lm.config._attn_implementation == "eager"
    assert torch.isfinite(policy(random_batch(vocabulary=20))[0]).all()


def test_a_soft_cap_of_attention_is_never_left_to_sdpa(tmp_path, monkeypatch):
    """Under transformers 5.17 Gemma 2 says that it has sdpa, which leaves the cap out: other log-probs, and no word."""
    folder = small_model(tmp_path, AutoModelForCausalLM, "gemma2", head_dim=8, num_key_value_heads=1)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert policy_of(folder).lm.config._attn_implementation == "eager"


def test_another_attention_is_taken_as_it_is_named(tmp_path, capsys):
    _, _, _, policy = embedded(attn_implementation="eager")
    assert policy.lm.config._attn_implementation == "eager"
    assert embedded()[3].lm.config._attn_implementation == "sdpa"
    assert not capsys.readouterr().out
    args = grpo.Args(model_name_or_path="embedded", attn_implementation="nope")
    with pytest.raises(InputError, match="nope"):
        load_policy(args, load_tokenizer(args))


def test_a_truncated_file_of_weights_is_one_line(tmp_path):
    path = copy_of_embedded(tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "no model: SafetensorError" in refused(policy_of, path.parent)


def test_a_damaged_tokenizer_is_one_line(tmp_path):
    folder = copy_of_embedded(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    assert "no tokenizer could be loaded" in refused(policy_of, folder)


@pytest.mark.parametrize(
    "name, options",
    [
        ("./absent", []),
        ("~/absent", []),
        ("runs/x/model", []),
        ("runs/model", []),  # it may be a hub id
        pytest.param("runs/model", ["--dry_run"], marks=pytest.mark.beside("tools")),
    ],
)
def test_a_folder_that_is_not_there_is_said_to_be_that(name, options, tmp_path, monkeypatch):
    """In place of what the hub says about a name that is none of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError) as error:
        grpo.main(["--model_name_or_path", name, *options])
    text = str(error.value)
    assert text.startswith(f"--model_name_or_path {name}: no such folder") and "\n" not in text


def test_the_folder_of_a_run_or_a_checkpoint_names_the_model_of_the_run(tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    for path in (run / "args.json", checkpoint / "meta.json", checkpoint / "state.json"):
        path.write_text("{}", encoding="utf-8")
    of_run = f"{run}: this is the folder of a run: name the model of the run, {run / 'model'}"
    of_checkpoint = f"this is a checkpoint, which only --resume reads: name the model of the run, {run / 'model'}"
    for made in (False, True):
        if made:
            (run / "model").mkdir()
        for folder, says in ((run, of_run), (checkpoint, of_checkpoint)):
            with pytest.raises(InputError) as error:
                grpo.main(["--model_name_or_path", str(folder)])
            assert says in str(error.value) and str(error.value).endswith("model") == made


def test_a_home_folder_is_found_where_no_shell_expands_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    copy_of_embedded(tmp_path / "model")
    assert load_tokenizer(grpo.Args(model_name_or_path="~/model")).eos_token_id is not None


def test_weights_that_serve_other_ends_than_text_are_one_line(tmp_path, capsys):
    names = ["model.vision_tower.conv.weight", "mtp.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]

    def add(weights):
        weights |= {name: torch.ones(3) for name in [*names, "transformer.h.0.attn.attention.bias"]}

    policy = policy_of(copy_of_embedded(tmp_path / "model", add))
    (line,) = capsys.readouterr().out.splitlines()
    unused = "model.vision_tower.conv.weight, mtp.norm.weight, transformer.h.0.attn.attention.bias"
    assert line.endswith(f"a LlamaForCausalLM leaves weights unused, and model/ will lack them: {unused}")
    own = AutoModelForCausalLM.from_pretrained(EMBEDDED).state_dict()
    assert all(torch.equal(value, own[name]) for name, value in policy.lm.state_dict().items())


def test_an_encoder_is_no_policy(tmp_path):
    folder = small_model(tmp_path / "encoder", AutoModelForMaskedLM, "bert")  # all its weights fit
    assert "sees later tokens" in refused(policy_of, folder)


DEEP = dict(num_hidden_layers=24, num_key_value_heads=2, pad_token_id=0, rms_norm_eps=1e-12)


def test_a_fresh_deep_model_with_a_row_of_zeros_for_the_pad_token_is_a_policy(tmp_path, monkeypatch):
    """Qwen2, Gemma 2 and 3 make that row. Behind 24 norms the gradient at it is not a number, and only there."""
    folder = small_model(tmp_path / "deep", AutoModelForCausalLM, "qwen2", **DEEP)
    policy = policy_of(folder)
    assert not policy.lm.get_input_embeddings().weight[0].any()
    policy.lm.config.pad_token_id = None  # the row is found by its zeros
    assert 0 not in ordinary_ids(policy.lm, 30) and causal_problem(policy.lm) is None
    monkeypatch.setattr(probes, "ordinary_ids", lambda lm, count: torch.arange(count))
    assert math.isnan(influence(policy.lm)[0])


def test_a_gradient_that_is_not_a_number_is_called_that(monkeypatch, tmp_path):
    folder = small_model(tmp_path / "deep", AutoModelForCausalLM, "qwen2", **DEEP)
    monkeypatch.setattr(probes, "ordinary_ids", lambda lm, count: torch.arange(count))
    assert "not a number" in refused(policy_of, folder)


def test_a_classifier_is_no_policy(tmp_path):
    folder = small_model(tmp_path / "tied", AutoModelForSequenceClassification, "llama", tie_word_embeddings=True)
    assert "its weights are not those of a LlamaForCausalLM: score.weight" in refused(policy_of, folder)
    folder = small_model(tmp_path / "untied", AutoModelForSequenceClassification, "llama")
    assert "its weights are not those of a LlamaForCausalLM: lm_head.weight" in refused(policy_of, folder)


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
        assert "its weights are not those of a LlamaForSequenceClassification: score.weight" in refused(load, folder)


# --- what a reward model must be ---


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_a_classifier_that_does_not_read_the_last_token_is_refused(kind, tmp_path):
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2) if kind == "t5" else {}
    config = dict(num_labels=1, pad_token_id=0) | sizes
    folder = small_model(tmp_path / kind, AutoModelForSequenceClassification, kind, **config)
    for load in (reward_model_of, learned):
        assert "does not read its score at the last token: take a causal model" in refused(load, folder)


@pytest.mark.parametrize("kind, sizes", [("llama", {}), ("gpt2", {"n_embd": 16}), ("opt", {"word_embed_proj_dim": 16})])
def test_causal_classifiers_read_the_last_token(kind, sizes, tmp_path):
    config = dict(num_labels=1, pad_token_id=0, max_position_embeddings=1024) | sizes
    learned(small_model(tmp_path / kind, AutoModelForSequenceClassification, kind, **config))


def test_an_embedding_smaller_than_the_tokenizer_is_refused(tmp_path):
    folder = small_model(tmp_path / "model", AutoModelForCausalLM, "llama", vocab_size=19)
    assert r"its embedding has 19 rows, none for '\n'" in refused(policy_of, folder)


def test_a_placeholder_for_images_needs_no_embedding(tmp_path):
    # Gemma 3 1B: <image_soft_token> is 262144 in an embedding of 262144 rows.
    args = grpo.Args(model_name_or_path=str(small_model(tmp_path, AutoModelForCausalLM, "llama")))
    tokenizer = load_tokenizer(args)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    load_policy(args, tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<other>"]})
    with pytest.raises(InputError, match="its embedding has 20 rows, none for '<image_soft_token>', '<other>'"):
        load_policy(args, tokenizer)


def critic_of(folder):
    return ppo.load_scorer(ppo.Args(critic_path=str(folder)), "critic_path", "cpu")


@pytest.mark.parametrize(
    "load, tokens", [(policy_of, 512 + 64), (critic_of, 512 + 64), (reward_model_of, 1024), (learned, 4 + 64)]
)
def test_rows_longer_than_a_table_of_positions_are_refused(load, tokens, tmp_path):
    auto_class = AutoModelForSequenceClassification if load in (learned, critic_of) else AutoModelForCausalLM
    folder = small_model(
        tmp_path / "model", auto_class, "gpt2", n_embd=16, n_positions=60, pad_token_id=0, num_labels=1
    )
    assert f"positions for 60 tokens, rows may have {tokens}" in refused(load, folder)


@pytest.mark.parametrize("name, positions", [("grpo", 512 + 64), ("dpo", 1024)])
def test_rows_as_long_as_a_table_of_positions_are_taken(name, positions, tmp_path):
    """Of dpo.py's rows a pair is the longest: it has no completion that is sampled behind it."""
    folder = small_model(tmp_path, AutoModelForCausalLM, "gpt2", n_embd=16, n_positions=positions)
    args = script(name).Args(model_name_or_path=str(folder))
    load_policy(args, load_tokenizer(args))


@pytest.mark.parametrize(
    "kind, limit", [("dynamic", 575), ("dynamic", 576), ("longrope", 575), ("longrope", 576), ("llama3", 575)]
)
def test_rows_that_would_change_the_positions_of_their_neighbours_are_refused(kind, limit, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": limit}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if kind == "llama3":  # its frequencies are fixed
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {"head_dim": 8, "max_position_embeddings": limit if kind == "dynamic" else 4 * limit}
    folder = small_model(tmp_path / "model", AutoModelForCausalLM, "llama", rope_parameters=rope, **sizes)
    if kind == "llama3" or limit == 576:  # --max_prompt_tokens 512 + --max_new_tokens 64
        policy_of(folder)
    else:
        line = refused(policy_of, folder)
        assert f"a row of more than 575 tokens changes the log-probs of others ({kind})" in line


# --- where a completion ends ---


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


# --- loaded for training, and saved ---


@pytest.mark.parametrize("name, dropout", [("gpt2", "resid_pdrop"), ("qwen2", "attention_dropout")])
def test_dropout_of_a_checkpoint_is_switched_off(name, dropout, tmp_path):
    _, args, tokenizer, _ = embedded()
    policy = random_policy(name)
    setattr(policy.lm.config, dropout, 0.5)
    policy.lm.save_pretrained(tmp_path)
    args.model_name_or_path = str(tmp_path)
    loaded, batch = load_policy(args, tokenizer), random_batch()
    assert loaded.training
    assert torch.equal(loaded(batch)[0], loaded(batch)[0])


def test_prompts_are_shared_unless_the_model_is_sharded_or_recomputes(monkeypatch):
    # It is decided before the policy is made: the critic of ppo.py takes what the policy has.
    _, args, tokenizer, _ = embedded()
    policies = [load_policy(args, tokenizer)]
    policies.append(load_policy(dataclasses.replace(args, gradient_checkpointing=True), tokenizer))
    monkeypatch.setattr("common.harness.loading.is_sharded", lambda accelerator: True)
    policies.append(load_policy(args, tokenizer))
    assert [policy.shares_prompts for policy in policies] == [True, False, False]
    assert all(policy.head_is_last and policy.plain_cache for policy in policies)
    for policy in policies:
        assert ppo.load_critic(ppo.Args(), policy).backbone.shares_prompts == policy.shares_prompts


def test_model_is_saved_in_its_dtype_with_its_own_generation_config(tmp_path):
    _, args, tokenizer, policy = embedded()
    policy.lm.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=1)
    policy.lm.to(torch.bfloat16).save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    args.model_name_or_path = str(tmp_path / "a")
    policy = load_policy(args, load_tokenizer(args))
    assert policy.lm.dtype == torch.float32  # trained in float32
    accelerator = Accelerator(cpu=True)
    save_pretrained(accelerator, accelerator.prepare(policy), policy, tokenizer, tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert again.dtype == torch.bfloat16 and again.generation_config.top_k == 7
    weights = load_file(tmp_path / "b" / "model.safetensors")
    assert {x.dtype for x in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights  # it is tied: a second copy of the largest matrix
    assert AutoTokenizer.from_pretrained(tmp_path / "b")("1+1").input_ids == tokenizer("1+1").input_ids


@pytest.mark.parametrize(
    "units, precision, weights, said",
    [
        ({"avx512_bf16": True}, "no", 2e7, True),
        ({"avx2": True, "amx_bf16": False}, "no", 2e7, False),
        ({"amx_bf16": True}, "bf16", 2e7, False),
        ({"amx_bf16": True}, "no", 1e6, False),
    ],
)
def test_a_cpu_that_multiplies_bfloat16_is_said(units, precision, weights, said, monkeypatch, capsys):
    """On such a CPU a step of a model of 135 million weights took 9.6 s in place of 16.7."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    monkeypatch.setattr("transformers.PreTrainedModel.num_parameters", lambda lm: weights)
    monkeypatch.setattr("common.harness.loading.set_threads", lambda weights: None)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    args = grpo.Args()
    load_policy(args, load_tokenizer(args), accelerator)
    assert ("--mixed_precision bf16" in capsys.readouterr().out) == said


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    """A folder may name classes of its own (`auto_map`), which transformers runs under `trust_remote_code`."""
    folder = copy_of_embedded(tmp_path / "model", auto_map={"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.C"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}), encoding="utf-8")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    args = grpo.Args(model_name_or_path=str(folder))
    with pytest.raises(InputError, match="--model_name_or_path"):
        load_policy(args, embedded()[2])
    assert not (tmp_path / "ran").exists()
