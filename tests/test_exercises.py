"""docs/exercises.md: solutions that are diffs fit the code and pass their checks, and what is predicted is logged."""

import json
import pathlib
import re
import shlex

import pytest
from recipes import changed

import exercises
from common.harness.command_line import parse_args
from testbed import script

ROOT = pathlib.Path(__file__).parent.parent

TASKS = exercises.exercises()
DIFFS = {
    number: diff for number, parts in TASKS.items() for kind, diff in exercises.FENCE.findall("".join(parts))
    if kind == "diff"
}  # fmt: skip
SMALL = "--prompts_per_step 4 --group_size 4 --max_steps 1 --eval_prompts 1 --eval_samples 4".split()


def mine(number, folder):
    """grpo.py with the diff of an exercise, as a module."""
    name, source, _ = changed(DIFFS[number])
    (folder / name).write_text(source, encoding="utf-8")
    return exercises.load(folder / name)


def run(module, arguments, folder):
    """The row of step 1; nothing is evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "evaluate", lambda *arguments: ({}, None))
        module.main([*arguments, "--output_dir", str(folder)])
    return json.loads((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[1])


def commands(number):
    """(script, arguments) of the commands of an exercise that start a script of this project."""
    text = "".join(TASKS[number]).replace("\\\n", " ")
    lines = [shlex.split(line) for line in re.findall(r"^python (\w+\.py .*)$", text, re.MULTILINE)]
    return [(line[0].removesuffix(".py"), line[1:]) for line in lines if line[0] != "mine.py"]


def test_there_are_eight_with_a_solution_each():
    assert list(TASKS) == list(range(1, 9)) and set(DIFFS) == {5, 6, 7}
    assert all(len(parts) == 2 and "<summary>Solution" in parts[1] for parts in TASKS.values())
    for number in TASKS:
        for name, arguments in commands(number):
            parse_args(script(name).Args, arguments)


@pytest.mark.parametrize("number", [5, 6, 7])
def test_a_check_passes_with_the_solution_alone(number, tmp_path):
    with pytest.raises(AssertionError):
        exercises.check(number, script("grpo"))
    exercises.check(number, mine(number, tmp_path))


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
def test_a_check_refuses_a_wrong_solution(number, old, new, tmp_path):
    module = mine(number, tmp_path)
    text = (tmp_path / "mine.py").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "mine.py").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises((AssertionError, RuntimeError)):  # a detached ratio has no gradient
        exercises.check(number, exercises.load(pathlib.Path(module.__file__)))


def test_the_printed_weights_are_those_of_the_check(capsys):
    exercises.check(4)
    assert capsys.readouterr().out in TASKS[4][1]


def test_the_predicted_gradient_norm(tmp_path):
    ((_, arguments),) = commands(3)
    row = run(script("grpo"), arguments, tmp_path / "run")
    assert f"{row['optim/grad_norm']:.3f}" == "0.725" and "logs 0.725" in TASKS[3][1]


def test_predicted_losses(tmp_path):
    """Which are 0, and the sign of the others, in small runs."""
    for name in ("grpo", "dr_grpo", "dcpo"):
        row = run(script(name), [*SMALL, "--num_minibatches", "1"], tmp_path / name)
        assert abs(row["optim/loss"]) < 1e-6 if name != "dr_grpo" else row["optim/loss"] < -0.01


@pytest.mark.parametrize(
    "arguments, message",
    [([], "NUMBER"), (["11"], "NUMBER"), (["1"], "by its run"), (["5"], "name yours"), (["4", "mine.py"], "no file"),
     (["6", "grpo.py"], "not yet: for one micro-batch")],
)  # fmt: skip
def test_the_command_says_what_is_missing(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=message):
        exercises.main(arguments)
