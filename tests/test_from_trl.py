"""tools/from_trl.py: a run of TRL as a run here. What TRL makes of a configuration is in trl_numbers.json."""

import io
import json
import math
import re
import sys
from dataclasses import MISSING, fields

import pytest
import yaml

import from_trl
import trl_files
from harness.args import parse_args
from harness.errors import InputError
from testbed import ROOT, script

TRL = json.loads((ROOT / "tests" / "trl_numbers.json").read_text(encoding="utf-8"))

# Fifty options in the ways in which scripts write them.
TRAIN = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from my_rewards import tag_reward

open("it_ran", "w")
MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
G = 16

def length_reward(completions, **kwargs):
    return [-len(completion) / 1000 for completion in completions]

def main():
    dataset = load_dataset("openai/gsm8k", "main", split="train")
    dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    args = GRPOConfig(
        output_dir="runs/qwen-grpo", run_name="qwen-grpo",
        per_device_train_batch_size=16, gradient_accumulation_steps=4, steps_per_generation=16,
        num_generations=G, num_iterations=2, max_completion_length=512 * 2, max_prompt_length=256,
        learning_rate=2e-6, lr_scheduler_type="cosine", warmup_ratio=0.03, weight_decay=0.01,
        adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8, optim="paged_adamw_8bit", max_grad_norm=0.2,
        num_train_epochs=2, beta=0.01, epsilon=0.2, epsilon_high=0.28, delta=4.0, loss_type="dr_grpo",
        scale_rewards=False, importance_sampling_level="token", mask_truncated_completions=True,
        reward_weights=[1.0, 0.5, 0.1], temperature=0.9, top_p=1.0, top_k=50, repetition_penalty=1.05,
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3,
        bf16=True, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1, log_completions=True, report_to="wandb", eval_strategy="steps", eval_steps=50,
        per_device_eval_batch_size=32, eval_on_start=True, num_generations_eval=4,
        save_strategy="steps", save_steps=100, save_total_limit=2, save_only_model=True, push_to_hub=False,
        seed=3407, data_seed=3407, dataloader_num_workers=4, remove_unused_columns=False,
        model_init_kwargs={"dtype": torch.bfloat16, "attn_implementation": "sdpa"}, deepspeed="zero3.json",
        disable_dropout=True, use_liger_kernel=True,
    )
    args.learning_rate = 1e-6
    lora = LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "k_proj"], lora_dropout=0.05)
    trainer = GRPOTrainer(
        model=MODEL, reward_funcs=[accuracy_reward, tag_reward, length_reward], args=args,
        train_dataset=dataset, peft_config=lora,
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""


def move(config, kind="GRPOConfig", **sizes):
    return from_trl.moved(trl_files.Source(given=dict(config)), kind, **sizes)[0]


def args_of(moved):
    """The options of a run here, with the defaults of its script."""
    return moved.args(**moved.lines)


def convert(capsys, *words):
    """What the program prints for a command line."""
    from_trl.main([str(word) for word in words])
    return capsys.readouterr().out


def written(tmp_path, capsys, text, *words, name="train.py"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return convert(capsys, tmp_path / name, *words)


# --- the numbers of TRL's own trainers ---


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: json.dumps(case["config"]))
def test_rows_and_optimizer_steps_are_those_of_trl(case):
    moved = move(case["config"], case["class"], processes=case["processes"], rows=case["rows"])
    args, counts = args_of(moved), case["counts"]
    if case["class"] != "GRPOConfig":
        steps = case["rows"] * args.num_epochs // args.pairs_per_step
        assert counts["rows_of_an_optimizer_step"] == args.pairs_per_step
        assert counts["optimizer_steps"] == (min(steps, args.max_steps) if args.max_steps > 0 else steps)
        return
    updates = args.num_minibatches * args.num_epochs
    rows = args.prompts_per_step * args.group_size / args.num_minibatches
    twice = case["config"].get("num_iterations", 1) / args.num_epochs  # passes that are in one step of TRL
    assert counts["rows_of_an_optimizer_step"] == rows * twice
    assert args.max_steps == math.ceil(counts["optimizer_steps"] / updates)  # a rollout is never cut
    sampled = counts["rollouts"] * counts["prompts_of_a_rollout"]
    assert args.max_steps * args.prompts_per_step == sampled


def test_the_defaults_are_those_of_trl():
    """This is a copy of TRL's, so that it need not be installed; `tests/helpers/trl_numbers.py` renews it."""
    assert from_trl.DEFAULTS == TRL["defaults"] and TRL["versions"]["trl"] == "1.16.0"


def test_what_counts_optimizer_steps_is_counted_in_rollouts():
    config = {"steps_per_generation": 8, "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 100}
    args = args_of(move(config | {"save_steps": 64, "warmup_steps": 40, "max_steps": 1600}))
    assert (args.max_steps, args.eval_every, args.save_every, args.warmup_steps) == (100, 7, 4, 3)
    shares = config | {"save_strategy": "epoch", "warmup_steps": 0.1, "eval_steps": 0.5}
    args = args_of(move(shares, rows=64))  # an epoch is 8 rollouts of 8 prompts
    assert (args.max_steps, args.eval_every, args.save_every, args.warmup_steps) == (24, 12, 8, 3)


@pytest.mark.parametrize(
    "config, says",
    [
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "one must divide the other"),
        ({"steps_per_generation": 6, "gradient_accumulation_steps": 4, "num_iterations": 2}, "divide the other"),
        ({"per_device_train_batch_size": 4}, "add --num_processes N"),
        ({"temperature": 0}, "grpo.py refuses it: --temperature"),
    ],
)
def test_sizes_that_cannot_be_the_same_are_refused(config, says):
    with pytest.raises(InputError, match=says):
        move(config)


# --- the loss ---


@pytest.mark.parametrize(
    "config, where",
    [
        ({}, ("grpo.py", "token_mean")),  # TRL's default loss is dapo
        ({"loss_type": "grpo"}, ("grpo.py", None)),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, ("gspo.py", None)),
        ({"importance_sampling_level": "sequence"}, ("gspo.py", "token_mean")),
        ({"loss_type": "dr_grpo"}, ("dr_grpo.py", None)),
        ({"mask_truncated_completions": True}, ("dapo.py", None)),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, ("grpo.py", "cispo")),
        ({"loss_type": "sapo"}, ("grpo.py", "sapo")),
        ({"scale_rewards": "batch"}, ("grpo.py", "lite_ppo")),
        ({"multi_objective_aggregation": "normalize_then_sum", "loss_type": "grpo"}, ("grpo.py", "gdpo")),
    ],
)
def test_a_loss_has_its_script(config, where):
    moved = move(config)
    assert (moved.script, moved.recipe) == where
    assert not any("is near it" in sentence for sentence in moved.to_do)


@pytest.mark.parametrize(
    "config", [{"loss_type": "vespo"}, {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"}]
)
def test_a_loss_that_is_not_here_is_named_first(config):
    assert move(config).to_do[0].startswith("no script has loss_type")


def test_the_values_of_the_loss_are_those_of_trl():
    args = args_of(move({"loss_type": "grpo", "beta": 0.1, "scale_rewards": False, "delta": 3.0}))
    assert (args.clip_low, args.clip_high, args.dual_clip) == (0.2, 0.2, 3.0)
    assert (args.kl_coef, args.kl_estimator, args.normalize_std, args.std_eps) == (0.1, "k3_weighted", False, 1e-4)
    assert args_of(move({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False})).kl_estimator == "k3"
    args = args_of(move({"importance_sampling_level": "sequence"}))  # gspo.py has narrower bounds
    assert (args.clip_low, args.clip_high) == (0.2, 0.2)
    assert args_of(move({"loss_type": "cispo", "epsilon_high": 5.0})).clip_high == 4.0
    assert args_of(move({"loss_type": "sapo", "sapo_temperature_neg": 2.0})).tau_negative == 2.0
    args = args_of(move({"loss_type": "ipo", "label_smoothing": 0.1}, "DPOConfig"))
    assert (args.loss, args.label_smoothing, args.beta) == ("ipo", 0.0, 0.1)  # TRL's ipo does not read it
    assert args_of(move({"label_smoothing": 0.1, "loss_type": "robust"}, "DPOConfig")).label_smoothing == 0.1
    for losses in ("apo_zero", ["sigmoid", "sft"]):
        assert "loss_type" in move({"loss_type": losses}, "DPOConfig").missing
    assert args_of(move({"center_rewards_coefficient": 0.01}, "RewardConfig")).center_coef == 0.01


# --- files ---


def test_a_script_of_fifty_options(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = written(tmp_path, capsys, TRAIN, "--num_processes", "4", "--rows", "7473")
    assert not (tmp_path / "it_ran").exists()
    names = re.findall(r"(\w+)=", TRAIN[TRAIN.index("GRPOConfig(\n") : TRAIN.index("args.learning_rate")])
    names.remove("model_init_kwargs")  # what is in it stands by itself
    names += ["dtype", "attn_implementation", "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout"]
    assert len(names) > 60 and [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    assert "accelerate launch --num_processes 4 --mixed_precision bf16 dr_grpo.py --config run.yaml" in text
    for said in ("deepspeed zero3.json: start the script", "changes of the data by map", "top_k 50: training samples"):
        assert said in text
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    args = parse_args(script("dr_grpo").Args, ["--config", "run.yaml"])
    assert args.reward == ["accuracy", "my_rewards:tag_reward", "train.py:length_reward"]
    assert (args.prompts_per_step, args.num_minibatches, args.num_epochs, args.max_steps) == (64, 4, 2, 232)
    assert (args.learning_rate, args.max_new_tokens, args.group_size, args.dtype) == (1e-6, 1024, 16, "bfloat16")
    assert (args.lora_rank, args.lora_alpha, args.lora_targets) == (32, 64, ["q_proj", "k_proj"])
    assert (args.dataset, args.dataset_config, args.generate_batch_size) == ("openai/gsm8k", "main", 32)


def test_a_script_that_trains_when_it_is_imported_is_not_named_for_its_rewards(tmp_path, capsys):
    text = "from trl import GRPOTrainer\ndef short(completions, **_): ...\nGRPOTrainer('a/b', reward_funcs=short)\n"
    text = written(tmp_path, capsys, text)
    assert yaml.safe_load(text)["reward"] == ["rewards.py:short"] and "write a file rewards.py with short," in text
    text = "GRPOTrainer(model='a/b', reward_funcs=['org/rm', partial(f, n=2)], args=GRPOConfig())"
    text = written(tmp_path, capsys, text)
    assert yaml.safe_load(text)["reward"] == ["rm:org/rm", "rewards.py:partial_f_n_2"]


def test_a_value_that_only_python_could_find_is_asked_for(tmp_path, capsys):
    text = "GRPOConfig(learning_rate=args.lr, beta=float(os.environ['BETA']), num_generations=2 * 2)"
    text = written(tmp_path, capsys, text, "--beta", "0.5")
    assert "learning_rate = args.lr is no literal: add --learning_rate VALUE" in text
    assert "os.environ" not in text and yaml.safe_load(text)["kl_coef"] == 0.5
    assert yaml.safe_load(text)["group_size"] == 4


def test_yaml_and_pasted_text(tmp_path, capsys, monkeypatch):
    options = "learning_rate: 5e-7\nmax_steps: 9\nuse_peft: true\nlora_r: 4\n"
    words = ["--trainer", "dpo", "--no_remove_unused_columns", "--lora_target_modules", "q_proj", "v_proj"]
    text = written(tmp_path, capsys, options, *words, name="dpo.yaml")
    found = yaml.safe_load(text)
    assert (found["learning_rate"], found["max_steps"], found["num_epochs"], found["lora_rank"]) == (5e-7, 9, 9, 4)
    assert found["lora_targets"] == ["q_proj", "v_proj"] and "reward" not in found
    assert "reward: nothing names one" not in text  # the pairs are given
    assert "# - remove_unused_columns false: " in text and "dpo.py --config" in text
    pasted = "    args = RewardConfig(\n        center_rewards_coefficient=0.01, bf16=False,\n    )\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(pasted))
    text = convert(capsys, "-", "--model_name_or_path", "a/b")
    assert "accelerate launch reward_model.py" in text
    assert yaml.safe_load(text)["model_name_or_path"] == "a/b"


@pytest.mark.parametrize(
    "name, text, word",
    [
        ("a.yaml", "learning_rate: 1e-6", "--trainer"),
        ("a.yaml", "- 1", "GRPOConfig"),
        ("a.yaml", "a: [", "a.yaml: while parsing"),
        ("a.py", "GRPOConfig(", "not Python"),
        ("a.py", "GRPOConfig()\nDPOConfig()", "line 2"),
        ("none/a.py", None, "a.py"),
    ],
)
def test_a_file_that_says_too_little_is_one_line(name, text, word, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=word) as error:
        from_trl.main([str(tmp_path / name)])
    assert "\n" not in str(error.value)


# --- with TRL itself ---


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", from_trl.DEFAULTS)
def test_every_field_of_a_configuration_has_a_line(name):
    """Each at its default, and once more at another value of its kind."""
    import trl

    others = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value / 2}
    changed = {}
    for field in fields(getattr(trl, name)):
        value = field.default if field.default_factory is MISSING else field.default_factory()
        changed[field.name] = (value, others.get(type(value), lambda value: value)(value))
    kept = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_generations",
        "num_iterations",
        "max_steps",
    )
    for place in (0, 1):
        config = {name: values[place * (name not in kept)] for name, values in changed.items()}
        moved, start = from_trl.moved(trl_files.Source(given=config), name)
        text = from_trl.written(moved, start, "")
        config.pop("model_init_kwargs")  # what is in it stands by itself
        assert [name for name in config if not re.search(rf"\b{name}\b", text)] == []
        assert "nor this project knows" not in text


@pytest.mark.needs("trl")
@pytest.mark.parametrize("number", [n for n, case in enumerate(TRL["cases"]) if case["processes"] == 1])
def test_trl_still_counts_as_the_table_says(number, tmp_path):
    """Its own trainers, on one process; `tests/helpers/trl_numbers.py` asks them all, and on two."""
    import trl_numbers

    case = TRL["cases"][number]
    assert trl_numbers.CASES[number] == (case["class"], 1, case["rows"], case["config"])
    trl_numbers.save_model(tmp_path)
    assert trl_numbers.count(case["class"], case["rows"], case["config"], str(tmp_path)) == case["counts"]


@pytest.mark.needs("trl")
def test_the_defaults_are_those_of_the_trl_that_is_installed():
    import trl

    import trl_numbers

    assert {name: trl_numbers.defaults(getattr(trl, name)) for name in from_trl.DEFAULTS} == from_trl.DEFAULTS
