"""common/harness/run.py: who may write in the folder of a run, what cannot be written, and when things are due."""

import datetime
import errno
import json
import os
import re
import sqlite3
import sys
import time
import types

import filelock
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import grpo
from common.errors import InputError, Process
from common.run import DEAD, Run
from small_run import FULL, advance, no_room, refusal, start, train
from testbed import ROOT, metric_rows, script

# --- whose folder it is ---


def test_a_folder_with_a_run_is_refused_and_a_resume_without_checkpoint_starts_at_zero(tmp_path, capsys):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer, save=False)
    run.close()
    (tmp_path / "model").mkdir()
    assert "holds a run" in refusal(tmp_path)
    assert "nothing to resume from" in refusal(tmp_path, resume=True)  # it would erase what the run wrote
    (tmp_path / "model").rmdir()  # as if it had been killed before its first checkpoint
    run, *_ = start(tmp_path, resume=True)
    assert run.step == 0 and "starting at step 0" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_run_holds_is_refused(resume, checkpoint, tmp_path):
    folder = checkpoint.parents[1] if resume else tmp_path / "new"
    folder.mkdir(exist_ok=True)
    with filelock.FileLock(folder / "lock"):  # what a run in another process does
        assert refusal(folder, resume=resume) == f"--output_dir {folder}: another run is using it"
    start(folder, resume=resume)


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """YAML and --output_dir=~/x, which no shell expands, made a folder with that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # Windows
    start("~/x")
    assert (tmp_path / "x" / "args.json").exists()


def test_what_json_cannot_hold_is_written_as_text(tmp_path):
    """A date in a message ended the run after its first evaluation."""
    run, *_ = start(tmp_path)
    run.write_rows("rows", [{"role": "user", "at": datetime.date(2026, 1, 2)}])
    assert (tmp_path / "rows").read_text(encoding="utf-8") == '{"role": "user", "at": "2026-01-02"}\n'


def test_a_run_that_ended_between_the_look_and_the_lock_is_not_overwritten(tmp_path, monkeypatch):
    acquire = filelock.FileLock.acquire

    def late(lock):
        (tmp_path / "args.json").write_text("{}", encoding="utf-8")
        return acquire(lock)

    monkeypatch.setattr(filelock.FileLock, "acquire", late)
    with pytest.raises(InputError, match="already holds a run"):
        start(tmp_path)
    assert (tmp_path / "args.json").read_text(encoding="utf-8") == "{}"


def test_the_process_that_trains_holds_the_lock_until_its_run_ends(tmp_path):
    # Not the launcher: it can be killed while its processes train on.
    def is_free():
        try:
            with filelock.FileLock(tmp_path / "lock", blocking=False):
                return True
        except filelock.Timeout:
            return False

    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    assert not is_free()
    run.close()
    assert is_free()
    run, *_ = start(tmp_path, resume=True)
    assert not is_free()  # and ends with an exception, before close():
    start(tmp_path, resume=True)


def test_a_run_that_fails_is_unlocked(tmp_path):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    assert run.abandon() == " (after step 1)"
    assert not run.files.lock.is_locked and (tmp_path / "metrics.jsonl").exists()


def test_two_starts_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {str(start(None)[0].folder) for _ in range(3)}
    assert len(folders) == 3 and all(re.fullmatch(r"runs/grpo-\d{8}-\d{6}-\d{6}", folder) for folder in folders)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "samples.jsonl", "tokens.jsonl", "pairs-round-2.jsonl", "model", "checkpoints", "model-step-3"],
)
def test_what_no_run_wrote_is_not_overwritten(name, resume, tmp_path):
    if "." in name:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine", encoding="utf-8")
    assert f"is not the folder of a run and holds {name}" in refusal(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == [name]  # not even a lock


# --- what cannot be written ---


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    with pytest.raises(InputError, match="File name too long"):
        start(tmp_path / ("x" * 300))


@pytest.mark.parametrize("where", ["the folder", "the lock"])
def test_a_folder_without_permission_is_one_line(where, tmp_path, monkeypatch):
    def denied(*arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    monkeypatch.setattr(*(("pathlib.Path.mkdir", denied) if where == "the folder" else ("os.open", denied)))
    with pytest.raises(InputError, match="the folder of the run cannot be written: .*Permission denied") as error:
        start(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_a_full_disk_while_a_row_is_written_is_one_line(tmp_path):
    run, optimizer, _ = start(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match="metrics.jsonl cannot be written: .*No space left on device"):
        advance(run, optimizer)


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory):
    """The embedded model in bfloat16: trained in float32, and converted for model/ alone."""
    folder = tmp_path_factory.mktemp("bfloat16")
    AutoModelForCausalLM.from_pretrained(ROOT / "common" / "tiny").to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "common" / "tiny").save_pretrained(folder)
    return ["--model_name_or_path", folder]


def ends_with(error):
    """In the place of transformers' save_pretrained: a part of the files, then `error`."""

    def save_pretrained(self, folder, **options):
        os.makedirs(folder, exist_ok=True)
        (folder / "half").write_text("of a file", encoding="utf-8")
        raise error

    return save_pretrained


def test_a_training_whose_model_cannot_be_written_is_kept(tmp_path, monkeypatch, bfloat16_model, capsys):
    # The default is no checkpoint: a full disk after hours of training lost all of it.
    train(tmp_path / "a", *bfloat16_model)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(FULL))
    with pytest.raises(InputError, match="model cannot be written: .*No space left on device; the training is kept"):
        train(tmp_path / "b", *bfloat16_model)
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "args.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "lock", "checkpoints"
    }  # fmt: skip
    assert "pass@1 before" not in capsys.readouterr().out.splitlines()[-1]
    train(tmp_path / "b", *bfloat16_model, "--resume")
    assert "pass@1 before" in capsys.readouterr().out.splitlines()[-1]
    assert metric_rows(tmp_path / "a") == metric_rows(tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model" / "model.safetensors") for x in "ab")
    assert a["model.norm.weight"].dtype == torch.bfloat16 and all(torch.equal(a[key], b[key]) for key in a)


def test_a_folder_without_model_and_checkpoint_never_counts_as_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(FULL))
    monkeypatch.setattr(torch, "save", no_room)
    with pytest.raises(InputError) as error:
        train(tmp_path, "--max_steps", 1)
    assert re.fullmatch(".*step-00000001 cannot be written: .*No space left on device.*", str(error.value))
    monkeypatch.undo()
    train(tmp_path, "--resume", "--max_steps", 0)
    assert "starting at step 0" in capsys.readouterr().out


def test_models_on_the_way_load_and_a_resume_writes_them_anew(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    train(tmp_path, "--save_model_every", 1, "--save_every", 2)
    one, two, end = (tmp_path / name for name in ("model-step-1", "model-step-2", "model"))
    assert (two / "model.safetensors").read_bytes() == (end / "model.safetensors").read_bytes()
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(one), AutoTokenizer.from_pretrained(one)
    assert lm.dtype == torch.float32 and tokenizer.eos_token == "<eos>"
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in end.iterdir()} and "README.md" in names
    assert len(synced) > 3 * len(names)  # all that is in place has reached the disk
    for folder in (one, two, end):
        (folder / "mark").write_text("of the life before", encoding="utf-8")
    train(tmp_path, "--resume", "--save_model_every", 2, "--save_every", 2)
    assert [(folder / "mark").exists() for folder in (one, two, end)] == [True, False, False]
    assert (two / "model.safetensors").read_bytes() == (end / "model.safetensors").read_bytes()


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "killed"])
def test_a_model_on_the_way_that_could_not_be_written_comes_with_the_resume(error, tmp_path, monkeypatch):
    # It was lost for good: the resume went on with step N + 1.
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(error))
    says = "model-step-1 cannot be written: .*No space left.*; the training is kept" if error is FULL else ".*"
    with pytest.raises(InputError if error is FULL else KeyboardInterrupt, match=says):
        train(tmp_path, "--save_model_every", 1, *([] if error is FULL else ["--save_every", 1]))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert not [path for path in tmp_path.glob("model*") if path.name != "model.tmp"]
    monkeypatch.undo()
    train(tmp_path, "--resume", "--save_model_every", 1, "--max_steps", 1)
    saved = load_file(tmp_path / "model-step-1" / "model.safetensors")
    kept = load_file(tmp_path / "checkpoints" / "step-00000001" / "model.safetensors")
    assert saved.keys() == {name.removeprefix("lm.") for name in kept}
    assert all(torch.equal(kept[f"lm.{name}"], weight) for name, weight in saved.items())
    assert not (tmp_path / "model-step-1" / "half").exists()


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
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    started = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *given, **options: started.append((given[1:], options)))
    start(tmp_path / "a-name", report_to=["wandb", "trackio"], reward_weights=[0.5, 2.0])
    (((script,), options),) = started
    assert script == "grpo" and options["config"]["reward_weights"] == "0.5 2.0"
    assert options["init_kwargs"]["wandb"] == {"name": "a-name", "dir": str(tmp_path / "a-name")}
    assert options["init_kwargs"]["trackio"] == {"name": "a-name"}
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "a-name" / "trackio")


def test_a_tracker_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    def no_key(*given, **options):
        raise ConnectionError("no API key\nconfigured")

    monkeypatch.setattr(Accelerator, "init_trackers", no_key)
    assert refusal(tmp_path, report_to=["wandb"]) == "--report_to wandb: no API key configured"


# --- what a run says ---


@pytest.mark.parametrize("max_steps, total", [(2, "/2"), (-1, "")])
def test_each_step_has_a_line(max_steps, total, tmp_path, capsys, monkeypatch):
    run, *_ = start(tmp_path, max_steps=2)
    run.args.max_steps = max_steps  # -1 is for runs that end with their pairs
    capsys.readouterr()
    now = iter([2.5, 3.0, 7.0])  # the first step is done, its row is written, the second one is done
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    run.step_start = 0.0
    metrics = {"reward/mean": 0.25, "policy/entropy": 0.5, "completion/length": 3.0, "optim/loss": 0.0}
    run.step = 1
    run.progress(metrics)
    run.log(metrics)
    run.step = 2
    run.progress(metrics)
    monkeypatch.undo()
    shown = "reward 0.250, length 3.000, entropy 0.500"
    lines = [f"step {step}{total}: {shown}, {seconds} s" for step, seconds in ((1, 2.5), (2, 4.0))]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    "reward, first, last, said",
    [
        (["accuracy"], (0.3, 0.3, None), (0.9, 0.9, None), "eval/pass@1 before 0.300, after 0.900; "),
        # dapo.py codes it as +1/-1
        (["accuracy"], (0.3, -0.4, None), (0.9, 0.8, None),
         "eval/pass@1 before 0.300, after 0.900; eval/reward before -0.400, after 0.800; "),
        (["format", "math_verify"], (0.3, 0.3, None), (0.9, 1.9, None),
         "eval/pass@1 before 0.300, after 0.900; eval/reward before 0.300, after 1.900; "),
        (["mine.py:mine"], (0.5, 0.5, None), (0.5, 0.5, None), "eval/reward before 0.500, after 0.500; "),
        (["accuracy"], (None, None, 0.5), (None, None, 0.75), "eval/accuracy before 0.500, after 0.750; "),
        # at first every reward was None
        (["mine.py:mine"], (None, None, None), (None, 0.5, None), "eval/reward after 0.500; "),
        (None, None, None, ""),
    ],
)  # fmt: skip
def test_the_closing_line_shows_the_reward_and_pass_at_1_where_it_is_rewarded(
    reward, first, last, said, tmp_path, capsys
):
    """A reward of the user's own on data with answers: "eval/pass@1 before 0.000, after 0.000"."""
    first, last = (
        values and {"eval/length": 3.0} | {
            f"eval/{name}": value for name, value in zip(("pass@1", "reward", "accuracy"), values, strict=True)
            if value is not None
        }
        for values in (first, last)
    )  # fmt: skip
    run, *_ = start(tmp_path, reward=reward or [])
    run.first_eval, run.last_eval, run.step = first, last, 1
    run.save_model = lambda *given: None
    run.finish(None, None, None)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{said}1 step, ")


def test_a_resume_that_evaluates_otherwise_compares_nothing(tmp_path, capsys):
    for options in (
        {},
        {"eval_every": 1},
        {"eval_temperature": 0.0},
        {"eval_temperature": 0.0},
    ):  # nor does a later one
        capsys.readouterr()
        run, optimizer, _ = start(tmp_path, resume=bool(options), **options)
        said = capsys.readouterr().out
        if not options:
            run.log_evaluation({"eval/pass@1": 0.25})
        advance(run, optimizer)
        run.log_evaluation({"eval/pass@1": 0.5})
        run.save_model = lambda *given: None
        run.finish(None, None, None)
        same = "eval_temperature" not in options
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"eval/pass@1 {'before 0.250, ' if same else ''}after 0.500; {run.step} step")
        assert ("leaves out the first evaluation" in said) == (not same and run.step == 3)
        run.close()
    assert run.step == 4


def said_after(folder, steps, capsys, **dead):
    """What is printed after which of these steps, given by metrics, beside their own lines: [(step, line)]."""
    run = Run(Accelerator(cpu=True), grpo.Args(output_dir=str(folder)), "grpo", **dead)
    run.start()
    found = []
    capsys.readouterr()
    for run.step, metrics in enumerate(steps, 1):
        run.progress(metrics)
        own, *others = capsys.readouterr().out.splitlines()
        assert own.startswith(f"step {run.step}/50: ")
        found += [(run.step, line) for line in others]
    return found


@pytest.mark.parametrize("name, dead, alive", [(name, value, 0.9) for name, value in DEAD.items()])
def test_a_dead_run_says_so_once_after_five_steps_in_a_row(name, dead, alive, tmp_path, capsys):
    steps = [{name: value, "optim/lr": 1e-4} for value in [dead] * 4 + [alive] + [dead] * 4]
    steps += [{}] + [{name: dead}] * 5 + [{name: alive}] + [{name: dead}] * 6  # without it in a row: not five
    ((step, line),) = said_after(tmp_path, steps, capsys)
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert step == 15 and line.startswith(f"{name} has been {dead} for 5 steps in a row")
    assert line.endswith("see docs/monitoring.md") and f"`{name}`" in page


@pytest.mark.parametrize(
    "metrics, dead",
    [
        ({"optim/loss": 0.0, "optim/grad_norm": 1.0, "optim/lr": 1e-4}, {}),  # what a healthy run prints
        ({"optim/grad_norm": 0.0, "optim/lr": 0.0}, {}),  # ppo.py's --critic_warmup_steps
        ({"advantage/zero_groups": 1.0}, {"dead": {}}),  # ppo.py: the critic is the baseline
        ({"advantage/zero_groups": 1.0, "mine": 0.5}, {"dead": {"mine": 0}}),
    ],
)
def test_a_run_that_learns_is_not_called_dead(metrics, dead, tmp_path, capsys):
    assert said_after(tmp_path, [metrics] * 6, capsys, **dead) == []


def test_a_script_says_what_it_cannot_learn_from(tmp_path, capsys):
    (said,) = said_after(tmp_path, [{"mine": 0.0, "advantage/zero_groups": 0.5}] * 6, capsys, dead={"mine": 0})
    assert said[1].startswith("mine has been 0 for 5 steps")
    for name, dead in (("dcpo", {"dcpo/response_utilization": 0}), ("ppo", {}), ("grpo", None)):
        runs = []
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(script(name), "load_tokenizer", lambda args: 1 / 0)
            patch.setattr(script(name), "Run", lambda *given, runs=runs, **options: runs.append(options))
            script(name).main(["--output_dir", str(tmp_path / name)])
        assert runs == [{"dead": dead} if dead is not None else {}]


def test_a_sample_is_shown_at_steps_that_are_ever_further_apart(tmp_path, capsys):
    run, optimizer, _ = start(tmp_path)
    for _ in range(9):
        advance(run, optimizer, save=False)
    said = [line for line in capsys.readouterr().out.splitlines() if "'1+1' -> '2'" in line]
    assert [line.split(",")[0] for line in said] == ["step 1", "step 2", "step 4", "step 8"]


# --- the end of a step ---


def test_the_closing_line_has_the_first_and_the_last_evaluation(tmp_path, capsys):
    run, *_ = start(tmp_path)
    run.save_model = lambda *given: None
    for run.step, value in enumerate((0.25, 0.5, 0.75)):
        run.log_evaluation({"eval/pass@1": value})
    run.finish(None, None, None)
    assert "eval/pass@1 before 0.250, after 0.750" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_of_no_steps_has_one_score(tmp_path, capsys):
    # "before 0.250, after 0.250" of one evaluation.
    run, *_ = start(tmp_path)
    run.log_evaluation({"eval/pass@1": 0.25})
    run.finish(None, None, None)
    assert capsys.readouterr().out.splitlines()[-1].startswith("eval/pass@1 0.250; 0 steps, ")


@pytest.mark.parametrize(
    "eval_every, save_every, evaluations, saves",
    [(0, 0, [5], []), (2, 2, [2, 4, 5], [2, 4, 5]), (5, 3, [5], [3, 5]), (1, 0, [1, 2, 3, 4, 5], [])],
)
def test_evaluations_and_checkpoints_are_due_at_the_last_step_too(eval_every, save_every, evaluations, saves, tmp_path):
    run, _, _ = start(tmp_path / "run", max_steps=5, eval_every=eval_every, save_every=save_every, keep_checkpoints=9)
    evaluated = []

    def evaluation():
        evaluated.append(run.step)
        return {"eval/reward": 0.5}, None

    for run.step in range(1, 6):
        run.end_step({"reward/mean": 0.0}, evaluation, last=run.step == 5)
    kept = [int(path.name.removeprefix("step-")) for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert evaluated == evaluations and kept == saves
    logged = [row["step"] for row in metric_rows(tmp_path / "run") if "eval/reward" in row]
    assert logged == evaluations


def test_the_tenth_step_in_a_row_without_any_reward_is_an_error_also_after_a_resume(tmp_path):
    run, optimizer, _ = start(tmp_path)
    for skipped in [0, *[1] * 8, 0, *[1] * 9]:
        advance(run, optimizer, save=False)
        run.progress({"reward/skipped": skipped, "reward/unscored": float(skipped)})
    run.progress({"sampling/skipped": 1})  # dapo's own rule is another one
    run.save()
    run.close()
    run, optimizer, _ = start(tmp_path, resume=True)
    advance(run, optimizer, save=False)
    with pytest.raises(InputError, match="every reward function returned None .*, as 9 times before"):
        run.progress({"reward/skipped": 1, "reward/unscored": 1.0})
    assert metric_rows(tmp_path)[-1]["reward/skipped"] == 1
    assert (tmp_path / "checkpoints" / "step-00000020" / "meta.json").exists()


@pytest.mark.parametrize(
    "every, there, written",
    [(0, None, []), (2, None, [4, 6]), (2, 4, [4, 6]), (3, None, [6]), (1, 4, [4, 5, 6]), (1, None, [4, 5, 6])],
)
def test_a_resume_writes_the_model_of_its_step(every, there, written, tmp_path):
    saved = []
    run, optimizer, _ = start(tmp_path)
    for _ in range(4):
        advance(run, optimizer, save=False)
    run.save()
    run.close()
    for name in (there, 6):  # that of a later step is of the life before this resume: it is written again
        (tmp_path / f"model-step-{name}").mkdir()
    run, *_ = start(tmp_path, resume=True, save_model_every=every)
    run.save_model = lambda *given: saved.append(given[-1])
    run.save_step_model(None, None, None)
    for run.step in (5, 6):
        run.save_step_model(None, None, None)
    assert saved == [f"model-step-{step}" for step in written]
    run.step = 0  # a run without a checkpoint
    run.save_step_model(None, None, None)
    assert len(saved) == len(written)


def test_a_process_stops_where_another_one_was_signalled():
    gather = lambda own: torch.cat([own, torch.tensor([15])])  # noqa: E731
    run = types.SimpleNamespace(process=Process(), accelerator=types.SimpleNamespace(device="cpu", gather=gather))
    assert Run.stop_asked(run) and run.interrupted and run.exit_code == 143


@pytest.mark.parametrize("processes", [1, 2])
def test_a_launcher_that_starts_one_process_of_several_is_told_so(processes, tmp_path, monkeypatch, capsys):
    # `accelerate launch --cpu --num_processes 2` starts one, and said nothing.
    command = ["--cpu", "--num_processes", str(processes), "script.py"]
    given = prepare_simple_launcher_cmd_env(_validate_launch_command(launch_command_parser().parse_args(command))[0])[1]
    for name in given.keys() - os.environ.keys():
        monkeypatch.setenv(name, given[name])
    start(tmp_path / "run")
    out = capsys.readouterr().out
    assert "processes: 1 on cpu" in out and ("asked for several" in out) == (processes == 2)
