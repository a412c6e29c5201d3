"""Checks an exercise of docs/exercises.md.

python tools/exercises.py NUMBER [YOURS]     run its check, on YOURS where it asks for that:
                                             your copy of a script, or the folder of your run
"""

import importlib.util
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "exercises.md"


def load(path):
    """A script as a module, wherever it lies."""
    # Under a name that no script of the project has: `import mine` must find the one that lies there.
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def code_of(number):
    """The check of an exercise: the Python in its section above the solution, or ""."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {number}. ")[2].partition("\n## ")[0]
    block = re.search(r"^```python\n(.*?)^```$", section.partition("<details>")[0], re.MULTILINE | re.DOTALL)
    return block[1] if block else ""


def check(number, mine=None):
    """Run the check of an exercise on `mine`, the module to be checked or the folder of a run."""
    exec(compile(code_of(number), f"check of exercise {number}", "exec"), {"mine": mine})


def read(path):
    """What the reader made: a script as a module, or the folder of a run as a path."""
    if path.is_dir():
        return path
    return load(path)


def main(arguments):
    if not 1 <= len(arguments) <= 2:
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    number, *yours = arguments
    code = code_of(number)
    if not code:
        raise SystemExit(f"exercise {number} has no check: its run shows it")
    if yours and "mine" not in code:
        raise SystemExit(f"exercise {number} checks no file")
    if "mine" in code and not yours:
        raise SystemExit(f"exercise {number} checks what you made: name your script or the folder of your run")
    try:
        check(number, *(read(pathlib.Path(path)) for path in yours))
    except AssertionError as error:
        raise SystemExit(f"exercise {number}: not yet: {error}") from None
    except EOFError:
        raise SystemExit(f"exercise {number} asks a question: run it in a terminal") from None
    print(f"exercise {number}: the check passes")


if __name__ == "__main__":
    main(sys.argv[1:])
