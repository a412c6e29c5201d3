"""harness/errors.py: errors in one line, and what Ctrl-C, SIGTERM, a closed terminal and a full disk do.

The first signal ends a run after its step, with a checkpoint; the second one ends it at once.
"""

import contextlib
import io
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

import processes
from harness.errors import InputError, StopSignal, clean_exit
from harness.run import Run
from small_run import same_run
from testbed import ROOT, SCRIPTS, metric_rows, script

SMALL = "--prompts_per_step 4 --group_size 4 --max_new_tokens 24 --max_steps 3".split()
SMALL += "--eval_prompts 3 --eval_samples 4 --eval_every 2".split()
PAIRS = "--pairs_per_step 4 --eval_every 2 --max_steps 3 --learning_rate 1e-4".split()
OPTIONS = dict.fromkeys(SCRIPTS, SMALL) | {"dpo": PAIRS, "reward_model": PAIRS}


@pytest.fixture(autouse=True)
def restored_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    streams = sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run that ended in this process keeps its own
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
def bad(completions, trainer_state, **kwargs):
    assert trainer_state.global_step < 2
    return [1.0] * len(completions)
"""


def ended(name, arguments, capfd):
    """The exit code of a script as its `__main__` runs it, and its lines on stderr."""
    with pytest.raises(SystemExit) as end, clean_exit():
        script(name).main(list(map(str, arguments)))
    return end.value.code, capfd.readouterr().err.splitlines()


def test_a_reward_that_fails_is_one_line_below_its_own_traceback(tmp_path, capfd):
    """The last checkpoint is as it was."""
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    options = ["--eval_every", 0, "--save_every", 1, "--reward", f"{tmp_path / 'bad.py'}:bad"]
    code, lines = ended("grpo", [*SMALL, *options, "--output_dir", tmp_path / "run"], capfd)
    assert code == 2 and lines[-1].startswith(f"{os.path.basename(sys.argv[0])}: error: --reward bad ")
    assert "AssertionError" in lines[-1] and lines[0].startswith("Traceback")
    assert f'File "{tmp_path / "bad.py"}", line 3, in bad' in "\n".join(lines)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == "step-00000002" and (newest / "state.json").exists()


def test_what_is_not_finite_is_one_line_and_exit_code_1(tmp_path, capfd):
    code, lines = ended("ppo", [*SMALL, "--critic_learning_rate", "1e30", "--output_dir", tmp_path], capfd)
    assert code == 1 and len(lines) == 1 and "not finite" in lines[0]


# --- signals ---


def run(name, folder, *arguments):
    """The script as its `__main__` runs it; its exit code."""
    try:
        with clean_exit():
            script(name).main([*OPTIONS[name], "--output_dir", str(folder), *arguments])
    except SystemExit as end:
        if isinstance(end.__context__, InputError):
            raise
        return end.code
    return 0


def signal_in(monkeypatch, module, function, number, call=1):
    """Let this process be sent the signal `number` in the `call`-th call of a function of the module."""
    original, calls = getattr(module, function), []

    def interrupted(*arguments, **keywords):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, function, interrupted)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("dr_grpo", "gspo", "dcpo")])
def test_the_first_signal_finishes_the_step_and_saves(name, tmp_path, monkeypatch, capfd):
    number = signal.SIGTERM if name == "grpo" else signal.SIGINT
    signal_in(monkeypatch, script(name), "update", number, call=2)
    assert run(name, tmp_path) == 128 + number
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == f"stopped at step 2: continue with --resume --output_dir {tmp_path}"
    assert "stopping after this step; a second signal stops at once\n" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]  # --save_every is 0
    assert not (tmp_path / "model").exists() and metric_rows(tmp_path)[-1]["step"] == 2


def test_a_stopped_run_goes_on_bit_by_bit(tmp_path, monkeypatch):
    """Of dpo.py; test_launch.py has such a run of grpo.py that is killed."""
    assert run("dpo", tmp_path / "a") == 0
    with monkeypatch.context() as patch:
        signal_in(patch, script("dpo"), "update", signal.SIGINT, 2)
        assert run("dpo", tmp_path / "b") == 130
    assert run("dpo", tmp_path / "b", "--resume") == 0
    same_run(tmp_path / "a", tmp_path / "b")


SIGNALLED = """
import os, signal, sys, time
import grpo
from harness.errors import clean_exit

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
def test_before_the_first_step_one_signal_ends_at_once_and_later_a_second_one(where, tmp_path):
    (tmp_path / "signalled.py").write_text(SIGNALLED, encoding="utf-8")
    command = [tmp_path / "signalled.py", *SMALL, "--output_dir", tmp_path / "run", where]
    result = processes.run_processes(*command, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == -signal.SIGTERM and "Traceback" not in result.stderr
    assert ("stopping after this step" in result.stderr) == (where == "update")
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "model").exists()


def test_ctrl_c_before_the_first_step_prints_no_traceback(tmp_path, monkeypatch, capsys):
    signal_in(monkeypatch, script("grpo"), "load_policy", signal.SIGINT)
    assert run("grpo", tmp_path) == 130
    assert capsys.readouterr().err == ""


def test_an_echo_of_a_signal_is_not_a_second_one():
    # A terminal signals a whole group, and launchers pass it on.
    stop = StopSignal()
    stop.listen()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.number == signal.SIGINT


def test_a_signal_in_the_last_step_or_later_changes_nothing(tmp_path, monkeypatch, capsys):
    signal_in(monkeypatch, script("grpo"), "update", signal.SIGINT, call=3)
    assert run("grpo", tmp_path / "a") == 0 and (tmp_path / "a" / "model" / "model.safetensors").exists()
    monkeypatch.undo()
    signal_in(monkeypatch, Run, "save_model", signal.SIGINT)
    assert run("grpo", tmp_path / "b") == 0 and (tmp_path / "b" / "model" / "model.safetensors").exists()
    assert "3 steps" in capsys.readouterr().out.splitlines()[-1]


def wait_for_signal(event):
    event.set()
    time.sleep(30)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_worker_does_not_take_a_signal_for_the_runs(capfd):
    """A reward's Pool hung: its workers took the pool's SIGTERM for the run's, and went on.

    Ctrl-C at a terminal goes to them too, and the step needs them.
    """
    stop = StopSignal()
    stop.listen()
    fork = multiprocessing.get_context("fork")
    for number, ends in ((signal.SIGTERM, True), (signal.SIGINT, False)):
        started = fork.Event()
        worker = fork.Process(target=wait_for_signal, args=(started,))
        worker.start()
        started.wait()
        os.kill(worker.pid, number)
        worker.join(5 if ends else 0.2)
        assert worker.is_alive() != ends
        worker.kill()
        worker.join()
    assert stop.number is None and capfd.readouterr().err == ""


# --- a terminal that closes, a pipe that nobody reads, a full disk ---


def start_on_terminal(folder, *arguments):
    """(process, terminal): a script in `folder` whose terminal closes when `terminal` does."""
    termios = pytest.importorskip("termios")
    import pty

    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 120))
    process = processes.start(arguments, cwd=folder, output=os.ttyname(end))
    select.select([terminal], [], [], 60)  # until it has opened it, and shown something
    os.close(end)
    return process, terminal


def read_until(terminal, text):
    """What a terminal shows, until it has shown `text` (a regular expression) or its program has ended."""
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so that the last writer has closed a terminal
        while not re.search(text, shown):
            shown += os.read(terminal, 4096)
    return shown.decode()


def test_a_terminal_that_closes_stops_a_run_after_its_step(tmp_path):
    options = [*SMALL, "--max_steps", "100", "--output_dir", "run"]
    process, terminal = start_on_terminal(tmp_path, "grpo.py", *options)
    read_until(terminal, rb"rollout 1/100 ")  # in the bar
    os.close(terminal)
    process.join(120)
    assert process.exitcode == 128 + signal.SIGHUP
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) == metric_rows(tmp_path / "run")[-1]["step"] >= 1


def test_a_terminal_gets_a_bar_and_below_it_an_error(tmp_path):
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    options = [*SMALL, "--reward", "bad.py:bad", "--eval_every", "0", "--output_dir", "run"]
    process, terminal = start_on_terminal(tmp_path, "grpo.py", *options)
    shown = read_until(terminal, rb"(?!)")
    process.join(60)
    assert process.exitcode == 2
    bars = re.findall(r"(\S+ ?\S*) (\d)/3 [^\r]*, reward (\S+) length (\S+) entropy ([\d.]+)", shown)
    assert [int(step) for _, step, *_ in bars][-1] == 2
    assert {"rollout", "update"} <= {phase for phase, *_ in bars}
    assert "step 1/3:" not in shown  # the line of a step
    assert re.search(r"[\r\n]step 1, reward \S+: '", shown)  # a sample on a line of its own, above the bar
    assert re.search(r"[\r\n]grpo.py: error: --reward bad [^\r\n]*\r\n$", shown)


def test_under_nohup_a_terminal_that_closes_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal()
    stop.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.number is None


CODE = """
import os, sys
from tqdm import tqdm
from harness.errors import clean_exit, print0
with clean_exit():
    print("ready \\u00e9 \\U0001f600", flush=True)
    sys.stdin.readline()
    print0("lost")
    print("lost" * 10_000)
    print("lost", file=sys.stderr)
    tqdm.write("lost", file=sys.stdout)
    for _ in tqdm(range(3)): pass
    open("end", "w").close()
"""


@pytest.mark.parametrize("gone", ["terminal", "pipe"])
def test_what_is_printed_to_nobody_ends_nothing(gone, tmp_path):
    """A run that ignores SIGHUP keeps its closed terminal; `| head -1` leaves a pipe that nobody reads."""
    output, end = os.pipe() if gone == "pipe" else pytest.importorskip("pty").openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CODE]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=end, stderr=end)
    os.close(end)
    while b"ready" not in os.read(output, 4096):
        pass
    os.close(output)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "end").exists()


def test_a_sample_that_the_terminal_cannot_show_does_not_end_the_run(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding="cp1252"))
    with clean_exit():
        print("caf\u00e9 \U0001f600", flush=True)
    assert buffer.getvalue().decode("cp1252").strip() == "caf\u00e9 \\U0001f600"


def test_a_run_whose_log_is_on_a_full_disk_loses_no_step_and_keeps_its_exit_code(tmp_path):
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    options = [*SMALL, "--save_every", "1", "--eval_every", "0", "--reward", "bad.py:bad", "--output_dir", "run"]
    process = processes.start(["grpo.py", *options], cwd=tmp_path, output="/dev/full")
    process.join(120)
    assert process.exitcode == 2
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == [0, 1, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists()
