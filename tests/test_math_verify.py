"""examples/math_verify_reward.py: comparisons run in a subprocess, and nothing hangs."""

import os
import signal
import subprocess
import sys
import threading
import time

import math_verify_reward as tool
import psutil
import pytest

from common.run import Exit
from testbed import ROOT


def test_missing_package_says_what_to_install(monkeypatch):
    """A missing package must not silently score 0."""
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    tool.comparing_process.cache_clear()
    with pytest.raises(Exit, match="pip install"):
        tool.math_verify(["#### 3"], ["4"], [False], [False])


def test_accepted_answers_need_no_package():
    chat = [{"role": "assistant", "content": "#### 3"}]
    texts, golds, no = ["#### 3", chat, "#### 3"], ["3", ["2", "3"], None], [False] * 3
    assert tool.math_verify(texts, golds, no, no) == [1.0, 1.0, None]


def test_a_thought_holds_no_answer():
    """The template has opened <think>, so the text does not show that it is a thought."""
    texts = [r"Maybe \boxed{4}. But", r"Maybe \boxed{5}.</think>\boxed{4}"]
    assert tool.math_verify(texts, ["4"] * 2, [True, False], [True] * 2) == [0.0, 1.0]


@pytest.mark.needs("math_verify")
def test_comparison_is_symbolic_and_bounded(monkeypatch, caplog):
    """verl: an alarm scored all answers 0 outside the main thread; without it a power hung the run."""
    assert tool.math_verify_reward(r"\boxed{\sqrt{8}}", r"2\sqrt{2}") == 1.0
    assert tool.math_verify_reward(r"\boxed{x+1}", "1+x") == 1.0
    assert tool.math_verify_reward(r"\boxed{5.}", "5") == 1.0  # math-verify alone refuses it
    assert (
        tool.math_verify_reward(r"\boxed{\sqrt{8}}", "3")
        == tool.math_verify_reward("#### 2^3", "8", truncated=True)
        == 0.0
    )
    monkeypatch.setattr(tool, "SECONDS", 0.5)
    start = time.perf_counter()
    assert tool.math_verify_reward(r"\boxed{10^{10^{10}}}", "3") == 0.0
    assert time.perf_counter() - start < 60 and "math-verify took" in caplog.text
    monkeypatch.undo()
    results = []
    thread = threading.Thread(target=lambda: results.append(tool.math_verify_reward(r"\boxed{2^{3}}", "8")))
    thread.start()
    thread.join()
    assert results == [1.0]


RUN = """
import os, sys, time
import math_verify_reward as tool
compare = lambda text: tool.math_verify_reward("#### " + text, "8")
process = lambda: tool.comparing_process(os.getpid())
"""


def program(tmp_path, body, **options):
    """A program in a session of its own, whose group the test signals, and the pipe of what it prints."""
    (tmp_path / "program.py").write_text(RUN + body, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    command = [sys.executable, str(tmp_path / "program.py")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, **options
    )


@pytest.mark.needs("math_verify")
@pytest.mark.parametrize("when", ["between", "during"])
def test_killed_comparison_is_repeated(when):
    """A Pool hung at the next call, or scored 0."""
    assert tool.math_verify_reward(r"\boxed{2^{3}}", "8") == 1.0
    process = tool.comparing_process(os.getpid())
    if when == "between":
        process.kill()
        process.wait()
    else:
        os.kill(process.pid, signal.SIGSTOP)  # it is in the middle of a comparison
        threading.Timer(0.2, process.kill).start()
    assert tool.math_verify_reward(r"\boxed{2^{3}}", "8") == 1.0
    assert tool.comparing_process(os.getpid()).pid != process.pid


@pytest.mark.needs("math_verify")
def test_process_ends_with_the_run(tmp_path):
    body = "print(process().pid, flush=True)\ncompare('10^{10^{10}}')\n"
    run = program(tmp_path, body)
    worker = psutil.Process(int(run.stdout.readline()))
    assert os.getpgid(worker.pid) == worker.pid != os.getpgid(run.pid)  # Ctrl-C in a terminal does not reach it
    time.sleep(0.5)
    run.kill()
    run.wait()
    worker.wait(timeout=60)  # at once, or when its time is up
