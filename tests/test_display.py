"""common/harness/display.py: lines where stdout is a file, a progress bar where it is a terminal."""

import os
import re
import subprocess
import sys
import types

import pytest

from common.display import Display
from testbed import ROOT

STEPS = "--prompts_per_step 4 --group_size 4 --max_new_tokens 8 --eval_prompts 4 --eval_samples 4 --max_steps 3".split()


def shown_on_a_terminal(folder):
    """What grpo.py prints on a terminal of 120 columns."""
    termios = pytest.importorskip("termios")
    import pty

    terminal, stdout = pty.openpty()
    termios.tcsetwinsize(stdout, (40, 120))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "grpo.py", *STEPS, "--output_dir", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE)
    os.close(stdout)
    parts = []
    try:
        while part := os.read(terminal, 4096):
            parts.append(part)
    except OSError:  # Linux says so that the last writer has closed a terminal
        pass
    assert process.wait(60) == 0, process.stderr.read()
    return b"".join(parts).decode()


def test_a_terminal_gets_a_bar_in_the_place_of_the_lines_of_steps(tmp_path):
    shown = shown_on_a_terminal(tmp_path / "run")
    bars = re.findall(r"(\d)/3 \[[^\r]*reward (\S+), length (\S+), entropy ([\d.]+)\]", shown)
    assert [int(step) for step, *_ in bars][-1] == 3
    assert "step 1/3:" not in shown  # the line of a step
    assert re.search(r"[\r\n]step 1, reward \S+: '", shown)  # a sample on a line of its own, above the bar
    assert shown.rstrip().splitlines()[-1].startswith("eval/pass@1 before ")


@pytest.mark.parametrize(
    "metrics, said",
    [
        ({"reward_part/right": 0.4}, "reward 0.500, length 9.000"),
        ({"reward_part/right": 0.4, "overlong/penalty": 0.0}, "reward 0.500, length 9.000"),
        ({"reward_part/right": 0.4, "overlong/penalty": -0.2}, "reward 0.500 (penalty -0.200), length 9.000"),
        (
            {"reward_part/right": 0.4, "reward_part/format": 1.0, "overlong/penalty": -0.2},
            "reward 0.500 (right 0.400, format 1.000, penalty -0.200), length 9.000",
        ),
    ],
)
def test_the_line_of_a_step_has_the_parts_of_a_reward_and_its_penalty(metrics, said, capsys):
    display = Display(types.SimpleNamespace(is_main_process=True))
    display.step(1, 2, {"completion/length": 9.0, "reward/mean": 0.5, **metrics}, 1.0)
    assert capsys.readouterr().out == f"step 1/2: {said}, 1.0 s\n"
    display.step(1, 2, {"completion/length": 9.0, **metrics}, 1.0)  # a step in which no group was kept
    assert capsys.readouterr().out == "step 1/2: length 9.000, 1.0 s\n"
