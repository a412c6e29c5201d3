"""Check an exercise of docs/exercises.md.

python tools/exercises.py NUMBER YOURS ...     YOURS: your copy of a script, or the folder of your run
"""

import importlib.util
import json
import pathlib
import re
import sys
import types

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "exercises.md"


def load(path):
    """Import a script from anywhere."""
    # Use a prefixed name, so that `import mine` does not find this module.
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def read_run(folder):
    """Return a run, with the `rows` of its metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return types.SimpleNamespace(rows=[json.loads(line) for line in lines])
    except (OSError, ValueError) as error:
        raise SystemExit(f"{folder} is not the folder of a run: {error}") from None


def code_of(number):
    """Return the check of an exercise, the Python in its section above the solution, or ""."""
    section = (
        PAGE.read_text(encoding="utf-8").partition(f"\n## {number}. ")[2].partition("\n## ")[0]
    )
    block = re.search(
        r"^```python\n(.*?)^```$", section.partition("<details>")[0], re.MULTILINE | re.DOTALL
    )
    return block[1] if block else ""


def check(number, mine=None, run=None):
    """Run the check of an exercise on the module `mine`, or on `run` as `read_run` returns it."""
    code = compile(code_of(number), f"check of exercise {number}", "exec")
    exec(code, {"mine": mine, "run": run})


def main(arguments):
    if not arguments:
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    number, *yours = arguments
    code = code_of(number)
    wanted = "mine" if "mine." in code else "run"
    if not code:
        raise SystemExit(f"exercise {number} has no check")
    if wanted == "mine" and not yours:
        raise SystemExit(f"exercise {number} checks a script: name yours")
    if wanted == "run" and not yours:
        raise SystemExit(f"exercise {number} reads a run: name its folder")
    try:
        for path in map(pathlib.Path, yours):
            if wanted == "mine" and not (path.suffix == ".py" and path.is_file()):
                raise SystemExit(f"exercise {number} checks a script: {path} is none")
            if wanted == "mine":
                check(number, mine=load(path))
            else:
                check(number, run=read_run(path))
    except AssertionError as error:
        raise SystemExit(f"exercise {number}: not yet: {error}") from None
    except ValueError as error:  # the answer is not a number
        raise SystemExit(f"exercise {number}: {error}") from None
    except EOFError:
        raise SystemExit(f"exercise {number} asks a question: run it in a terminal") from None
    print(f"exercise {number}: the check passes")


if __name__ == "__main__":
    main(sys.argv[1:])
