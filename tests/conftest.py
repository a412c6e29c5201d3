"""Fixtures and hooks. torch is imported late, since the xdist controller does not need it."""

import os
import pathlib

from devices import ON_GPU, VARIABLES

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | VARIABLES  # before torch, and for all processes below

import gc
import importlib.util
import re
import shutil
import signal
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BESIDE = ("tools", "lab", "docs", "configs", "examples", "fast", "vectors", "README.md")
ABSENT = [name for name in BESIDE if not (ROOT / name).exists()]  # in a fork of scripts, common/ and tests

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT in background jobs


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`-n logical` of pyproject.toml is `-n 0` on a GPU: workers would share its memory, which a test measures."""
    return 0 if ON_GPU else None


def absent(error):
    """Return the folder or module that a test misses in a fork, or "" if it failed for another reason."""
    if isinstance(error, pytest.Collector.CollectError):
        error = error.__cause__
    if ABSENT and isinstance(error, ModuleNotFoundError):
        return f"the module {error.name}; not here: {', '.join(ABSENT)}"
    path = pathlib.Path(error.filename or "/") if isinstance(error, FileNotFoundError) else ROOT
    return next((f"{name}, which is not here" for name in ABSENT if path.is_relative_to(ROOT / name)), "")


class Module(pytest.Module):
    """A test file that is skipped where it needs what a fork does not have."""

    def collect(self):
        try:
            return super().collect()
        except (FileNotFoundError, pytest.Collector.CollectError) as error:
            if reason := absent(error):
                pytest.skip(f"needs {reason}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return Module.from_parent(parent, path=module_path)


def refusal(error):
    """Return the line with which a script of `--script` refuses to run as the suite would run it, or ""."""
    from common.run import Exit

    lines = re.findall(r"(?:Exit|\.py: error): (.+?)(?=\\n|$)", str(error), re.MULTILINE)
    while error and not isinstance(error, Exit):
        error = error.__cause__ or error.__context__
    return str(error or "") or (lines[0] if lines else "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that needs what a fork does not have, or what a script of `--script` refuses."""
    report = yield
    reason = call.excinfo and absent(call.excinfo.value)
    reason = reason and f"needs {reason}"
    if call.excinfo and not reason and report.failed and item.config.getoption("script", None):
        reason = refusal(call.excinfo.value)
        reason = reason and f"the script refuses: {reason}"
    if reason:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], reason)
    return report


def pytest_ignore_collect(collection_path, config):
    """With `--script`, skip files that do not run over all scripts."""
    if not config.getoption("script", None) or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if not re.search(r"\b(ALL|FAMILY|PAIRS|SCRIPTS)\b", text) else None


def pytest_collection_modifyitems(config, items):
    """With `--script`, keep the tests of that script."""
    scripts = config.getoption("script", None)
    if scripts:
        names = {pathlib.Path(script).stem for script in scripts}
        asked = [item for item in items if hasattr(item, "callspec")]
        chosen = [item for item in asked if names & set(map(str, item.callspec.params.values()))]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_collection_finish():
    """Freeze imported objects, so that garbage collection skips them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Skip a test that lacks what it is marked with.

    `@pytest.mark.needs("peft")`: the package; `pytest -m needs` runs those that have theirs. `@pytest.mark.gpu`: a GPU,
    which only `pytest -m gpu` looks for. `@pytest.mark.beside("tools")`: a folder, which a fork may lack.
    """
    for name in (name for mark in item.iter_markers("beside") for name in mark.args):
        if name in ABSENT:
            pytest.skip(f"needs {name}, which is not here")
    for name in ("pages", "recipes"):
        if item.get_closest_marker(name) and name not in item.config.option.markexpr:
            pytest.skip(f"`pytest -m {name}` runs it")
    if item.get_closest_marker("gpu"):
        from common.run import use_cpu

        if not ON_GPU:
            pytest.skip("`pytest -m gpu` runs it, on a GPU")
        if use_cpu():
            pytest.skip("needs a GPU with float64, and torch sees none here")
    missing = {name for mark in item.iter_markers("needs") for name in mark.args if not importlib.util.find_spec(name)}
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Reset the singletons in which Accelerate keeps its state.

    Use one thread, since the models are tiny, and no garbage collection after each run, which takes 0.25 s.
    """
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.setattr("accelerate.utils.memory.gc", types.SimpleNamespace(collect=lambda: 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if hasattr(signal, "SIGPIPE"):  # tools that print to `| head` change it
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture(scope="session")
def ended(tmp_path_factory):
    """The folder of a finished run of the linear model of small_run.py, with a checkpoint."""
    from small_run import advance, start

    run, optimizer, numbers = start(tmp_path_factory.mktemp("ended"))
    numbers.values = [0.1 + 0.2]
    advance(run, optimizer)
    run.lock.release()
    return run.folder


@pytest.fixture
def checkpoint(ended, tmp_path):
    """A checkpoint in a copy of that folder."""
    return shutil.copytree(ended, tmp_path / "run") / "checkpoints" / "step-00000001"


@pytest.fixture(scope="session")
def few_pairs(tmp_path_factory):
    """`--dataset FOLDER` of 96 of the embedded pairs for training and 16 for evaluation."""
    from common.load import EMBEDDED

    folder = tmp_path_factory.mktemp("pairs")
    for split, rows in (("train", 96), ("test", 16)):
        lines = (EMBEDDED["embedded-pairs"] / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return ["--dataset", str(folder)]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with its cache in the test's own folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.fixture
def no_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
