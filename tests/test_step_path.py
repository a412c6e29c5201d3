"""tools/step_path.py: which functions a step of a script runs, room by room."""

import re
import subprocess
import sys

import pytest

import step_path


def rooms(lines):
    """{file: names of its functions} of the lines that it prints."""
    found = [re.fullmatch(r" *([\w/]+\.py), (\d+) lines: (.*)", line) for line in lines if ".py" in line]
    assert all(int(row[2]) > 0 for row in found)
    return {row[1]: row[3].split(", ") for row in found}


def test_the_functions_of_a_step_are_listed_by_room():
    # A process of its own: fast/ registers its attention for the whole process, where another test used it.
    command = [sys.executable, step_path.__file__, "grpo.py"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = rooms(lines)
    assert {"rollout", "compute_rewards", "compute_advantages", "policy_loss", "update"} < {*files["grpo.py"]}
    assert "main" not in files["grpo.py"] and "Args" not in files["grpo.py"]
    names = ("sampling", "batches", "rewards", "answers", "masked", "model")
    assert {file for file in files if file.startswith("common/")} == {f"common/{name}.py" for name in names}
    assert "optimizer_step" in files["harness/optimization.py"]
    assert not any(file.startswith("fast/") or "loading" in file for file in files)
    (total,) = [line for line in lines if line.startswith("common/: ")]
    assert total.startswith("common/: 6 files, ")


def test_the_shortcuts_are_listed_apart(capsys):
    step_path.main(["grpo", "--fast"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[[line.startswith("fast/: ") for line in lines].index(True) + 1].startswith("    fast/")
    assert "sample" in rooms(lines)["fast/decoding.py"]


@pytest.mark.parametrize("words", [[], ["nothing.py"], ["grpo.py", "--slow"]])
def test_what_it_does_not_know_ends_in_its_help(words):
    with pytest.raises(SystemExit, match="step_path.py grpo.py"):
        step_path.main(words)
