"""Models of all kinds: tools/models.py; weights that texts do not use; models that would be wrong."""

import json
import types

import pytest
import torch
import transformers
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import models as docs_models
import worker
from common.errors import InputError
from common.model import choose_trained, enable_checkpointing, save_pretrained
from common.probes import unused_weights
from processes import run_processes
from small_models import SMALL, policy_of, random_batch, refused
from testbed import embedded

# --- the table ---


ROWS = {  # attention, rollout, head, prompts, gradient checkpointing
    "llama": ["sdpa", "shared", "chunks", "once", "works"],
    "gemma2": ["eager", "shared", "all logits", "each row", "works"],
    "mamba2": ["eager", "hf", "chunks", "each row", "works"],
    "mllama": ["sdpa", "shared", "chunks", "once", "works"],  # a layer's cache stays empty while others lose rows
}


@pytest.mark.parametrize("name", ROWS)
def test_the_way_of_a_model_is_found_and_is_exact(name):
    ((_, _, *found, update, sampling),) = docs_models.small_models([name])
    assert found == ROWS[name] and max(float(update), float(sampling)) <= 1e-4


def row_with(change, monkeypatch, tmp_path):
    """The row of a small Llama whose policy was changed after it was loaded."""
    load = docs_models.load_policy
    monkeypatch.setattr(docs_models, "load_policy", lambda *inputs: change(load(*inputs)))
    docs_models.build("llama", tmp_path)
    return dict(zip(docs_models.COLUMNS[1:], docs_models.row(tmp_path), strict=True))


def scale_update(policy):
    policy.temperature = 2.0  # sampling has its own
    return policy


def test_a_row_shows_a_difference_of_the_update(monkeypatch, tmp_path):
    cells = row_with(scale_update, monkeypatch, tmp_path)
    assert float(cells["update"]) >= 0.1 and float(cells["sampling"]) <= 1e-5


def test_a_row_shows_a_difference_of_the_sampling(monkeypatch, tmp_path):
    rollout = docs_models.rollout

    def shifted(*inputs):
        batch = rollout(*inputs)
        return batch | {"rollout_logprobs": batch["rollout_logprobs"] + 0.3}

    monkeypatch.setattr(docs_models, "rollout", shifted)
    cells = row_with(lambda policy: policy, monkeypatch, tmp_path)
    assert float(cells["update"]) <= 1e-5 and float(cells["sampling"]) >= 0.3


@pytest.mark.parametrize(
    "enable, shown",
    [(lambda lm: None, "without effect"), (lambda lm: lm.model.norm.weight.data.mul_(2), "wrong")],
)
def test_a_row_shows_checkpointing_that_does_not_work(enable, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(docs_models, "enable_checkpointing", enable)
    cells = row_with(lambda policy: policy, monkeypatch, tmp_path)
    assert cells["gradient checkpointing"] == shown


def test_the_command_takes_folders_and_refuses_in_a_row(capsys, tmp_path):
    docs_models.build("llama", tmp_path)
    docs_models.main([str(tmp_path), str(tmp_path / "nothing")])
    header, _, row, missing = capsys.readouterr().out.splitlines()
    assert header.count("|") == row.count("|") == missing.count("|") == len(docs_models.COLUMNS) + 1
    assert row.startswith(f"| {tmp_path} | LlamaForCausalLM | sdpa | shared | chunks | once | works |")
    assert "| refused: no such folder" in missing


# --- weights that texts do not use ---


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_a_model_for_images_is_trained_and_saved_whole(kind, tmp_path, capsys):
    # AutoModelForCausalLM gives the text model of the first alone.
    docs_models.build(kind, tmp_path / "a", torch.bfloat16)
    config = json.loads((tmp_path / "a" / "config.json").read_text(encoding="utf-8"))
    own = getattr(transformers, config["architectures"][0])
    config["text_config"]["attention_dropout"] = 0.5  # it is off in training, and saved again
    (tmp_path / "a" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    policy, batch = policy_of(tmp_path / "a"), random_batch(vocabulary=20)
    assert torch.equal(policy(batch)[0], policy(batch)[0])
    frozen = {name for name, weight in policy.lm.named_parameters() if not weight.requires_grad}
    assert policy._no_split_modules <= {type(module).__name__ for module in policy.lm.modules()}  # else no FSDP2
    assert frozen and all("vision" in name or "visual" in name or "projector" in name for name in frozen)
    count = sum(policy.lm.get_parameter(name).numel() for name in frozen)
    assert f"texts do not use {count:,} of {policy.lm.num_parameters():,} weights, frozen: " in capsys.readouterr().out
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, weight_decay=0.1)
    policy(batch)[0].sum().backward()
    assert {name for name, weight in policy.lm.named_parameters() if weight.grad is None} == frozen
    optimizer.step()
    accelerator, tokenizer = Accelerator(cpu=True), embedded()[2]
    save_pretrained(accelerator, accelerator.prepare(policy), policy, tokenizer, tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == [own.__name__] and config["text_config"]["attention_dropout"] == 0.5
    assert {config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]} == {"bfloat16"}
    (before, _), (after, info) = (own.from_pretrained(tmp_path / x, output_loading_info=True) for x in "ab")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before, after = before.state_dict(), after.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & frozen


def test_two_processes_train_a_model_for_images(tmp_path):
    # DDP waits for the gradient of everything that is not frozen: "Expected to have finished reduction".
    docs_models.build("gemma3", tmp_path / "model")
    arguments = "grpo", tmp_path, "1", str(tmp_path / "model")
    result = run_processes("tests/helpers/worker.py", *arguments, processes=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("texts do not use") == 1  # said by the first process
    one, two = worker.compared(*arguments)
    assert all(torch.equal(two["weights"][key], x) for key, x in one["start"].items() if "vision" in key)


class Experts(torch.nn.ModuleList):
    """One expert for even tokens and one for odd ones, by their first number."""

    def forward(self, hidden):
        odd = hidden[..., :1] > hidden[..., :1].max()  # none
        return torch.where(odd, self[1](hidden) if odd.any() else 0, self[0](hidden))


def test_an_expert_that_got_no_token_is_not_frozen():
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    lm.model.layers[0].mlp = torch.nn.Module()
    lm.model.layers[0].mlp.experts = Experts(torch.nn.Linear(16, 16) for _ in range(2))
    lm.model.layers[0].mlp.forward = lm.model.layers[0].mlp.experts.forward
    lm.vision = torch.nn.Linear(3, 3)
    assert unused_weights(lm) == ["vision.weight", "vision.bias"]
    choose_trained(docs_models.Args(), "model_name_or_path", lm)
    assert not lm.vision.weight.requires_grad and not unused_weights(lm)


# --- models that would be wrong ---


@pytest.mark.parametrize("kind", ["rwkv", "minimax"])
def test_a_model_whose_rows_depend_on_padding_is_refused(kind, tmp_path):
    # MiniMax is right in training, and alone in sampling.
    docs_models.build(kind, tmp_path)
    assert "gives other log-probs when a row is padded on the left (one differs by" in refused(policy_of, tmp_path)


def test_a_model_that_draws_noise_in_training_is_trained_without(tmp_path):
    docs_models.build("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"router_jitter_noise": 0.1}), encoding="utf-8")
    policy, batch = policy_of(tmp_path), random_batch(vocabulary=20)
    assert policy.training and torch.equal(policy(batch)[0], policy(batch)[0])
    assert policy.lm.origin.noise["router_jitter_noise"] == 0.1  # as model/ has it


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path):
    docs_models.build("llama", tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    lm.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    lm.save_pretrained(tmp_path)
    assert "log-probs that are not finite: its weights hold NaN or infinite numbers" in refused(policy_of, tmp_path)


def test_a_model_whose_padded_rows_are_nan_is_refused(tmp_path, monkeypatch):
    # As attention gives them that has no answer for the rows of padding, whose mask is false everywhere.
    docs_models.build("llama", tmp_path)
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def without_answer(module, query, key, value, mask, **options):
        output, weights = attention(module, query, key, value, mask, **options)  # (R, T, heads, width)
        if mask is not None:
            output = output.masked_fill(~mask.any(dim=-1)[:, 0, :, None, None], float("nan"))
        return output, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", without_answer)  # undone without a trace
    assert "gives other log-probs when a row is padded on the left (one differs by nan)" in refused(policy_of, tmp_path)


def test_checkpointing_is_switched_on_by_either_of_its_names():
    # transformers 5.17 has the second one alone, and the run ended with an AttributeError.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        asked = []
        enable_checkpointing(types.SimpleNamespace(supports_gradient_checkpointing=True, **{name: asked.append}))
        assert asked == [{"use_reentrant": False}]


def test_a_model_that_cannot_be_checkpointed_is_one_line():
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", n_embd=16, n_head=2, n_layer=1))
    with pytest.raises(InputError, match="^--gradient_checkpointing: a OpenAIGPTLMHeadModel cannot recompute"):
        enable_checkpointing(lm)
