"""harness/run.py and log.py: the folder, what cannot be written, trackers, what is printed, what is due when."""

import datetime
import json
import os
import re
import sqlite3
import sys
import time

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from harness.data import Prompt
from harness.errors import InputError
from harness.log import SUSPICIOUS
from harness.metrics import Metrics
from processes import run_processes
from small_run import FULL, advance, failure, no_room, refusal, same_run, samples_of, start, train
from testbed import metric_rows


def log_step(run, values, samples=None):
    """Log a step with these metrics."""
    metrics = Metrics()
    metrics.add("none", 0.0, torch.tensor(False))
    for name, value in values.items():
        metrics.add(name, value)
    run.log.begin_step(run.step + 1)
    run.log_step(metrics, samples)
    run.end_step()


# --- whose folder it is ---


def test_a_folder_with_a_run_is_refused_and_a_resume_without_checkpoint_starts_at_zero(tmp_path, capsys):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer, save=False)
    run.lock.release()
    (tmp_path / "model").mkdir()
    assert "already contains metrics.jsonl: pass --resume" in refusal(tmp_path)
    assert "no checkpoint" in refusal(tmp_path, resume=True)  # it would erase what the run wrote
    (tmp_path / "model").rmdir()  # as if it had been killed before its first checkpoint
    run, *_ = start(tmp_path, resume=True)
    assert run.step == 0 and "starting at step 0" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_folder_that_another_run_holds_is_refused(tmp_path):
    """The process that trains holds the lock, not its launcher, which can be killed while they train on."""
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    for resume in (False, True):
        assert refusal(tmp_path, resume=resume) == f"--output_dir {tmp_path}: another run is using it"
    run.save_model = lambda policy: None
    run.finish(None)
    start(tmp_path, resume=True)


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """YAML and --output_dir=~/x, which no shell expands, made a folder with that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # Windows
    start("~/x")
    assert (tmp_path / "x" / "args.json").exists()


def test_what_json_cannot_hold_is_written_as_text_or_null(tmp_path):
    """A date in a message ended the run, and NaN is refused by a browser and jq. Numbers keep all their digits."""
    run, *_ = start(tmp_path)
    values = [0.1 + 0.2, float("nan"), {"deep": -float("inf")}]
    run.log.write("rows", [{"role": "user", "at": datetime.date(2026, 1, 2), "values": values}])
    row = json.loads((tmp_path / "rows").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert row == {"role": "user", "at": "2026-01-02", "values": [0.1 + 0.2, None, {"deep": None}]}


def test_two_starts_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {str(start(None)[0].folder) for _ in range(3)}
    assert len(folders) == 3 and all(re.fullmatch(r"runs/grpo-\d{8}-\d{6}-\d{6}", folder) for folder in folders)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "model", "checkpoints"])
def test_what_no_run_wrote_is_not_overwritten(name, resume, tmp_path):
    if "." in name:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine", encoding="utf-8")
    problem = "no args.json" if resume else "pass --resume"
    message = refusal(tmp_path, resume=resume)
    assert name in message and problem in message


# --- what cannot be written ---


@pytest.mark.parametrize(
    "folder, word",
    [
        ("x" * 300, "File name too long"),
        ("file/run", "Not a directory"),
        ("a\0b", "null"),
        ("\udce4\udcb8\udcad", "surrogates"),  # a Chinese name in a locale without UTF-8: safetensors refuses it
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(folder, word, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=f"--output_dir .*{word}"):
        start(tmp_path / folder)


def test_a_full_disk_under_the_metrics_stops_the_run_with_a_checkpoint(tmp_path, capsys):
    """A default run has no other checkpoint: an hour of training was lost for a row."""
    run, optimizer, _ = start(tmp_path)
    for _ in run.steps():
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        advance(run, optimizer, save=False)
    assert "metrics.jsonl: [Errno 28] No space left on device" in failure(run.finish, None)
    assert f"stopped at step 1: continue with --resume --output_dir {tmp_path}" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").unlink()
    run.lock.release()
    assert start(tmp_path, resume=True)[0].step == 1


def test_a_row_of_the_last_step_that_is_lost_is_no_success(tmp_path):
    run, optimizer, _ = start(tmp_path, max_steps=1)
    run.save_model = lambda policy: None
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    advance(run, optimizer)
    with pytest.raises(InputError, match="metrics.jsonl"):
        run.finish(None)


def test_args_json_is_whole_at_any_moment(tmp_path, monkeypatch):
    """A resume reads it, and writes it anew."""
    start(tmp_path)[0].lock.release()
    before = (tmp_path / "args.json").read_text(encoding="utf-8")
    monkeypatch.setattr(os, "replace", lambda *given: os.kill(os.getpid(), 0) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start(tmp_path, resume=True, max_steps=9)
    assert (tmp_path / "args.json").read_text(encoding="utf-8") == before


def ends_with(error):
    """In the place of transformers' save_pretrained: a part of the files, then `error`."""

    def save_pretrained(self, folder, **options):
        os.makedirs(folder, exist_ok=True)
        (folder / "half").write_text("of a file", encoding="utf-8")
        raise type(error)(*error.args)  # another one: its frames would hold the lock

    return save_pretrained


@pytest.mark.parametrize("error, why", [(FULL, "[Errno 28]"), (KeyError("w1"), "KeyError 'w1'")])
def test_a_training_whose_model_cannot_be_written_is_kept(error, why, tmp_path, monkeypatch, capsys):
    # The default is no checkpoint: whatever fails after hours of training lost all of it.
    train(tmp_path / "a")
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(error))
    line = failure(train, tmp_path / "b")
    assert f"model: {why}" in line and "run with --resume to try again" in line
    monkeypatch.undo()
    names = {"args.json", "metrics.jsonl", "samples.jsonl", "lock", "checkpoints"}
    assert {path.name for path in (tmp_path / "b").iterdir()} == names
    assert "pass@1 before" not in capsys.readouterr().out.splitlines()[-1]
    train(tmp_path / "b", "--resume")
    assert "pass@1 before" in capsys.readouterr().out.splitlines()[-1]
    same_run(tmp_path / "a", tmp_path / "b")


def test_a_folder_without_model_and_checkpoint_never_counts_as_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(FULL))
    monkeypatch.setattr(torch, "save", no_room)
    said = failure(train, tmp_path, "--max_steps", 1)
    assert "checkpoint of step 1: [Errno 28] No space left on device" in said
    assert "--resume" not in said  # there is nothing to resume from
    monkeypatch.undo()
    train(tmp_path, "--resume", "--max_steps", 0)
    assert "starting at step 0" in capsys.readouterr().out


# --- trackers ---


def tracked(name, folder):
    """{metric: values} that the tracker of this name wrote into the folder of a run."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "grpo")).Reload()
        return {key: [event.value for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    with sqlite3.connect(folder / "trackio" / "grpo.db") as database:
        rows = database.execute("select run_name, metrics from metrics order by step").fetchall()
    assert {run for run, _ in rows} == {folder.name}
    rows = [json.loads(metrics) for _, metrics in rows]
    return {name: [row[name] for row in rows if name in row] for name in set().union(*rows)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("tensorboard", "trackio")]
)
def test_a_tracker_that_is_named_gets_the_metrics_in_the_folder_of_the_run(name, tmp_path, monkeypatch):
    # TensorBoard was refused by every run: Accelerate wants to know its folder before the run has one.
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    for module in list(sys.modules):  # Trackio reads its folder when it is imported, and TRL may have done that.
        if module.split(".")[0] == "trackio":
            monkeypatch.delitem(sys.modules, module)
    folder = tmp_path / "a-name"
    train(folder, "--report_to", name)
    logged, rows = tracked(name, folder), metric_rows(folder)
    for key in set().union(*rows) - {"step"}:
        assert logged[key] == pytest.approx([row[key] for row in rows if key in row]), key


def test_a_run_has_the_name_of_its_folder_in_trackers(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("harness.launch.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *given, **options: started.append((given[1:], options)))
    start(tmp_path / "a-name", report_to=["wandb"], lora_targets=["a", "b"])
    (((name,), options),) = started
    assert name == "grpo" and options["config"]["lora_targets"] == "['a', 'b']"
    assert options["init_kwargs"]["wandb"] == {"name": "a-name", "dir": str(tmp_path / "a-name")}


def fail(*given, **options):
    raise ConnectionError("no API key\nconfigured")


def test_a_tracker_that_does_not_start_or_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr(Accelerator, "init_trackers", fail)
    assert refusal(tmp_path, report_to=["wandb"]) == "--report_to: no API key configured"
    for name in ("tensorboard", "all"):  # Accelerate passes over one that is not installed
        assert f"--report_to {name}: not an installed tracker" in refusal(tmp_path, report_to=[name])


def test_a_tracker_that_fails_on_the_way_costs_no_step(tmp_path, monkeypatch, capsys):
    run, optimizer, _ = start(tmp_path)
    monkeypatch.setattr(Accelerator, "log", fail)
    advance(run, optimizer, save=False)
    assert "--report_to: tracker failed and was turned off: no API key configured" in capsys.readouterr().out
    assert [row["step"] for row in metric_rows(tmp_path)] == [1]


# --- what a run prints ---


def test_each_step_has_a_line(tmp_path, capsys, monkeypatch):
    run, *_ = start(tmp_path)
    now = iter([0.5, 3.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    log_step(run, {"reward/mean": 0.25, "policy/entropy": 0.5, "completion/length": 3.0, "optim/loss": 0.0})
    monkeypatch.undo()
    line = "step 1/50: reward 0.250, length 3.000, entropy 0.500, 2.5 s"
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_the_bar_fits_80_columns(monkeypatch, tmp_path):
    """tqdm cut the line at the edge of the terminal: "entropy 0.0" for 0.088."""
    run, *_ = start(tmp_path, max_steps=500)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("tqdm.std.tqdm.format_interval", staticmethod(lambda seconds: "10:22:13"))
    run.log.start_bar(500)
    run.log.bar.n = 499
    Metrics(run).show_phase("update 12/16")
    run.log.print_step({"reward/mean": -0.12345, "completion/length": 1024.4, "policy/entropy": 0.08841}, 500)
    run.log.bar.ncols, run.log.bar.dynamic_ncols = 79, None
    line = str(run.log.bar)
    assert len(line) == 79 and line.startswith("update 12/16 500/500 ")
    assert line.endswith("left, reward -0.123 length 1020 entropy 0.0884")
    run.log.close_bar()


def test_a_sample_shows_the_last_user_turn(tmp_path, capsys):
    run, *_ = start(tmp_path)
    samples = samples_of([0.5])
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    samples.prompts = [Prompt([1], prompt, None)]
    log_step(run, {}, samples)
    assert "step 1, reward 0.5: '1+1?' -> '2'" in capsys.readouterr().out.splitlines()
    (row,) = map(json.loads, (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    assert row["prompt"] == prompt


PASS, REWARD, ACCURACY = "eval/pass@1", "eval/reward", "eval/accuracy"


@pytest.mark.parametrize(
    "reward, first, last, step, text",
    [
        (["accuracy"], {PASS: 0.3, REWARD: 0.3}, {PASS: 0.9, REWARD: 0.9}, 5, f"{PASS} before 0.300, after 0.900; "),
        (
            ["mine.py:mine"],  # its reward alone is a number that can be gamed
            {PASS: 0.3, REWARD: 0.5},
            {PASS: 0.2, REWARD: 0.9},
            5,
            f"{PASS} before 0.300, after 0.200; {REWARD} before 0.500, after 0.900; ",
        ),
        (["rm:model"], {REWARD: 0.5}, {REWARD: 0.9}, 5, f"{REWARD} before 0.500, after 0.900; "),
        ([], {ACCURACY: 0.5}, {ACCURACY: 0.75}, 5, f"{ACCURACY} before 0.500, after 0.750; "),
        (["accuracy"], {PASS: 0.3}, {PASS: 0.9}, 4, ""),  # the last step was not evaluated
        (["accuracy"], {PASS: 0.3}, None, 0, ""),  # of a run of no steps
    ],
)
def test_the_closing_line_shows_each_score_before_and_after(reward, first, last, step, text, tmp_path):
    run, *_ = start(tmp_path)
    run.args.reward = reward
    run.log_scores(first)
    run.log.step = 5 if last else 0
    if last:
        run.log_scores(last)
        run.log.last_scores["step"] = step
    assert run.log.before_and_after() == text


def printed_after(folder, steps, capsys, **options):
    """Return the lines that are printed after steps with these metrics, beside their own: [(step, line)]."""
    run, *_ = start(folder, **options)
    found = []
    capsys.readouterr()
    for metrics in steps:
        log_step(run, metrics)
        own, *others = capsys.readouterr().out.splitlines()
        assert own.startswith(f"step {run.step}/50: ")
        found += [(run.step, line) for line in others]
    return found


@pytest.mark.parametrize("name, dead", [(name, value) for name, (value, _) in SUSPICIOUS.items()])
def test_a_run_that_learns_nothing_is_named_once_after_five_steps_in_a_row(name, dead, tmp_path, capsys):
    steps = [{name: value, "optim/lr": 1e-4} for value in [dead] * 4 + [0.9] + [dead] * 4]
    steps += [{}] + [{name: dead}] * 6  # a step without the metric breaks the row
    ((step, line),) = printed_after(tmp_path, steps, capsys)
    assert step == 15 and f"({name} {dead})" in line and "docs/watch.md" in line


@pytest.mark.parametrize(
    "dtype, gaps, step", [("float32", [1e-5, 9e-4, 0.002, 0.2], 3), ("bfloat16", [2e-3, 9e-3, 0.02], 3)]
)
def test_a_sampler_that_disagrees_with_the_loss_is_named_once(dtype, gaps, step, tmp_path, capsys):
    steps = [{"rollout/logprob_gap": gap} for gap in gaps]
    ((at, line),) = printed_after(tmp_path, steps, capsys, dtype=dtype)
    assert at == step and f"rollout/logprob_gap is {gaps[step - 1]:.2g}" in line


def test_a_sample_is_shown_at_steps_that_are_ever_further_apart(tmp_path, capsys):
    run, optimizer, _ = start(tmp_path)
    for _ in range(9):
        advance(run, optimizer, save=False)
    said = [line for line in capsys.readouterr().out.splitlines() if "'1+1' -> '2'" in line]
    assert [line.split(",")[0] for line in said] == ["step 1", "step 2", "step 4", "step 8"]


# --- the end of a step ---


@pytest.mark.parametrize(
    "eval_every, save_every, evaluations, saves",
    [(0, 0, [0, 5], []), (2, 2, [0, 2, 4, 5], [4, 5]), (5, 3, [0, 5], [3, 5]), (1, 0, [0, 1, 2, 3, 4, 5], [])],
)
def test_evaluations_and_checkpoints_are_due_at_the_last_step_too(eval_every, save_every, evaluations, saves, tmp_path):
    run, *_ = start(tmp_path, max_steps=5, eval_every=eval_every, save_every=save_every)
    evaluated = [0] if run.evaluates(0) else []
    for step in run.steps():
        if run.evaluates(step):
            evaluated.append(step)
        log_step(run, {"reward/mean": 0.0})
    kept = [int(path.name.removeprefix("step-")) for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert evaluated == evaluations and kept == saves


# --- a loss that is not finite ---


DIVERGING = """
import os, sys
import torch
import grpo
from harness.errors import clean_exit

loss, calls = grpo.policy_loss, []


def diverges(*arguments):
    losses, stats = loss(*arguments)
    calls.append(1)
    if os.environ.get("FAULT") == os.environ.get("RANK", "0") and len(calls) == int(os.environ.get("CALL", 3)):
        losses = losses * torch.inf
    return losses, stats


grpo.policy_loss = diverges
with clean_exit():
    grpo.main(sys.argv[1:])
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_leaves_the_last_finished_step(processes, tmp_path):
    """Nothing was saved, and the exit code was that of bad input."""
    (tmp_path / "diverging.py").write_text(DIVERGING, encoding="utf-8")
    sizes = "--prompts_per_step 4 --group_size 4 --max_new_tokens 16 --eval_prompts 2 --eval_samples 4"
    command = [tmp_path / "diverging.py", *sizes.split(), "--max_steps", "4", "--eval_every", "3", "--output_dir"]
    last = str(processes - 1)  # one process alone meets it
    result = run_processes(*command, tmp_path / "b", processes=processes, env={"FAULT": last}, patience=20)
    assert result.codes == [1] * processes, result.stderr
    line = next(line for line in result.stderr.splitlines() if "error: " in line)
    assert "step 3: update 1 is not finite" in line and "the checkpoint is of step 2" in line
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-00000002"]
    for folder, options in (("b", ["--resume"]), ("a", [])):
        result = run_processes(*command, tmp_path / folder, *options, processes=processes)
        assert result.returncode == 0, result.stderr
    same_run(tmp_path / "a", tmp_path / "b")  # the unfinished step evaluated nothing


def test_a_step_that_diverges_in_its_second_update_leaves_no_checkpoint(tmp_path):
    """Its weights are those of no step: a resume would take the first update twice."""
    (tmp_path / "diverging.py").write_text(DIVERGING, encoding="utf-8")
    sizes = "--prompts_per_step 4 --group_size 4 --max_new_tokens 16 --eval_prompts 2 --num_minibatches 2 --max_steps 4"
    command = [tmp_path / "diverging.py", *sizes.split(), "--output_dir", tmp_path / "run"]
    result = run_processes(*command, processes=1, env={"FAULT": "0", "CALL": "4"}, patience=20)
    assert result.codes == [1]
    assert "step 2: update 2 is not finite" in result.stderr and "no checkpoint is written" in result.stderr
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "model").exists()
