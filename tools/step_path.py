"""List what you read to follow one training step: the functions that run, and their lines.

    python tools/step_path.py grpo.py           the plain way, --no_fast
    python tools/step_path.py grpo.py --fast    with the shortcuts of fast/, listed apart

It runs the script for one step on the embedded model, and traces what runs inside the functions
that the loop in `main` calls.
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
    return called & own


def trace(name, *options):
    """Run one step of a script; return {file: [code object]} of the functions that ran."""
    script = ROOT / f"{name}.py"
    doors = step_functions(script.read_text(encoding="utf-8"))
    entered = {}  # as an ordered set
    depth = 0  # how many step functions are on the stack

    def look(frame, event, _):
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(ROOT)):
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
    """Yield the lines: the script, then each folder, with its files in the order of the step."""
    for room in (".", "common", "harness", "fast"):
        rows = []
        lines = 0
        for file, codes in files.items():
            if str(file.parent) == room:
                length = sum(len(inspect.getsourcelines(code)[0]) for code in codes)
                rows.append(f"{file}, {length} lines: {', '.join(c.co_qualname for c in codes)}")
                lines += length
        if rows and room != ".":
            yield f"{room}/: {len(rows)} files, {lines} lines"
        yield from (row if room == "." else f"    {row}" for row in rows)


def main(words=None):
    words = sys.argv[1:] if words is None else words
    name = words[0].removesuffix(".py") if words else ""
    if not (ROOT / f"{name}.py").is_file() or words[1:] not in ([], ["--fast"]):
        raise SystemExit(__doc__)
    print("\n".join(report(trace(name, *([] if words[1:] else ["--no_fast"])))))


if __name__ == "__main__":
    main()
