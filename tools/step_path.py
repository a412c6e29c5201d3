"""List what you read to follow one training step: the functions that run, and their lines.

    python tools/step_path.py grpo.py           the default run
    python tools/step_path.py grpo.py --fast    with the shortcuts of fast/, listed apart

It runs the script for one step on the embedded model. The step is what runs inside the script's own
functions that the loop in `main` calls, without the evaluation. common/run.py and common/load.py
hold no part of an algorithm, so what they do inside a step is listed apart.
"""

import ast
import collections
import contextlib
import importlib
import inspect
import io
import pathlib
import sys
import tempfile

OFF_THE_STEP = ("common/run.py", "common/load.py")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def step_functions(source):
    """Return the names of the functions of a script that the loop over steps in `main` calls."""
    tree = ast.parse(source)
    (main,) = [node for node in tree.body if getattr(node, "name", "") == "main"]
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    called = set()
    for loop in [node for node in ast.walk(main) if isinstance(node, ast.For)]:
        calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
        called |= {function.id for function in calls if isinstance(function, ast.Name)}
    return called & own - {"evaluate"}


def trace(name, *options):
    """Run one step of a script; return {file: [code object]} of the functions that ran."""
    script = ROOT / f"{name}.py"
    doors = step_functions(script.read_text(encoding="utf-8"))
    own = (str(script), str(ROOT / "common"), str(ROOT / "fast"))  # a .venv may be in ROOT, too
    entered = {}  # as an ordered set
    depth = 0  # how many step functions are on the stack

    def look(frame, event, _):
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(own):
            return
        is_door = code.co_filename == str(script) and code.co_name in doors
        depth += is_door and event == "call"
        if depth and event == "call" and not code.co_name.startswith("<"):
            entered[code] = None
        depth -= is_door and event == "return"

    module = importlib.import_module(name)
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        words = ["--max_steps", "1", "--eval_every", "0", "--output_dir", f"{folder}/run", *options]
        sys.setprofile(look)
        try:
            module.main(words)
        finally:
            sys.setprofile(None)
    files = collections.defaultdict(list)
    for code in entered:
        files[pathlib.Path(code.co_filename).relative_to(ROOT)].append(code)
    return files


def report(files):
    """Yield the lines: the script, then what it needs of each folder, in the order of the step."""
    script, groups = [], {"common/": [], "off the step": [], "fast/": []}
    for file, codes in files.items():
        length = sum(len(inspect.getsourcelines(code)[0]) for code in codes)
        row = f"{file}, {length} lines: {', '.join(code.co_qualname for code in codes)}"
        group = "off the step" if file.as_posix() in OFF_THE_STEP else f"{file.parent}/"
        groups.get(group, script).append((length, row))
    yield from (row for _, row in script)
    for group, rows in groups.items():
        if rows:
            lines = sum(length for length, _ in rows)
            yield f"{group}: {len(rows)} file{'s' * (len(rows) > 1)}, {lines} lines"
            yield from (f"    {row}" for _, row in rows)


def main(words=None):
    words = sys.argv[1:] if words is None else words
    name = words[0].removesuffix(".py") if words else ""
    if not (ROOT / f"{name}.py").is_file() or words[1:] not in ([], ["--fast"]):
        raise SystemExit(__doc__)
    print("\n".join(report(trace(name, *words[1:]))))


if __name__ == "__main__":
    main()
