"""common/run.py: the folder of a run, what it prints and writes, trackers, what is due when."""

import json
import re

import filelock
import pytest
from accelerate import Accelerator

import grpo
from common.load import Prompt
from common.run import SUSPICIOUS, Exit, Log, is_due
from processes import run_processes
from small_run import QUICK, same_run, samples_of, train
from testbed import metric_rows

# --- the folder ---


def refusal(folder, *options):
    """Return the error of starting a run in `folder`; nothing there changes."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(Exit) as error:
        train(folder, *options)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "model", "checkpoints"])
def test_used_folder_needs_resume(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").write_text("mine", encoding="utf-8")
    assert "already contains a run: pass --resume" in refusal(tmp_path)
    if name == "model":  # a resume would start at step 0, and overwrite it
        assert "no checkpoint to resume from" in refusal(tmp_path, "--resume")


def test_folder_in_use_is_refused(tmp_path):
    with filelock.FileLock(tmp_path / "lock"):
        for options in ([], ["--resume"]):
            assert refusal(tmp_path, *options) == f"--output_dir {tmp_path}: another run is using it"


def test_resume_without_checkpoint_starts_at_zero(tmp_path, capsys):
    train(tmp_path / "a")
    train(tmp_path / "b")
    (tmp_path / "b" / "model").rename(tmp_path / "model")
    train(tmp_path / "b", "--resume")
    assert "starting at step 0" in capsys.readouterr().out
    same_run(tmp_path / "a", tmp_path / "b")


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train("~/x", "--max_steps", 0)
    assert (tmp_path / "x" / "args.json").exists()


def test_default_folders_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        grpo.main([*QUICK, "--max_steps", "0"])
    names = [path.name for path in (tmp_path / "runs").iterdir()]
    assert len(names) == 2 and all(re.fullmatch(r"grpo-\d{8}-\d{6}-\d{6}", name) for name in names)


@pytest.mark.parametrize("folder, word", [("x" * 300, "File name too long"), ("file/run", "Not a directory")])
def test_impossible_folder_prints_one_line(folder, word, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(Exit, match=f"--output_dir .*{word}"):
        train(tmp_path / folder)


# --- the log ---


@pytest.fixture
def log(tmp_path):
    return Log(Accelerator(cpu=True), tmp_path, grpo.Args(max_steps=20))


def test_line_of_a_step(log, capsys):
    for step in log.steps(0):
        log.write(step, {"reward/mean": 0.25, "policy/entropy": 0.5, "completion/length": 3.0, "optim/loss": 0.0})
        break
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"step 1/20: reward 0\.250, length 3\.000, entropy 0\.500, 0\.\d s", line)


def test_samples_of_powers_of_two(log, capsys):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    samples = samples_of([0.5])
    samples.prompts = [Prompt([1], prompt, None)]
    for step in log.steps(0):
        log.write(step, {"x": 1.0}, grpo.run.sample_records(samples, 1))
        if step == 8:
            break
    lines = [line for line in capsys.readouterr().out.splitlines() if "reward 0.5" in line]
    assert lines == [f"step {step}, reward 0.5: '1+1?' -> '2'" for step in (1, 2, 4, 8)]
    rows = [json.loads(x) for x in (log.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8 and rows[0]["prompt"] == prompt and rows[0]["step"] == 1


def test_undefined_terms_are_null(log):
    rows = grpo.run.sample_records(samples_of([0.5], mine=[float("nan")]), 1)
    log.write(0, {}, rows)
    (line,) = (log.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["reward_terms"] == {"mine": None}


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_warning_after_five_idle_steps(name, log, capsys):
    dead = -2 if name == "value/explained_variance" else SUSPICIOUS[name][1]
    values = [dead] * 4 + [0.9] + [dead] * 7
    for step, value in zip(log.steps(0), values, strict=False):
        log.write(step, {name: value})
    lines = [line for line in capsys.readouterr().out.splitlines() if "5 steps in a row" in line]
    assert lines == [f"{SUSPICIOUS[name][2]} for 5 steps in a row ({name} {dead}): see docs/watch.md"]
    assert log.accelerator.check_trigger() == (name == "reward/unscored")  # it stops with a checkpoint


@pytest.mark.parametrize(
    "first, last, text",
    [
        ({"eval/pass@1": 0.3, "eval/reward": 0.3}, {"eval/pass@1": 0.9}, "eval/pass@1 before 0.300, after 0.900; "),
        ({"eval/reward": 0.5}, {"eval/reward": 0.9}, "eval/reward before 0.500, after 0.900; "),
        ({"eval/accuracy": 0.5}, {"eval/accuracy": 0.75}, "eval/accuracy before 0.500, after 0.750; "),
        ({"eval/pass@1": 0.3}, {}, ""),  # the last step was not evaluated
    ],
)
def test_summary_before_and_after(first, last, text, log, capsys):
    for _ in log.steps(0):
        break
    log.write(0, {}, scores=first)
    log.write(20, {"reward/mean": 1.0}, scores=last)
    log.summary()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{text}20 steps, ") and line.endswith(f" s, in {log.folder}")


def test_what_is_due():
    assert [step for step in range(1, 8) if is_due(step, 3, 7)] == [3, 6, 7]
    assert [step for step in range(1, 8) if is_due(step, 0, 7)] == [7]


def test_no_steps_write_no_model(tmp_path, capsys):
    train(tmp_path, "--max_steps", 0)
    assert not (tmp_path / "model").exists()
    assert [row["step"] for row in metric_rows(tmp_path)] == [0]
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 steps, ")


# --- trackers ---


def tracked(folder):
    """Return {metric: values} that TensorBoard wrote into the folder of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "grpo")).Reload()
    return {key: [event.value for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


@pytest.mark.needs("tensorboard")
def test_tracker_gets_the_metrics(tmp_path):
    train(tmp_path, "--report_to", "tensorboard")
    logged, rows = tracked(tmp_path), metric_rows(tmp_path)
    for key in set().union(*rows) - {"step"}:
        assert logged[key] == pytest.approx([row[key] for row in rows if key in row]), key


def test_trackers_know_the_folder(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("common.run.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *given, **options: started.append((given[1:], options)))
    monkeypatch.setattr(Accelerator, "log", lambda *given, **options: None)
    train(tmp_path / "a-name", "--max_steps", 0, "--report_to", "wandb")
    (((name,), options),) = started
    assert name == "grpo" and options["config"]["reward"] == "['accuracy']"
    assert options["init_kwargs"]["wandb"] == {"name": "a-name"}


@pytest.mark.parametrize("name", ["tensorbord", "comet_ml"])
def test_missing_tracker(name, tmp_path):
    """Accelerate silently ignores it."""
    assert refusal(tmp_path, "--report_to", name) == f"--report_to {name}: unknown, or not installed"


def test_run_without_any_reward_stops(tmp_path, capsys):
    (tmp_path / "judge.py").write_text(
        "def judge(completions, **_):\n    return [None] * len(completions)\n", encoding="utf-8"
    )
    with pytest.raises(Exit, match="stopped at step 5") as error:
        train(tmp_path / "run", "--reward", f"{tmp_path}/judge.py:judge", "--max_steps", 9, "--eval_every", 0)
    assert error.value.code == 143
    printed = capsys.readouterr().out
    assert "no completion got a reward for 5 steps in a row" in printed and "step 1, reward none: " in printed
    assert printed.count("no completion got a reward: the functions of --reward returned None") == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").exists()


# --- a loss that is not finite ---

DIVERGING = """
import os, sys
import grpo
from common.run import clean_exit

calls, original = [], grpo.policy_loss


def diverging(*arguments, **options):
    losses, stats = original(*arguments, **options)
    calls.append(1)
    wrong = len(calls) == int(os.environ.get("CALL", 0)) and os.environ.get("RANK", "0") == os.environ["FAULT"]
    return losses * float("nan" if wrong else 1), stats


grpo.policy_loss = diverging
with clean_exit():
    grpo.main(sys.argv[1:])
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_divergence_ends_the_run(processes, tmp_path):
    """All processes end with the same line; a resume from the last checkpoint goes on."""
    (tmp_path / "diverging.py").write_text(DIVERGING, encoding="utf-8")
    sizes = "--prompts_per_step 4 --group_size 4 --max_new_tokens 16 --eval_prompts 2 --save_every 1 --max_steps 4"
    command = [tmp_path / "diverging.py", *sizes.split(), "--output_dir"]
    environment = {"FAULT": str(processes - 1), "CALL": "3"}
    result = run_processes(*command, tmp_path / "b", processes=processes, env=environment, patience=20)
    assert result.codes == [1] * processes
    assert "diverging.py: error: gradient norm nan: training diverged" in result.stderr
    assert max((tmp_path / "b" / "checkpoints").iterdir()).name == "step-00000002"
    assert not (tmp_path / "b" / "model").exists()
    for folder, options in (("b", ["--resume"]), ("a", [])):
        result = run_processes(*command, tmp_path / folder, *options, processes=processes, env={"FAULT": "0"})
        assert result.returncode == 0, result.stderr
    same_run(tmp_path / "a", tmp_path / "b")
