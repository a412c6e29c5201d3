"""Started by processes.py, which has imported the project: run copies of files of it as if it were not there.

copied.py run <folder> <script> <options>   two steps straight through, and two of which the second is killed and resumed
copied.py test <folder> <options of pytest>
"""

import importlib
import os
import pathlib
import runpy
import signal
import sys

from accelerate.state import AcceleratorState, GradientState

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = [ROOT, *(ROOT / name for name in ("tools", "lab", "examples", "tests", "tests/helpers"))]
QUICK = "--max_steps 2 --save_every 1 --output_dir".split()
SIZES = dict(prompts_per_step=4, group_size=4, micro_batch_size=8, max_new_tokens=32, eval_prompts=2, eval_samples=2)
SIZES |= dict(eval_k=1, pairs_per_step=2)  # used as far as the script has the option


def is_ours(path):
    path = pathlib.Path(path).resolve()
    rooms = (ROOT / name for name in ("common", "fast"))
    return path.parent in FOLDERS or any(map(path.is_relative_to, rooms))


def leave_project_for(folder):
    """Unload the project's modules and take its folders off sys.path, so that those of `folder` are imported."""
    sys.path[:] = [folder, *(path for path in sys.path if pathlib.Path(path).resolve() not in FOLDERS)]
    for name, module in list(sys.modules.items()):
        if name != "__main__" and is_ours(getattr(module, "__file__", None) or os.sep):
            del sys.modules[name]
    os.environ.pop("PYTHONPATH", None)


def run(script, *options):
    """Return the exit code of `python SCRIPT OPTIONS`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


def killed_run(script, *options):
    """Run in a subprocess that is killed in step 2, after the update; return its exit code."""
    child = os.fork()
    if not child:
        log = importlib.import_module("common.run").Log
        write = log.write

        def write_or_die(self, step, *rest, **named):
            if step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, step, *rest, **named)

        log.write = write_or_die
        os._exit(run(script, *options))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sizes(options):
    """Return command-line arguments for those `SIZES` that are options of the script."""
    return [word for name, value in SIZES.items() if name in options for word in (f"--{name}", str(value))]


def main(kind, folder, *words):
    leave_project_for(folder)
    os.chdir(folder)
    if kind == "test":
        import pytest

        raise SystemExit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *words]))
    script, *more = words
    options = importlib.import_module(script.removesuffix(".py")).Args.__dataclass_fields__
    more += sizes(options)
    assert run(script, *more, *QUICK, "straight") == 0
    assert killed_run(script, *more, *QUICK, "killed") == -signal.SIGKILL
    assert run(script, "--resume", "--output_dir", "killed") == 0
    assert run(script, "--num_generations", "8") == 2
    ours = [module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]
    assert [path for path in ours if is_ours(path) and path != __file__] == []


if __name__ == "__main__":
    main(*sys.argv[1:])
