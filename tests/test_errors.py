"""common/errors.py: how an error is told, and what Ctrl-C, SIGTERM and a closed terminal do.

The first signal ends a run after its step, with a checkpoint; the second one ends it at once.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types

import psutil
import pytest
import torch
from safetensors.torch import load_file

from common import errors
from common.errors import InputError, clean_exit
from common.run import Run
from small_run import start
from testbed import ROOT, SCRIPTS, metric_rows, script

SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 3 --eval_samples 4 --eval_every 2 --max_steps 3".split()
PAIRS = "--pairs_per_step 4 --eval_every 2 --max_steps 3 --learning_rate 1e-4".split()
ROUNDS = "--rounds 2 --pair_prompts 24 --eval_prompts 3".split()  # more than a step, so a round is left in its middle
TWO_STEPS = "--prompts_per_step 4 --group_size 4 --eval_prompts 3 --eval_samples 4 --eval_every 1 --max_steps 2".split()
OPTIONS = dict.fromkeys(SCRIPTS, SMALL) | {"dpo": PAIRS + ROUNDS, "reward_model": PAIRS}


def ended(name, arguments, capfd):
    """The exit code of a script as its `__main__` runs it, and its lines on stderr."""
    with pytest.raises(SystemExit) as end, clean_exit():
        script(name).main(list(map(str, arguments)))
    return end.value.code, capfd.readouterr().err.splitlines()


def test_a_sample_that_the_terminal_cannot_show_does_not_end_the_run():
    code = "from common.errors import clean_exit\nwith clean_exit():\n    print('caf\\u00e9 \\U0001f600')"
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert said.decode("cp1252").strip() == "caf\u00e9 \\U0001f600"


@pytest.fixture(autouse=True)
def quick_and_restored(monkeypatch):
    monkeypatch.setattr(errors.Process, "ECHO", 0.0)
    before = [signal.getsignal(number) for number in errors.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in errors.SIGNALS] == before


# --- how an error is told ---


def test_an_error_stands_on_a_line_of_its_own_after_those_of_the_steps(tmp_path, capfd):
    (tmp_path / "bad.py").write_text(
        "def bad(prompts, completions, **kwargs):\n"
        "    bad.calls = getattr(bad, 'calls', 0) + 1\n"
        "    return [float('nan') if bad.calls == 3 else 1.0] * len(completions)\n",
        encoding="utf-8",
    )
    options = ["--eval_every", 0, "--reward", f"{tmp_path / 'bad.py'}:bad"]
    with pytest.raises(SystemExit) as end, clean_exit():
        script("grpo").main(list(map(str, [*TWO_STEPS, *options, "--output_dir", tmp_path / "run"])))
    out, err = capfd.readouterr()
    (error,) = err.splitlines()
    assert end.value.code == 2
    values = r"step 1/2: reward 1\.000, length \d+\.\d{3}, entropy 0\.\d{3}, \d+\.\d s"
    (step,) = (line for line in out.splitlines() if line.startswith("step 1/2"))
    assert re.fullmatch(values, step)
    assert error.startswith(f"{os.path.basename(sys.argv[0])}: error: reward 'bad'") and "\r" not in error
    assert error.endswith("(after step 1)")


@pytest.mark.parametrize("error, code", [(InputError("bad"), 2), (RuntimeError("bug"), 1)], ids=["input", "bug"])
def test_the_first_process_of_a_machine_tells_an_error_and_the_others_wait_to_be_ended(
    error, code, monkeypatch, capsys
):
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    run = types.SimpleNamespace(abandon=lambda: waited.append("told") or " (after step 3)")
    for rank in "0 1 7".split():
        for name, value in {"WORLD_SIZE": "16", "LOCAL_RANK": rank, "RANK": str(int(rank) + 8)}.items():
            monkeypatch.setitem(os.environ, name, value)
        assert errors.report(error, run) == code
    assert waited == [1, "told", 3, "told", 3, "told"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and (code == 1 or said[0].endswith("error: bad (after step 3)"))


def test_a_process_that_failed_leaves_nothing_to_the_next_run(tmp_path):
    """Of `main` called twice from Python, the second run had the signal and the step of the first."""
    found = []
    for number in range(2):
        with pytest.raises(SystemExit), clean_exit():
            found.append(start(tmp_path / str(number))[0].process)
            assert signal.getsignal(signal.SIGTERM) is found[-1]
            raise InputError("bad")
    assert found[0] is not found[1] and start(tmp_path / "notebook")[0].process not in found


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_temperature_that_overflows_is_not_finite_with_the_step(name, tmp_path, capfd):
    code, lines = ended(name, [*TWO_STEPS, "--temperature", "1e-40", "--output_dir", tmp_path], capfd)
    assert code == 2 and "error: sampling: log-probs are not finite" in lines[-1] and "(after step 0)" in lines[-1]


def test_weights_that_became_nan_are_not_finite_with_the_step(tmp_path, capfd, monkeypatch):
    def update(accelerator, model, *rest):
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    monkeypatch.setattr(script("grpo"), "update", update)
    code, lines = ended("grpo", [*TWO_STEPS, "--output_dir", tmp_path], capfd)  # found by the evaluation of step 1
    assert code == 2 and "error: sampling: log-probs are not finite" in lines[-1] and "(after step 1)" in lines[-1]


# --- signals ---


@pytest.fixture(autouse=True)
def of_few_pairs(few_pairs, monkeypatch):
    """`--rounds` makes pairs of its own."""
    monkeypatch.setitem(OPTIONS, "reward_model", PAIRS + few_pairs)


def run(name, folder, *arguments):
    """The script as its `__main__` runs it; its exit code."""
    try:
        with clean_exit():
            script(name).main([*OPTIONS[name], "--output_dir", str(folder), *arguments])
    except SystemExit as end:
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


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_signal_finishes_the_step_and_saves(name, tmp_path, monkeypatch, capfd):
    update = "update_pairs" if name in ("dpo", "reward_model") else "update"
    number = signal.SIGTERM if name == "grpo" else signal.SIGINT
    signal_in(monkeypatch, script(name), update, number, call=2)
    assert run(name, tmp_path) == 128 + number
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == f"stopped at step 2: --resume --output_dir {tmp_path} continues"
    assert f"{number.name}: stops after this step; a second one ends at once\n" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]  # --save_every is 0
    assert not (tmp_path / "model").exists() and metric_rows(tmp_path)[-1]["step"] == 2
    assert not (tmp_path / "pairs-round-2.jsonl").exists()  # dpo.py samples no further round


def test_a_stopped_run_goes_on_bit_by_bit(tmp_path, monkeypatch):
    """Of dpo.py, in the middle of a round; test_launch.py has such a run of grpo.py that is killed."""
    assert run("dpo", tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        signal_in(patch, script("dpo"), "update_pairs", signal.SIGINT)
        assert run("dpo", tmp_path / "parts") == 130
    assert run("dpo", tmp_path / "parts", "--resume") == 0
    assert metric_rows(tmp_path / "parts") == metric_rows(tmp_path / "whole")
    whole, parts = (load_file(tmp_path / x / "model" / "model.safetensors") for x in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_an_echo_counts_for_nothing_and_the_second_signal_has_its_default_action(tmp_path, monkeypatch):
    # A terminal signals a whole group and launchers pass it on. The default action needs no interpreter: it also ends a
    # process that waits for another one.
    actions = []

    def sleep(seconds):
        os.kill(os.getpid(), signal.SIGTERM)
        actions.extend([signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)])

    def progress(self, metrics):
        actions.extend([signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)])

    signal_in(monkeypatch, script("grpo"), "update", signal.SIGINT)
    monkeypatch.setattr(errors.time, "sleep", sleep)
    monkeypatch.setattr(Run, "progress", progress)
    assert run("grpo", tmp_path) == 130  # not SIGTERM's
    assert actions == [signal.SIG_IGN] * 2 + [signal.SIG_DFL] * 2


@pytest.mark.parametrize("where, number", [("load_policy", signal.SIGINT), ("evaluate", signal.SIGTERM)])
def test_before_the_first_step_a_signal_ends_at_once_with_one_line(where, number, tmp_path, monkeypatch, capsys):
    signal_in(monkeypatch, script("grpo"), where, number)
    assert run("grpo", tmp_path) == 128 + number
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith(f": {number.name} before the first step") and "Traceback" not in "".join(lines)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "model").exists()


def test_a_signal_after_the_last_step_changes_nothing(tmp_path, monkeypatch):
    signal_in(monkeypatch, script("grpo").Run, "finish", signal.SIGINT)
    assert run("grpo", tmp_path) == 0 and (tmp_path / "model" / "model.safetensors").exists()


def forked(number):
    """Let a worker send this signal to itself; return the one that ends it, or 0."""
    child = multiprocessing.get_context("fork").Process(target=lambda: os.kill(os.getpid(), number))
    child.start()
    child.join()
    return -child.exitcode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_worker_does_not_wait_for_the_end_of_a_step(capfd):
    """A reward's multiprocessing.Pool hung: its workers took the pool's SIGTERM for the run's, and went on."""
    with clean_exit():
        process = signal.getsignal(signal.SIGTERM)
        process.run = types.SimpleNamespace(first_eval={})  # it has begun to train
        assert forked(signal.SIGTERM) == signal.SIGTERM
        assert forked(signal.SIGINT) == signal.SIGINT
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is process
    assert forked(signal.SIGTERM) == signal.SIGTERM
    assert capfd.readouterr().err == ""


WORKERS = """
import multiprocessing, signal, time, types
from concurrent.futures import ProcessPoolExecutor
from common.errors import clean_exit

def work(number):
    time.sleep(1)
    return number

with clean_exit():
    signal.getsignal(signal.SIGTERM).run = types.SimpleNamespace(first_eval={{}})  # it has begun to train
    with {pool}(2) as pool:
        pool.map(str, range(2))
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        print(*pool.map(work, range(4)))
"""


def start_workers(folder, pool):
    """A process in a group of its own that has begun to work with two workers, and these."""
    (folder / "workers.py").write_text(WORKERS.format(pool=pool), encoding="utf-8")
    command, environment = [sys.executable, str(folder / "workers.py")], os.environ | {"PYTHONPATH": str(ROOT)}
    options = dict(stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    trainer = subprocess.Popen(command, **options)
    workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
    time.sleep(0.5)
    assert len(workers) == 2
    return trainer, workers


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("pool", ["multiprocessing.Pool", "ProcessPoolExecutor"])
def test_a_signal_to_the_group_leaves_the_workers_of_a_reward_to_finish_the_step(pool, number, tmp_path):
    """After a scheduler's SIGTERM a Pool hung with its orphans, and a ProcessPoolExecutor lost the step."""
    trainer, workers = start_workers(tmp_path, pool)
    try:
        os.killpg(trainer.pid, number)
        assert trainer.communicate(timeout=60)[0] == "0 1 2 3\n" and trainer.returncode == 0
        psutil.wait_procs(workers, timeout=60)
    finally:
        for process in (psutil.Process(trainer.pid), *workers) if trainer.poll() is None else workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
@pytest.mark.parametrize("pool", ["multiprocessing.Pool", "ProcessPoolExecutor"])
def test_the_workers_of_a_reward_end_with_the_run(pool, tmp_path):
    """They are no longer in its group, which a scheduler kills at last; a ProcessPoolExecutor's stayed for ever."""
    trainer, workers = start_workers(tmp_path, pool)
    trainer.kill()
    trainer.wait()
    alive = psutil.wait_procs(workers, timeout=60)[1]
    for worker in alive:
        worker.kill()
    assert alive == []


# --- a terminal that closes ---

TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may themselves run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def start_on_terminal(folder, command):
    """(process, terminal): a program in `folder` whose terminal closes when `terminal` does."""
    termios = pytest.importorskip("termios")
    import pty

    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 120))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own_session = dict(cwd=folder, env=environment, start_new_session=True)
    command = [sys.executable, "-c", TAKE_TERMINAL, *command]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, **own_session)
    os.close(end)
    return process, terminal


def close_after(terminal, text):
    """Read from a terminal until it has shown `text`, and close it."""
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)


def test_a_terminal_that_closes_stops_a_run_after_its_step(tmp_path):
    command = [sys.executable, str(ROOT / "grpo.py"), *SMALL, "--max_steps", "100", "--output_dir", "run"]
    process, terminal = start_on_terminal(tmp_path, command)
    close_after(terminal, b"1/100 ")  # in the bar
    assert process.wait(120) == 128 + signal.SIGHUP
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) == metric_rows(tmp_path / "run")[-1]["step"] >= 1


def test_under_nohup_a_run_goes_on_when_its_terminal_closes(tmp_path):
    options = [*SMALL, "--max_steps", "2", "--output_dir", "run"]
    process, terminal = start_on_terminal(tmp_path, ["nohup", sys.executable, str(ROOT / "grpo.py"), *options])
    while not (tmp_path / "run" / "metrics.jsonl").exists():  # what it prints goes to nohup.out
        time.sleep(0.05)
        assert process.poll() is None
    os.close(terminal)
    assert process.wait(120) == 0
    assert (tmp_path / "run" / "model").exists() and "2 steps" in (tmp_path / "nohup.out").read_text(encoding="utf-8")


@pytest.mark.parametrize("gone", ["terminal", "pipe"])
def test_what_is_printed_to_nobody_ends_nothing(gone, tmp_path):
    """A run that ignores SIGHUP keeps its closed terminal; `| tee` leaves a pipe that nobody reads."""
    code = (
        "import sys\nfrom tqdm import tqdm\nfrom common.errors import clean_exit\n"
        "with clean_exit():\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    print('lost', flush=True)\n"
        "    print('lost', file=sys.stderr)\n"
        "    tqdm.write('lost', file=sys.stdout)\n"
        "    open('end', 'w').close()\n"
    )
    if gone == "terminal":
        pty = pytest.importorskip("pty")
        output, end = pty.openpty()
    else:
        output, end = os.pipe()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=end, stderr=end)
    os.close(end)
    close_after(output, b"ready")
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0 and (tmp_path / "end").exists()


def test_without_clean_exit_python_keeps_its_own_ctrl_c(tmp_path, monkeypatch):
    signal_in(monkeypatch, script("grpo"), "update", signal.SIGINT)  # `main` called from a notebook
    with pytest.raises(KeyboardInterrupt):
        script("grpo").main([*SMALL, "--output_dir", str(tmp_path)])


def test_refused_data_leaves_no_folder(tmp_path, monkeypatch):
    """Each misspelt column left another empty runs/grpo-<time>; a folder that was there before stays."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for own in ([], ["--output_dir", "new"], ["--output_dir", "mine"]):
        with pytest.raises(SystemExit), clean_exit():
            script("grpo").main(["--dataset", "nowhere.jsonl", *own])
    assert not list((tmp_path / "runs").iterdir()) and not (tmp_path / "new").exists() and (tmp_path / "mine").is_dir()
