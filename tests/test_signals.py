"""Ctrl-C and SIGTERM: the first one ends a run after its step, with a checkpoint; the second one at once."""

import os
import signal
import types

import pytest
import torch
from safetensors.torch import load_file

from common import runs
from tools import ROOT, SCRIPTS, metric_rows, run_script, script

SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 3 --eval_samples 4 --eval_every 2 --max_steps 3".split()
PAIRS = "--pairs_per_step 4 --eval_every 2 --max_steps 3 --learning_rate 1e-4".split()
ROUNDS = "--rounds 2 --pair_prompts 24 --eval_prompts 3".split()  # more than a step, so a round is left in its middle
OPTIONS = dict.fromkeys(SCRIPTS, SMALL) | {"dpo": PAIRS + ROUNDS, "reward_model": PAIRS}


@pytest.fixture(autouse=True)
def quick_and_restored(monkeypatch):
    monkeypatch.setattr(runs.Process, "ECHO", 0.0)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def run(name, folder, *arguments):
    """The script as its `__main__` runs it; its exit code."""
    try:
        with runs.clean_exit():
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
    signal_in(monkeypatch, script(name), update, signal.SIGINT, call=2)
    assert run(name, tmp_path) == 130
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == f"stopped at step 2: --resume --output_dir {tmp_path} goes on"
    assert "SIGINT: stops after this step; a second one ends at once\n" in err and "Traceback" not in err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]  # --save_every is 0
    assert not (tmp_path / "model").exists() and metric_rows(tmp_path)[-1]["step"] == 2


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_stopped_run_goes_on_bit_by_bit(name, tmp_path, monkeypatch):
    assert run(name, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        signal_in(patch, script(name), "update_pairs" if name == "dpo" else "update", signal.SIGINT)
        assert run(name, tmp_path / "parts") == 130
    assert run(name, tmp_path / "parts", "--resume") == 0
    assert metric_rows(tmp_path / "parts") == metric_rows(tmp_path / "whole")
    whole, parts = (load_file(tmp_path / x / "model" / "model.safetensors") for x in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_sigterm_has_its_own_exit_code(tmp_path, monkeypatch, capfd):
    signal_in(monkeypatch, script("grpo"), "update", signal.SIGTERM)
    assert run("grpo", tmp_path) == 143
    out, err = capfd.readouterr()
    assert "stopped at step 1" in out and "SIGTERM: stops after this step" in err


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
    monkeypatch.setattr(runs.time, "sleep", sleep)
    monkeypatch.setattr(runs.Run, "progress", progress)
    assert run("grpo", tmp_path) == 130  # not SIGTERM's
    assert actions == [signal.SIG_IGN] * 2 + [signal.SIG_DFL] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("where", ["load_policy", "evaluate"])
def test_before_the_first_step_a_signal_ends_at_once_with_one_line(where, number, tmp_path, monkeypatch, capsys):
    signal_in(monkeypatch, script("grpo"), where, number)
    assert run("grpo", tmp_path) == 128 + number
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith(f": {number.name} before the first step") and "Traceback" not in "".join(lines)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "model").exists()


def test_a_signal_after_the_last_step_changes_nothing(tmp_path, monkeypatch):
    signal_in(monkeypatch, script("grpo").Run, "finish", signal.SIGINT)
    assert run("grpo", tmp_path) == 0 and (tmp_path / "model" / "model.safetensors").exists()


def test_without_clean_exit_python_keeps_its_own_ctrl_c(tmp_path, monkeypatch):
    signal_in(monkeypatch, script("grpo"), "update", signal.SIGINT)  # `main` called from a notebook
    with pytest.raises(KeyboardInterrupt):
        script("grpo").main([*SMALL, "--output_dir", str(tmp_path)])


def test_a_process_stops_where_another_one_was_signalled(monkeypatch):
    monkeypatch.setattr(runs.Process, "signal", 0)
    gather = lambda own: torch.cat([own, torch.tensor([15])])  # noqa: E731
    run = types.SimpleNamespace(accelerator=types.SimpleNamespace(device="cpu", gather=gather))
    assert runs.Run.stop_asked(run) and run.interrupted and run.exit_code == 143


def test_two_processes_of_which_one_is_signalled_stop_together(tmp_path):
    (tmp_path / "spy.py").write_text(
        "import os, signal\n"
        "def spy(prompts, completions, **kwargs):\n"
        "    if os.environ['RANK'] == '1' and len(completions) == 16:\n"  # of a step; an evaluation has 8
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    command = [ROOT / "grpo.py", *SMALL, "--prompts_per_step", 8, "--reward", "spy.py:spy", "--output_dir", "run"]
    result = run_script(*command, processes=2, cwd=tmp_path, timeout=120)
    assert "stopped at step 1: --resume --output_dir run goes on" in result.stdout, result.stderr
    assert result.returncode == 1 and "exitcode  : 143" in result.stderr  # the launcher's own
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "meta.json").exists()
    assert not (tmp_path / "run" / "model").exists()
