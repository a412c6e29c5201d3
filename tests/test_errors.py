"""One-line errors; Ctrl-C, SIGTERM and a closing terminal.

The first signal ends a run after its step, with a checkpoint; the second one ends it at once.
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys

import pytest
from accelerate import Accelerator

import processes
from common.run import Exit, clean_exit, listen
from small_run import same_run
from testbed import ROOT, SCRIPTS, metric_rows, script

SMALL = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24 --max_steps 3".split()
SMALL += "--eval_prompts 3 --eval_samples 4 --eval_every 2".split()
PAIRS = "--pairs_per_step 4 --eval_every 2 --max_steps 3 --learning_rate 1e-4".split()
FILTERS = [name for name in SCRIPTS if hasattr(script(name), "dynamic_sampling")]  # they need right completions
OPTIONS = dict.fromkeys(SCRIPTS, SMALL) | {name: [*SMALL, "--max_new_tokens", "40"] for name in FILTERS}
OPTIONS |= {"dpo": PAIRS, "reward_model": PAIRS}


@pytest.fixture(autouse=True)
def restored_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    streams = sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an earlier run in this process may have changed it
    yield
    sys.stdout, sys.stderr = streams
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(autouse=True)
def of_few_pairs(few_pairs, monkeypatch):
    for name in ("dpo", "reward_model"):
        monkeypatch.setitem(OPTIONS, name, PAIRS + few_pairs)


# --- how an error is told ---

BAD = """
calls = []
def bad(completions, **kwargs):
    calls.append(1)
    assert len(calls) < 4, "evaluation, step 1, step 2"
    return [1.0] * len(completions)
"""


def ended(name, arguments, capfd):
    """Run a script as its `__main__` does; return its exit code and its lines on stderr."""
    with pytest.raises(SystemExit) as end, clean_exit():
        script(name).main(list(map(str, arguments)))
    return end.value.code, capfd.readouterr().err.splitlines()


def test_failing_reward_prints_its_traceback(tmp_path, capfd):
    """The last checkpoint is as it was."""
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    options = ["--eval_every", 0, "--save_every", 1, "--reward", f"{tmp_path / 'bad.py'}:bad"]
    code, lines = ended("grpo", [*SMALL, *options, "--output_dir", tmp_path / "run"], capfd)
    assert code == 2 and lines[-1].startswith(f"{os.path.basename(sys.argv[0])}: error: --reward bad ")
    assert "AssertionError" in lines[-1] and lines[0].startswith("Traceback")
    assert f'File "{tmp_path / "bad.py"}", line 5, in bad' in "\n".join(lines)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == "step-00000002" and (newest / "state.json").exists()


def test_divergence_has_exit_code_1(tmp_path, capfd):
    options = ["--prompts_per_step", 32, "--critic_learning_rate", "1e30", "--output_dir", tmp_path]
    code, lines = ended("ppo", [*SMALL, *options], capfd)
    assert code == 1 and len(lines) == 1 and "training diverged" in lines[0]


# --- signals ---


def run(name, folder, *arguments):
    """Run a script as its `__main__` does; return its exit code."""
    try:
        with clean_exit():
            script(name).main([*OPTIONS[name], "--output_dir", str(folder), *arguments])
    except SystemExit as end:
        if isinstance(end.__context__, Exit) and end.__context__.code < 128:
            raise
        return end.code
    return 0


def signal_in(monkeypatch, module, function, number, call=1):
    """Send this process the signal `number` at the `call`-th call of a function of the module."""
    original, calls = getattr(module, function), []

    def interrupted(*arguments, **keywords):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, function, interrupted)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("dr_grpo", "gspo", "dcpo")])
def test_first_signal_finishes_the_step(name, tmp_path, monkeypatch, capfd):
    number = signal.SIGTERM if name == "grpo" else signal.SIGINT
    signal_in(monkeypatch, script(name), "update", number, call=2)
    assert run(name, tmp_path) == 128 + number
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == f"stopped at step 2: continue with --resume --output_dir {tmp_path}"
    assert "stopping after this step; a second signal stops at once\n" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]  # --save_every is 0
    assert not (tmp_path / "model").exists() and metric_rows(tmp_path)[-1]["step"] == 2


def test_resume_after_a_signal_is_bit_exact(tmp_path, monkeypatch):
    """For dpo.py; test_launch.py kills a run of grpo.py."""
    assert run("dpo", tmp_path / "a") == 0
    with monkeypatch.context() as patch:
        signal_in(patch, script("dpo"), "update", signal.SIGINT, 2)
        assert run("dpo", tmp_path / "b") == 130
    assert run("dpo", tmp_path / "b", "--resume") == 0
    same_run(tmp_path / "a", tmp_path / "b")


SIGNALLED = """
import os, signal, sys, time
import grpo
from common.run import clean_exit

where = sys.argv.pop()
original = getattr(grpo, where)


def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.1)  # one that comes sooner is the same signal, which a launcher passed on
    if where == "update":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    return original(*arguments)


setattr(grpo, where, interrupted)
with clean_exit():
    grpo.main(sys.argv[1:])
"""


@pytest.mark.parametrize("where", ["evaluate", "update"])
def test_second_signal_ends_at_once(where, tmp_path):
    (tmp_path / "signalled.py").write_text(SIGNALLED, encoding="utf-8")
    command = [tmp_path / "signalled.py", *SMALL, "--output_dir", tmp_path / "run", where]
    result = processes.run_processes(*command, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == -signal.SIGTERM and "Traceback" not in result.stderr
    assert ("stopping after this step" in result.stderr) == (where == "update")
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "model").exists()


def test_early_ctrl_c_prints_no_traceback(tmp_path, monkeypatch, capsys):
    signal_in(monkeypatch, script("grpo"), "load_policy", signal.SIGINT)
    assert run("grpo", tmp_path) == 130
    assert capsys.readouterr().err == ""


def test_echoed_signal_counts_once():
    # A terminal signals a whole group, and launchers pass it on.
    received = listen(Accelerator(cpu=True))
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert received[0] == signal.SIGINT


def test_signal_in_the_last_step(tmp_path, monkeypatch, capsys):
    signal_in(monkeypatch, script("grpo"), "update", signal.SIGINT, call=3)
    assert run("grpo", tmp_path / "a") == 0 and (tmp_path / "a" / "model" / "model.safetensors").exists()
    monkeypatch.undo()
    signal_in(monkeypatch, script("grpo"), "save_model", signal.SIGINT)
    assert run("grpo", tmp_path / "b") == 0 and (tmp_path / "b" / "model" / "model.safetensors").exists()
    assert "3 steps" in capsys.readouterr().out.splitlines()[-1]


# --- terminals ---


def start_on_terminal(folder, *arguments):
    """Start `python SCRIPT OPTIONS` in a terminal that closes with `terminal`; return (process, terminal)."""
    termios, fcntl = pytest.importorskip("termios"), pytest.importorskip("fcntl")
    import pty

    def begin():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may themselves run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 120))
    command = [sys.executable, ROOT / arguments[0], *arguments[1:]]
    streams = dict(stdin=end, stdout=end, stderr=end)
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, preexec_fn=begin, **streams)
    os.close(end)
    return process, terminal


def read_until(terminal, text):
    """Return what a terminal shows until `text` (a regular expression) appears or its program ends."""
    shown = b""
    with contextlib.suppress(OSError):  # on Linux: the last writer has closed the terminal
        while not re.search(text, shown):
            shown += os.read(terminal, 4096)
    return shown.decode()


def test_closing_terminal_saves_the_step(tmp_path):
    options = [*SMALL, "--max_steps", "100", "--output_dir", "run"]
    process, terminal = start_on_terminal(tmp_path, "grpo.py", *options)
    read_until(terminal, rb"[1-9]/100 ")  # in the bar
    os.close(terminal)
    assert process.wait(120) == 128 + signal.SIGHUP
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) == metric_rows(tmp_path / "run")[-1]["step"] >= 1


def test_terminal_shows_bar_and_error(tmp_path):
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    options = [*SMALL, "--reward", "bad.py:bad", "--eval_every", "0", "--output_dir", "run"]
    process, terminal = start_on_terminal(tmp_path, "grpo.py", *options)
    shown = read_until(terminal, rb"(?!)")
    assert process.wait(60) == 2
    bars = re.findall(r"(\d)/3 [^\r]*, reward (\S+) length (\S+) entropy ([\d.]+)", shown)
    assert [int(step) for step, *_ in bars][-1] == 2
    assert "step 1/3:" not in shown  # the line of a step
    assert re.search(r"[\r\n]step 1, reward \S+: '", shown)  # a sample on a line of its own, above the bar
    assert re.search(r"[\r\n]grpo.py: error: --reward bad [^\r\n]*\r\n$", shown)


def test_nohup_ignores_a_closing_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    received = listen(Accelerator(cpu=True))
    os.kill(os.getpid(), signal.SIGHUP)
    assert received == []


def test_sample_that_the_terminal_cannot_show(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding="cp1252"))
    with clean_exit():
        print("caf\u00e9 \U0001f600", flush=True)
    assert buffer.getvalue().decode("cp1252").strip() == "caf\u00e9 \\U0001f600"
