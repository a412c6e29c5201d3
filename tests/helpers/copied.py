"""Started by processes.py, which has imported the project: run copies of files of it as if it were not there.

copied.py run <folder> <script> <steps> ...   so many steps, then up to so many more after a resume
copied.py test <folder> <options of pytest>
"""

import importlib
import os
import pathlib
import runpy
import sys

from accelerate.state import AcceleratorState, GradientState

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = [ROOT, *(ROOT / name for name in ("tools", "lab", "examples", "tests", "tests/helpers"))]
QUICK = "--save_every 1 --output_dir run".split()
SIZES = dict(prompts_per_step=4, group_size=4, micro_batch_size=8, max_new_tokens=32, eval_prompts=2, eval_samples=2)
SIZES |= dict(eval_k=1, pairs_per_step=2)  # of these the options that a script has


def is_ours(path):
    path = pathlib.Path(path).resolve()
    rooms = (ROOT / name for name in ("common", "harness", "fast"))
    return path.parent in FOLDERS or any(map(path.is_relative_to, rooms))


def leave_project_for(folder):
    """Forget the modules of the project, and where they are; `folder` has others."""
    sys.path[:] = [folder, *(path for path in sys.path if pathlib.Path(path).resolve() not in FOLDERS)]
    for name, module in list(sys.modules.items()):
        if name != "__main__" and is_ours(getattr(module, "__file__", None) or os.sep):
            del sys.modules[name]
    os.environ.pop("PYTHONPATH", None)


def run(script, *options):
    """The exit code of `python SCRIPT OPTIONS`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


def sizes(options):
    """The words of a command line for those `SIZES` that are options of a script."""
    return [word for name, value in SIZES.items() if name in options for word in (f"--{name}", str(value))]


def main(kind, folder, *words):
    leave_project_for(folder)
    os.chdir(folder)
    if kind == "test":
        import pytest

        raise SystemExit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *words]))
    script, *steps = words
    options = importlib.import_module(script.removesuffix(".py")).Args.__dataclass_fields__
    for number in steps:
        resume = "yes" if number != steps[0] else "no"
        pathlib.Path("run.yaml").write_text(f"max_steps: {number}\nresume: {resume}\n", encoding="utf-8")
        assert run(script, *sizes(options), *QUICK, "--config", "run.yaml") == 0
    assert run(script, "--num_generations", "8") == 2
    ours = [module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]
    assert [path for path in ours if is_ours(path) and path != __file__] == []


if __name__ == "__main__":
    main(*sys.argv[1:])
