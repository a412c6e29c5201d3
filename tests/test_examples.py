"""The programs of examples/: their help, arguments and output."""

import json
import runpy

import pytest

from exercises import load
from testbed import ROOT

EXAMPLES = ROOT / "examples"
GYM = pytest.param("reasoning_gym_task", marks=pytest.mark.needs("reasoning_gym"))
WITH_ARGUMENTS = ["calculator_task", "gguf_model", "gradient_variance", "json_task", "split_gradient", GYM]


def run(name, words, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, words)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", [*WITH_ARGUMENTS, "one_step", "smollm2"])
def test_help_prints_only_the_docstring(name, tmp_path, monkeypatch, capsys):
    """A word that is taken for a folder would be built for a minute, and then called --help."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(name, ["--help"], monkeypatch)
    assert end.value.code == 0 and f"python examples/{name}.py" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_missing_argument_is_named(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(name, [], monkeypatch)
    assert end.value.code == 2 and "the following arguments are required" in capsys.readouterr().err


def test_variance_of_unwritten_recipes(monkeypatch, capsys):
    module = load(EXAMPLES / "gradient_variance.py")
    monkeypatch.setattr(module, "SEEDS", 1)
    monkeypatch.setattr(module, "ROLLOUTS", 2)
    module.main("embedded", 0.0, "rloo", "grpo")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed 0")]
    assert "rloo" in line and "grpo" in line and "best baseline" in line


def test_split_gradient_finds_the_threshold(capsys):
    module = load(EXAMPLES / "split_gradient.py")
    small = ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "24", "--share", "0.1"]
    for recipe in ("high_entropy", "kl_cov"):
        for threshold, is_right in (("step", True), ("micro_batch", False)):
            module.main(recipe, *small, "--threshold", threshold)
            line = next(line for line in capsys.readouterr().out.splitlines() if " 4: " in line)
            assert (float(line.split()[-1]) < 1e-5) == is_right, line


@pytest.mark.needs("reasoning_gym")
def test_reasoning_gym_task_is_scored(tmp_path, monkeypatch):
    run("reasoning_gym_task", [tmp_path, "spell_backward", "max_word_len=4"], monkeypatch)
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 96 and max(len(row["answer"]) for row in rows) == 4
    row = rows[0]
    module = load(EXAMPLES / "reasoning_gym_task.py")
    texts = [f" {row['answer']}\n", "?"]
    assert module.score(texts, [row["entry"]] * 2, gold=[row["answer"]] * 2) == [1.0, 0.0]
