"""Checks an exercise of docs/exercises.md.

python tools/exercises.py NUMBER [FILE]      run its check, on FILE, your copy of a script, where it asks for one
"""

import importlib.util
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "exercises.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def exercises():
    """{number: (task, solution)} of the page."""
    own = PAGE.read_text(encoding="utf-8").partition("\n## Which curve")[0]
    parts = re.split(r"^## (\d+)\. ", own, flags=re.MULTILINE)
    numbered = zip(map(int, parts[1::2]), parts[2::2], strict=True)
    return {number: tuple(text.split("<details>")) for number, text in numbered}


def load(path):
    """A script as a module, wherever it lies."""
    # Under a name that no script of the project has: `import mine` must find the one that lies there.
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def check(number, mine=None):
    """Run the check of an exercise, the Python in its task, with `mine`, the module to be checked."""
    task, _ = exercises()[number]
    for code in [text for kind, text in FENCE.findall(task) if kind == "python"]:
        exec(compile(code, f"check of exercise {number}", "exec"), {"mine": mine})


def main(arguments):
    if not 1 <= len(arguments) <= 2 or not arguments[0].isdigit() or int(arguments[0]) not in exercises():
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    number, files = int(arguments[0]), [pathlib.Path(argument) for argument in arguments[1:]]
    task, _ = exercises()[number]
    if "```python" not in task:
        raise SystemExit(f"exercise {number} is checked by its run")
    if bool(files) != ("mine." in task):
        raise SystemExit(f"exercise {number} checks " + ("no file" if files else "a file: name yours"))
    try:
        check(number, *map(load, files))
    except AssertionError as error:
        raise SystemExit(f"exercise {number}: not yet: {error}") from None
    print(f"exercise {number}: the check passes")


if __name__ == "__main__":
    main(sys.argv[1:])
