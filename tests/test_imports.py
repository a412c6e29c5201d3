"""Imports run one way, from scripts to common/, and never in a circle; only `main` imports fast/."""

import ast
import graphlib
import re
import sys

import pytest

from testbed import ALL, ROOT, SHIPPED

ROOMS = ("common", "fast")
PATHS = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
STEP = {  # {module of a step: project modules that it imports}
    "common.masked": set(),
    "common.answers": set(),
    "common.rewards": {"common.answers", "common.run"},
}
NEIGHBOURS = {"tools", "lab", "examples", "tests", "vectors"}  # not part of a step
ALGORITHMS = {"grpo", "gspo", "dapo", "dcpo", "ppo", "dpo"} | {*ALL} - {"reward_model"}


def imported(path):
    """Return the modules that a file imports, at its top or in a function; `from a import b` may mean a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def packages(names):
    """Return the first parts of module names, without the standard library."""
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


IMPORTS = {module: imported(path) for module, path in FILES.items()}
IN_ROOM = {room: [module for module in FILES if module.startswith(f"{room}.")] for room in ROOMS}


@pytest.mark.parametrize("module, needs", STEP.items())
def test_step_imports_only_torch(module, needs):
    assert packages(IMPORTS[module]) <= {"torch", "common"}
    assert IMPORTS[module] & FILES.keys() <= needs


@pytest.mark.parametrize("module", IN_ROOM["common"])
def test_common_imports_no_script(module):
    assert not packages(IMPORTS[module]) & {*ALL, *NEIGHBOURS, "fast"}


@pytest.mark.parametrize("module", IN_ROOM["fast"])
def test_fast_imports_only_common(module):
    assert packages(IMPORTS[module]) <= {"torch", "transformers", "accelerate", "common", "fast"}


@pytest.mark.parametrize("name", [name for name in ALL if name in SHIPPED])
def test_script_imports_its_step_first(name):
    path = ROOT / f"{name}.py"
    assert packages(imported(path)) <= {"torch", "transformers", "accelerate", "numpy", "common", "fast"}
    lines = path.read_text(encoding="utf-8").splitlines()
    step, rest = (lines.index(comment) for comment in ("# The step.", "# What runs it."))
    for number, line in enumerate(lines):
        match = re.match(r"from (common\S*) import", line)
        if match and match[1] != "common.pairs":  # its batches are of the step, its rows are not
            assert (step < number < rest) == (match[1] in STEP), line


def test_imports_have_no_circle():
    graph = {module: names & FILES.keys() for module, names in IMPORTS.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the files of a circle


def words_of_code(path):
    """Yield (line, word) for the parts of all names and strings in the code of a file, docstrings aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            texts = [node.value]
        else:
            fields = ("id", "attr", "name", "arg", "module")
            texts = [text for field in fields if isinstance(text := getattr(node, field, None), str)]
        for text in texts:
            for word in re.findall(r"[a-z]+", text.lower()):
                yield getattr(node, "lineno", 0), word


@pytest.mark.parametrize("module", IN_ROOM["common"])
def test_common_names_no_algorithm(module):
    """Scripts pass what only they need, so that a new algorithm needs no change there."""
    found = [(line, word) for line, word in words_of_code(FILES[module]) if word in ALGORITHMS]
    assert not found
