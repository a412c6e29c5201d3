"""tools/step_path.py: the functions that a step runs, by folder."""

import re
import subprocess
import sys

import pytest

import step_path


def functions_of(lines):
    """Return {file: names of its functions} from the printed lines."""
    found = [re.fullmatch(r" *([\w/]+\.py), (\d+) lines: (.*)", line) for line in lines if ".py" in line]
    assert all(int(row[2]) > 0 for row in found)
    return {row[1]: row[3].split(", ") for row in found}


def test_step_runs_script_and_three_files():
    # In a subprocess: other tests make fast/ register its attention for the whole process.
    command = [sys.executable, step_path.__file__, "grpo.py"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = functions_of(lines)
    assert {"rollout", "compute_rewards", "compute_advantages", "policy_loss", "update"} < {*files["grpo.py"]}
    assert not {"main", "Args", "evaluate"} & {*files["grpo.py"]}
    heads = [line for line in lines if not line.startswith(" ") and ".py" not in line]
    assert [head.partition(":")[0] for head in heads] == ["common/", "off the step"]
    step, around = [[*files][1:4], [*files][4:]]
    assert step == ["common/masked.py", "common/rewards.py", "common/answers.py"]
    assert {*around} <= {"common/run.py", "common/load.py"}


def test_the_shortcuts_are_listed_apart(capsys):
    step_path.main(["grpo", "--fast"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[[line.startswith("fast/: ") for line in lines].index(True) + 1].startswith("    fast/")


@pytest.mark.parametrize("words", [[], ["nothing.py"], ["grpo.py", "--slow"]])
def test_unknown_arguments_print_the_help(words):
    with pytest.raises(SystemExit, match="step_path.py grpo.py"):
        step_path.main(words)
