"""Tests that run over every script that samples."""

import collections
import json
import math
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from common.load import load_tokenizer
from common.run import Exit
from testbed import (
    FAMILY,
    SCRIPTS,
    SHIPPED,
    embedded,
    fresh_interpreter,
    gradients,
    learns_from_rewards,
    metric_rows,
    named_metrics,
    needed,
    problem,
    same_metrics,
    script,
    section_of_metrics,
)

# The scripts that a test runs over; the others run over SCRIPTS.
NAMES = {
    "test_group_of_one_is_refused": FAMILY,
    # dapo's rounds: test_dapo.py
    "test_seeds_of_steps_and_processes": [name for name in SCRIPTS if not hasattr(script(name), "dynamic_sampling")],
    "test_max_steps_zero_only_evaluates": ["grpo"],  # output does not depend on the script
    "test_bad_input_of_all_scripts": ["grpo"],
    "test_imports_have_no_side_effect": ["grpo"],  # all in one process
    "test_it_learns": ["grpo", "ppo"],  # test_whole_updates.py has whole runs of all
    # docs/watch.md is about these; a script of your own logs what it likes
    "test_glossary_names_the_metrics": [name for name in SCRIPTS if name in SHIPPED],
    "test_rewards_run_without_autocast": ["grpo", "dapo"],
}


def pytest_generate_tests(metafunc):
    metafunc.parametrize("name", NAMES.get(metafunc.function.__name__, SCRIPTS))


# --- rows without a reward ---


TAUGHT = "the advantages are not made of rewards"
updates = []


def none_in_step_2(completions, **columns):
    """Return no rewards in step 2, and in other steps none for one completion in four."""
    if len(updates) == 1:
        return [None] * len(completions)
    return [None if i % 4 == 1 else float(len(text) % 2) for i, text in enumerate(completions)]


def test_unscored_batch_changes_nothing(name, tmp_path, monkeypatch):
    module = script(name)
    if not learns_from_rewards(module, module.Args()):
        pytest.skip(TAUGHT)
    updates.clear()
    monkeypatch.setattr(module, "update", lambda *inputs, update=module.update: updates.append(1) or update(*inputs))
    options = "--max_steps 3 --prompts_per_step 8 --group_size 4 --lr_scheduler linear --max_new_tokens 24"
    options += f" --eval_every 0 --eval_prompts 4 --eval_samples 4 --reward {__name__}:none_in_step_2"
    options = [*options.split(), *needed(module)]
    for coefficient in ("kl_coef", "entropy_coef"):  # losses without rewards are off, where possible
        field = module.Args.__dataclass_fields__.get(coefficient)
        if field and "gt" not in field.metadata["bounds"]:
            options += [f"--{coefficient}", "0"]
    module.main([*options, "--output_dir", str(tmp_path / "run")])
    rows = metric_rows(tmp_path / "run")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    unscored = [row["reward/unscored"] for row in rows if "reward/unscored" in row]
    if hasattr(module, "dynamic_sampling"):  # which makes no update
        assert unscored == [0.25, 1, 1]  # without an update it stays in step 2
        assert ["optim/grad_norm" in row for row in rows[1:]] == [True, False, False]
        return
    assert unscored == [0.25, 1, 0.25]
    assert [row["optim/lr"] for row in rows[1:]] == pytest.approx([1e-4, 1e-4 * 2 / 3, 1e-4 / 3])
    assert [row["optim/grad_norm"] > 0 for row in rows[1:]] == [True, False, True]
    assert "reward/mean" not in rows[2]  # no row has a reward


def test_rewards_run_without_autocast(name, tmp_path, monkeypatch):
    """A reward model ran in bfloat16 in dapo.py's training and in float32 elsewhere."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    judge = "import torch\ndef judge(prompts, **_):\n    assert not torch.is_autocast_enabled('cpu')\n"
    judge += "    return [float(i % 2) for i in range(len(prompts))]\n"
    (tmp_path / "mine.py").write_text(judge, encoding="utf-8")
    options = "--prompts_per_step 8 --max_steps 1 --max_new_tokens 24 --eval_every 0"
    options += f" --eval_prompts 4 --eval_samples 4 --reward {tmp_path}/mine.py:judge --output_dir {tmp_path}/run"
    script(name).main(options.split())


# --- the first ratio ---


@pytest.mark.parametrize("updates", [dict(num_epochs=2), dict(num_minibatches=2)], ids=str)
def test_first_ratio_is_exactly_one(name, updates):
    module, args, lm, reference, batch = problem(name, **updates, micro_batch_size=5)
    ratios = []
    original = module.policy_loss

    def spy(logprobs, old_logprobs, *rest, **keywords):
        ratios.append((logprobs - old_logprobs).detach().abs().max())
        return original(logprobs, old_logprobs, *rest, **keywords)

    module.policy_loss = spy
    try:
        gradients(module, args, lm, batch, reference)
    finally:
        module.policy_loss = original
    assert len(ratios) >= 7 and max(ratios) == 0  # bitwise, although micro-batches have other shapes than the rollout


def test_no_valid_tokens_no_gradient(name):
    module, args, lm, _, batch = problem(name, kl_coef=0.0)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    (step,), metrics = gradients(module, args, lm, batch)
    assert all((g == 0).all() for g in step)
    assert metrics["optim/loss"] == 0


def test_reference_has_the_policys_precision(name):
    """`prepare` wraps the forward of the policy alone in autocast: at equal weights the KL would not be 0."""
    module, args, lm, reference, batch = problem(name, kl_coef=0.04)
    AcceleratorState._reset_state(True)
    seen, accelerator = [], Accelerator(cpu=True, mixed_precision="bf16")
    reference.register_forward_pre_hook(lambda *inputs: seen.append(torch.is_autocast_enabled("cpu")))
    gradients(module, args, lm, batch, reference, accelerator)
    assert seen and all(seen)


def test_divergence_ends_before_the_step(name):
    module, args, lm, _, batch = problem(name, kl_coef=0.0)
    if "advantages" not in batch:  # `update` makes them
        batch["rewards"][0] = math.inf
    else:
        batch["advantages"][0] = math.nan
    with pytest.raises(Exit, match="^gradient norm nan: ") as error:
        gradients(module, args, lm, batch)
    assert error.value.code == 1


def test_divergence_keeps_the_last_checkpoint(name, tmp_path, monkeypatch):
    module, update, calls = script(name), script(name).update, []

    def diverge(accelerator, model, *rest):
        calls.append(1)
        if len(calls) == 2:
            next(model.parameters()).register_hook(lambda gradient: gradient * math.nan)
        update(accelerator, model, *rest)

    monkeypatch.setattr(module, "update", diverge)
    with pytest.raises(Exit, match="^gradient norm nan: ") as error:
        run(name, tmp_path, "--max_steps", 3, "--num_minibatches", 1, "--save_every", 1)
    assert error.value.code == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert [row["step"] for row in metric_rows(tmp_path)] == [0, 1]  # a resume continues after it
    assert not (tmp_path / "model").exists()


# --- a run ---


QUICK = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24".split()
QUICK += "--eval_prompts 4 --eval_samples 4 --eval_every 2".split()


def run(name, folder, *arguments):
    script(name).main([*QUICK, *needed(script(name)), "--output_dir", str(folder), *map(str, arguments)])


def weights(folder, name="model"):
    return load_file(folder / name / "model.safetensors")


def test_seeds_of_steps_and_processes(name, tmp_path, monkeypatch):
    module, seeds = script(name), []
    monkeypatch.setattr(Accelerator, "process_index", 1)  # claims to be the second process, but is alone
    original = module.rollout

    def spy(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
        seeds.append((seed[:3], temperature, top_p))
        return original(lm, tokenizer, prompts, n, temperature, top_p, seed, args)

    monkeypatch.setattr(module, "rollout", spy)
    monkeypatch.setattr(module, "update", lambda *arguments: None)
    options = "--max_steps 2 --prompts_per_step 4 --group_size 2 --max_new_tokens 4 --seed 3 --temperature 1.3"
    options += " --eval_every 0 --eval_prompts 4 --eval_samples 4 --eval_temperature 0.7 --eval_top_p 0.5"
    module.main([*options.split(), *needed(module), "--output_dir", str(tmp_path)])
    evaluation = ((3, 1, 0), 0.7, 0.5)
    steps = [((3, 1, step), 1.3, 1.0) for step in (1, 2)]
    assert seeds == [evaluation, *steps, evaluation]


def test_resume_is_bit_exact(name, tmp_path, capsys):
    # repeated or skipped prompts, lost state. Weights, metrics and samples.
    options = ["--reward", "testbed:alternating"]  # so few tokens hold no right answer
    run(name, tmp_path / "a", *options, "--max_steps", 3, "--save_every", 2)
    assert {path.name for path in (tmp_path / "a" / "checkpoints").iterdir()} == {"step-00000002", "step-00000003"}
    run(name, tmp_path / "b", *options, "--max_steps", 2, "--save_every", 2)
    run(name, tmp_path / "b", *options, "--max_steps", 3, "--save_every", 2, "--resume")
    assert "resumed" in capsys.readouterr().out
    rows = metric_rows(tmp_path / "a")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    same_metrics(tmp_path / "a", tmp_path / "b")
    learns = learns_from_rewards(script(name), script(name).Args())
    assert all(row["optim/grad_norm"] > 0 for row in rows[1:]) or not learns
    samples = [(tmp_path / x / "samples.jsonl").read_text(encoding="utf-8") for x in "ab"]
    lines = [json.loads(line) for line in samples[0].splitlines()]
    steps = {(0, True): 16, (1, False): 4, (2, True): 16, (2, False): 4, (3, True): 16, (3, False): 4}
    assert samples[0] == samples[1]
    assert collections.Counter((line["step"], line.get("evaluation", False)) for line in lines) == steps
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    initial = embedded(name)[3].state_dict()
    assert any(not torch.equal(a[key], initial[key]) for key in a) or not learns


def test_max_steps_zero_only_evaluates(name, tmp_path, capsys):
    """The run writes its completions to samples.jsonl, and prints the first prompt as the model gets it."""
    run(name, tmp_path, "--max_steps", 0, "--prompt_template", "1+{prompt}", "--max_new_tokens", 16)
    (row,) = metric_rows(tmp_path)
    assert row["step"] == 0 and {"eval/pass@1", "eval/pass@4", "eval/length"} <= row.keys()
    assert not (tmp_path / "model").exists()
    printed = capsys.readouterr().out
    assert re.search(r"\nstep 0: eval/pass@1 [\d.]+, .*\n0 steps, ", printed)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(samples) == 16 and len({sample["prompt"] for sample in samples}) == 4  # out of eight
    assert all(sample["step"] == 0 and sample["evaluation"] is True for sample in samples)
    tokenizer = load_tokenizer("embedded")
    cut = [sample["truncated"] for sample in samples]
    assert any(cut) and not all(cut) and all(sample["tokens"] == 16 for sample in samples if sample["truncated"])
    for sample in samples:  # characters are tokens here, and the stop token counts
        assert sample["tokens"] == len(tokenizer(sample["completion"]).input_ids) + (not sample["truncated"])
        assert sample["reward"] == sample["reward_terms"]["accuracy"]
    raw = samples[0]["completion"] + "<eos>" * (not cut[0])
    assert "\nfirst prompt: '1+" in printed
    assert f"first completion: {raw!r}\n" in printed


def test_it_learns(name, tmp_path):
    """A few steps on the embedded task: accuracy rises and completions grow longer."""
    options = "--max_steps 7 --prompts_per_step 16 --num_minibatches 4 --eval_every 0".split()
    options += "--max_new_tokens 48 --eval_prompts 32 --eval_samples 4".split()
    script(name).main(["--output_dir", str(tmp_path), *options])
    rows = metric_rows(tmp_path)
    assert rows[-1]["eval/pass@1"] > rows[0]["eval/pass@1"] + 0.25
    assert rows[-1]["eval/length"] > rows[0]["eval/length"] + 5


# --- bad input: one line, before any model is loaded ---


def check_refused(name, arguments, message):
    with pytest.raises(Exit) as error:
        script(name).main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--no_such_option 1", "--no_such_option"),
        ("--prompts_per_step 30 --num_minibatches 4", "--prompts_per_step 30: not a multiple of 1 process"),
        ("--reward no_such", "no_such"),
        ("--dataset /no/such.jsonl", "no/such.jsonl"),
        ("--model_name_or_path /no/such", "no/such"),
        ("--resume", "--output_dir"),
    ],
)
def test_bad_input(name, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(name, arguments, message)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--kl_estimator k4", "k4"),
        ("--group_size 0", "group_size 0"),
        ("--temperature 0", "temperature"),
        ("--eval_k 9", "eval_k 9 is more than --eval_samples 8"),
        ("--reward accuracy format --reward_weights 1", "reward_weights"),
        ("--report_to swanlab", "--report_to swanlab: unknown, or not installed"),  # not among the extras
        ("--eval_top_p 0", "eval_top_p"),
    ],
)
def test_bad_input_of_all_scripts(name, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(name, arguments, message)


def test_group_of_one_is_refused(name):
    with pytest.raises(Exit, match="--group_size 1: "):
        script(name).main(["--group_size", "1"])


def test_imports_have_no_side_effect(name):
    assert fresh_interpreter()["imported"] == ["", []]


def test_glossary_names_the_metrics(name, tmp_path):
    """docs/watch.md lists every metric of a run, and only metrics that some run logs."""
    more = "--kl_coef 0.04 --kl_in loss" if name == "ppo" else ""
    long = ["--prompts_per_step", 8, "--max_new_tokens", 48]  # some answers are right
    run(name, tmp_path / "a", "--max_steps", 2, "--kl_coef", 0.04, *long)
    run(name, tmp_path / "b", "--max_steps", 1, "--reward", "accuracy", "format", "--num_minibatches", 2, *more.split())
    rows = [
        json.loads(line)
        for x in "ab"
        for line in (tmp_path / x / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    logged = {key for row in rows for key in row} - {"step"}
    logged = {key.replace("pass@4", "pass@k") for key in logged}
    logged = {"reward_terms/<name>" if key.startswith("reward_terms/") else key for key in logged}
    documented = named_metrics(section_of_metrics("Every script") + section_of_metrics(f"{name}.py"))
    if name not in FAMILY:
        documented -= {"advantage/zero_groups", "completion/unique"}
    assert logged == documented
