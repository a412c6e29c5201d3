"""Options from the command line and from YAML, their bounds, and how an error is told."""

import os
import types

import pytest
import torch

from common import runs
from common.errors import InputError
from common.generation import inverse_cdf_sample
from common.harness.args import last_step, learning_rate, parse_args
from tools import ROOT, SCRIPTS, metric_rows, run_script, script

SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 3 --eval_samples 4 --eval_every 1 --max_steps 2".split()


def from_file(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    return parse_args(script("grpo").Args, ["--config", str(tmp_path / "run.yaml")])


def ended(name, arguments, capfd):
    """The exit code of a script as its `__main__` runs it, and its lines on stderr."""
    with pytest.raises(SystemExit) as end, runs.clean_exit():
        script(name).main(list(map(str, arguments)))
    return end.value.code, capfd.readouterr().err.splitlines()


# --- YAML ---


@pytest.mark.parametrize(
    "text, option, value",
    [
        ("max_steps: 010", "max_steps", 10),  # YAML: 8
        ("answer_column: no", "answer_column", "no"),  # YAML: False
        ("dataset_config: 1_000", "dataset_config", "1_000"),
        ("dataset_config: 1:30", "dataset_config", "1:30"),  # YAML: 90
        ("learning_rate: 1e-6", "learning_rate", 1e-6),  # PyYAML: a string
        ("normalize_std: no", "normalize_std", False),
        ("system_prompt: ''", "system_prompt", ""),
        ("system_prompt: 'null'", "system_prompt", "null"),
        ("system_prompt: null", "system_prompt", None),
        ("eval_split:", "eval_split", None),
        ("reward: [accuracy, format]", "reward", ["accuracy", "format"]),
        ("reward_weights: [0.5, 1e-1]", "reward_weights", [0.5, 0.1]),
    ],
)
def test_a_yaml_value_means_what_it_means_on_the_command_line(text, option, value, tmp_path):
    assert getattr(from_file(tmp_path, text), option) == value


@pytest.mark.parametrize(
    "text, message",
    [
        ("max_steps: 1\nmax_steps: 2", "max_steps stands there twice"),
        ("max_steps: 1\nmax-steps: 2", "max_steps stands there twice"),
        ("config: other.yaml", "config: a file cannot name another one"),
        ("system_prompt: {a: b}", "system_prompt: expected a value"),
        ("reward: [[accuracy]]", "reward: expected a value"),
        ("reward: [accuracy, null]", "reward: expected a value"),
        ("max_steps: 0x10", "0x10"),
        ("max_steps: [1, 2]", "unknown option 2"),
        ("? [a]\n: b", "unhashable key"),
        ("seed: !!python/name:os.system", "python/name:os.system"),
        ("seed: 1\n---\nseed: 2", "a single document"),
    ],
)
def test_what_yaml_can_say_and_a_command_line_cannot_is_refused_in_one_line(text, message, tmp_path):
    with pytest.raises(InputError) as error:
        from_file(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)


# --- bounds ---


@pytest.mark.parametrize("name", [*SCRIPTS, "dpo", "reward_model"])
def test_a_seed_that_numpy_does_not_take_is_refused(name):
    with pytest.raises(InputError, match=r"--seed 4294967296: must be below 2\*\*32"):
        script(name).main(["--seed", "4294967296"])
    runs.check_args(script(name).Args(seed=2**32 - 1))


def test_a_schedule_over_given_pairs_ends_where_they_end(tmp_path):
    args = script("reward_model").Args(pairs_per_step=8, num_epochs=2, lr_scheduler="linear", learning_rate=1.0)
    pairs = [None] * 20
    assert [last_step(args, pairs), args.max_steps] == [5, -1]
    assert [learning_rate(step, args, 5) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    for max_steps, last in ((100, 5), (3, 3), (0, 0)):
        args.max_steps = max_steps
        assert last_step(args, pairs) == last
    assert last_step(args, []) == 0  # own pairs: max_steps
    args.max_steps = -1
    with pytest.raises(InputError, match="--lr_scheduler linear needs to know the end of the run: give --max_steps"):
        last_step(args, [])


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
@pytest.mark.parametrize("max_steps", [-1, 50])
def test_both_pair_scripts_take_their_rates_from_it(name, max_steps, tmp_path):
    lines = (ROOT / "common" / "tiny" / "pairs" / "train.jsonl").read_text().splitlines()[:10]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    options = "--pairs_per_step 4 --num_epochs 1 --lr_scheduler linear --learning_rate 1e-4 --eval_every 0".split()
    options += ["--max_steps", str(max_steps), "--dataset", str(tmp_path / "train.jsonl")]
    script(name).main([*options, "--output_dir", str(tmp_path / "run")])
    rates = [row["optim/lr"] for row in metric_rows(tmp_path / "run") if "optim/lr" in row]
    assert rates == pytest.approx([1e-4, 0.5e-4])


def test_own_pairs_with_a_schedule_need_max_steps(tmp_path):
    with pytest.raises(InputError, match="give --max_steps"):
        script("dpo").main(["--lr_scheduler", "cosine", "--output_dir", str(tmp_path)])


# --- what is not finite ---


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_temperature_that_overflows_is_not_finite_with_the_step(name, tmp_path, capfd):
    code, lines = ended(name, [*SMALL, "--temperature", "1e-40", "--output_dir", tmp_path], capfd)
    assert code == 2 and "error: sampling: log-probs are not finite" in lines[-1] and "(after step 0)" in lines[-1]


def test_weights_that_became_nan_are_not_finite_with_the_step(tmp_path, capfd, monkeypatch):
    def update(accelerator, model, *rest):
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    monkeypatch.setattr(script("grpo"), "update", update)
    code, lines = ended("grpo", [*SMALL, "--output_dir", tmp_path], capfd)  # found by the evaluation of step 1
    assert code == 2 and "error: sampling: log-probs are not finite" in lines[-1] and "(after step 1)" in lines[-1]


def test_rows_of_nan_do_not_move_the_draws_of_the_others():
    probs = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    broken = probs.clone()
    broken[2] = float("nan")
    draws = []
    for table in (probs, broken):
        torch.manual_seed(1)
        draws.append(inverse_cdf_sample(table)[:, 0])
    assert draws[1].max() < 7 and draws[0][[0, 1, 3]].equal(draws[1][[0, 1, 3]])


# --- how an error is told ---


def test_an_error_stands_on_a_line_of_its_own_below_the_progress_bar(tmp_path, capfd):
    (tmp_path / "bad.py").write_text(
        "def bad(prompts, completions, **kwargs):\n"
        "    bad.calls = getattr(bad, 'calls', 0) + 1\n"
        "    return [float('nan') if bad.calls == 3 else 1.0] * len(completions)\n"
    )
    options = ["--eval_every", 0, "--reward", f"{tmp_path / 'bad.py'}:bad"]
    code, lines = ended("grpo", [*SMALL, *options, "--output_dir", tmp_path / "run"], capfd)
    bar, error = lines[-2:]
    assert code == 2 and "| 1/2 [" in bar and "error" not in bar
    assert f"{runs.script_name()}: error: reward 'bad'" in error and error.endswith("(after step 1)")
    assert error.startswith(runs.script_name()) and "\r" not in error


@pytest.mark.parametrize("error, code", [(InputError("bad"), 2), (RuntimeError("bug"), 1)], ids=["input", "bug"])
def test_the_first_process_of_a_machine_tells_an_error_and_the_others_wait_to_be_ended(
    error, code, monkeypatch, capsys
):
    waited = []
    monkeypatch.setattr(runs.time, "sleep", waited.append)
    monkeypatch.setattr(runs.Process, "bar", types.SimpleNamespace(close=lambda: waited.append("told")))
    for rank in "0 1 7".split():
        for name, value in {"WORLD_SIZE": "16", "LOCAL_RANK": rank, "RANK": str(int(rank) + 8)}.items():
            monkeypatch.setitem(os.environ, name, value)
        assert runs.report(error) == code
    assert waited == [1, "told", 3, "told", 3, "told"]
    assert capsys.readouterr().err.startswith("\n")  # below the bar of the process with rank 0


def test_two_processes_tell_bad_input_once():
    result = run_script("grpo.py", "--seed", "abc", processes=2)
    ours = [line for line in result.stderr.splitlines() if line.startswith("grpo.py: error")]
    assert ours == ["grpo.py: error: argument --seed: invalid int value: 'abc' (--help lists the options)"]
    assert result.returncode == 1 and "grpo.py" not in result.stdout
