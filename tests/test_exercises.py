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


@pytest.mark.parametrize("number", [5, 6, 7])
def test_check_passes_only_with_the_solution(number):
    with pytest.raises(AssertionError):
        exercises.check(number, script("grpo"))
    exercises.check(number, solution(number))


@pytest.mark.parametrize(
    "number, old, new",
    [
        (5, "/ (args.group_size - 1)", "/ args.group_size"),
        (6, 'totals["tokens"]', "loss_mask.sum()"),
        (7, "keepdim=True) / lengths", "keepdim=True)"),
        (7, "clip_low: float = option(3e-4", "clip_low: float = option(0.2"),
    ],
)
def test_a_check_refuses_a_wrong_solution(number, old, new):
    with pytest.raises(AssertionError):
        exercises.check(number, solution(number, old, new))


def test_exercise_4_asks_first(monkeypatch, capsys):
    def answer(question):
        assert not capsys.readouterr().out  # the weights are not shown yet
        return "gspo, dcpo grpo"

    monkeypatch.setattr("builtins.input", answer)
    exercises.main(["4"])
    grpo, dr_grpo = capsys.readouterr().out.splitlines()[:2]
    assert grpo.split() == ["grpo", "short", "0.1000", "long", "0.0100"]
    assert dr_grpo.split() == ["dr_grpo", "short", "0.0078", "long", "0.0078"]
    monkeypatch.setattr("builtins.input", lambda question: "dapo grpo")
    with pytest.raises(SystemExit, match="not yet"):
        exercises.main(["4"])


def folder_of(tmp_path, rows, **options):
    """The folder of a run with these rows of metrics.jsonl."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "args.json").write_text(json.dumps(options), encoding="utf-8")
    return str(tmp_path)


def passes(number, folder, monkeypatch, said=""):
    """Return None if the check of a run passes, or its message; its question is answered with `said`."""
    monkeypatch.setattr("builtins.input", lambda question: said)
    try:
        exercises.main([str(number), folder])
    except SystemExit as ended:
        return str(ended)


@pytest.mark.parametrize("number, right, wrong", [(1, "-1", "0.08"), (2, "0.55", "0.7"), (3, "0.725", "1.255")])
def test_prediction_is_compared_with_run(number, right, wrong, tmp_path, monkeypatch):
    row = {"step": 1, "optim/loss": -0.081, "advantage/zero_groups": 0.508, "optim/grad_norm": 0.7248}
    options = dict(script="dr_grpo", group_size=2, seed=51, normalize_std=False)
    folder = folder_of(tmp_path, [{"step": 0}, row], **options)
    assert passes(number, folder, monkeypatch, right) is None
    assert "not yet" in passes(number, folder, monkeypatch, wrong)


def test_exercise_8_reads_the_run(tmp_path, monkeypatch):
    for after_25, message in ((0.95, None), (0.26, "exercise 8: not yet: after 25 steps pass@1 is 0.260")):
        rows = [{"step": 0}, {"step": 25, "eval/pass@1": after_25}, {"step": 50, "eval/pass@1": 0.97}]
        assert passes(8, folder_of(tmp_path, rows, reward=["rm:runs/rm/model"]), monkeypatch) == message


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
        (["6", "grpo.py"], "not yet: for one micro-batch"),
    ],
)
def test_command_names_what_is_missing(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=message):
        exercises.main(arguments)
