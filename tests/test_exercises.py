"""docs/exercises.md: a check passes with the solution, and not with one that is nearly right."""

import json

import pytest
import recipes

import exercises
from testbed import ROOT, script

SMALL = (
    "--prompts_per_step 4 --group_size 4 --max_steps 1 --eval_prompts 1 --eval_samples 4 --num_minibatches 1".split()
)


def solution(number, old="", new=""):
    text = recipes.made(f"exercise_{number}")
    assert not old or text.count(old) == 1
    return recipes.load(text.replace(old, new) if old else text, f"exercise_{number}")


@pytest.mark.parametrize("number", [5, 6, 7])
def test_a_check_passes_with_the_solution_alone(number):
    with pytest.raises(AssertionError):
        exercises.check(number, script("grpo"))
    exercises.check(number, solution(number))


@pytest.mark.parametrize(
    "number, old, new",
    [
        (5, "/ (args.group_size - 1)", "/ args.group_size"),
        (5, "normalize_std: bool = option(False", "normalize_std: bool = option(True"),
        (6, 'max(totals["tokens"], 1)', "loss_mask.sum()"),
        (7, "/ lengths).exp()", "/ lengths).exp().detach()"),
        (7, "/ lengths).exp()", ").exp()"),
    ],
)
def test_a_check_refuses_a_wrong_solution(number, old, new):
    with pytest.raises((AssertionError, RuntimeError)):  # a detached ratio has no gradient
        exercises.check(number, solution(number, old, new))


def test_the_weights_of_exercise_4_are_printed(capsys):
    exercises.main(["4"])
    grpo, dr_grpo = capsys.readouterr().out.splitlines()[:2]
    assert grpo.split() == ["grpo", "short", "0.1000", "long", "0.0100"]
    assert dr_grpo.split() == ["dr_grpo", "short", "0.0078", "long", "0.0078"]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dcpo"])
def test_the_loss_of_the_first_update(name, tmp_path, monkeypatch):
    monkeypatch.setattr(script(name), "evaluate", lambda *arguments: ({}, None))
    script(name).main([*SMALL, "--output_dir", str(tmp_path)])
    row = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1])
    assert abs(row["optim/loss"]) < 1e-6 if name != "dr_grpo" else row["optim/loss"] < -0.01


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "NUMBER"),
        (["1"], "has no check"),
        (["11"], "has no check"),
        (["5"], "name yours"),
        (["4", "mine.py"], "no file"),
        (["6", "grpo.py"], "not yet: for one micro-batch"),
    ],
)
def test_the_command_says_what_is_missing(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=message):
        exercises.main(arguments)
