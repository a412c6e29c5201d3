"""docs/exercises.md: checks pass with the solution and fail with a nearly right one."""

import json

import pytest
import recipes

import exercises
from testbed import ROOT, script

SMALL = "--prompts_per_step 4 --group_size 4 --max_steps 1 --eval_prompts 1 --num_minibatches 1".split()


def solution(number, old="", new=""):
    text = recipes.made(f"exercise_{number}")
    assert not old or text.count(old) == 1
    return recipes.load(text.replace(old, new) if old else text, f"exercise_{number}")


@pytest.mark.parametrize("number", [2, 3, 4])
def test_check_passes_only_with_the_solution(number):
    with pytest.raises(AssertionError):
        exercises.check(number, script("grpo"))
    exercises.check(number, solution(number))


@pytest.mark.parametrize(
    "number, old, new",
    [
        (2, "/ (args.group_size - 1)", "/ args.group_size"),
        (3, 'totals["tokens"]', "loss_mask.sum()"),
        (4, "keepdim=True) / lengths", "keepdim=True)"),
        (4, "clip_low: float = option(3e-4", "clip_low: float = option(0.2"),
    ],
)
def test_a_check_refuses_a_wrong_solution(number, old, new):
    with pytest.raises(AssertionError):
        exercises.check(number, solution(number, old, new))


def folder_of(tmp_path, rows):
    """The folder of a run with these rows of metrics.jsonl."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(tmp_path)


def passes(number, folder, monkeypatch, said):
    """Return None if the check of a run passes, or its message; its question is answered with `said`."""
    monkeypatch.setattr("builtins.input", lambda question: said)
    try:
        exercises.main([str(number), folder])
    except SystemExit as ended:
        return str(ended)


def test_prediction_is_compared_with_run(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, [{"step": 0}, {"step": 1, "optim/loss": -0.081}])
    assert passes(1, folder, monkeypatch, "-1") is None
    assert "not yet" in passes(1, folder, monkeypatch, "0.08")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dcpo"])
def test_the_loss_of_the_first_update(name, tmp_path, monkeypatch):
    monkeypatch.setattr(script(name), "evaluate", lambda *arguments: ({}, []))
    script(name).main([*SMALL, "--output_dir", str(tmp_path)])
    row = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert abs(row["optim/loss"]) < 1e-6 if name != "dr_grpo" else row["optim/loss"] < -0.01


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["1"], "name its folder"),
        (["1", "docs"], "not the folder of a run"),
        (["11"], "has no check"),
        (["3", "grpo.py"], "not yet: for one micro-batch"),
    ],
)
def test_command_names_what_is_missing(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=message):
        exercises.main(arguments)
