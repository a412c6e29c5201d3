"""Imports run one way: from scripts to harness/ to common/, with fast/ behind one door, and never in a circle."""

import ast
import graphlib
import re
import sys

import pytest

from testbed import ALL, ROOT, SHIPPED

ROOMS = ("common", "harness", "fast")
PATHS = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
NEIGHBOURS = {"tools", "lab", "examples", "tests", "vectors"}  # beside the path of a step
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


@pytest.mark.parametrize("module", IN_ROOM["common"])
def test_common_needs_torch_transformers_numpy_and_itself(module):
    assert packages(IMPORTS[module]) <= {"torch", "transformers", "numpy", "common"}


@pytest.mark.parametrize("module", IN_ROOM["harness"])
def test_harness_needs_common_and_no_script_or_neighbour(module):
    """One line of the parser reaches tools/ for its hints, and one line of the loader reaches fast/, if they exist."""
    doors = {"harness.args": {"tools.names", "tools.names.hints"}}
    doors["harness.loading"] = {"fast.shortcuts", "fast.shortcuts.find_shortcuts"}
    used = packages(IMPORTS[module] - doors.get(module, set()))
    assert not used & {*ALL, *NEIGHBOURS, "fast"}


@pytest.mark.parametrize("module", IN_ROOM["fast"])
def test_fast_needs_common_and_the_errors_of_harness(module):
    assert packages(IMPORTS[module]) <= {"torch", "transformers", "common", "fast", "harness"}
    ours = {name for name in IMPORTS[module] & FILES.keys() if name.startswith("harness.")}
    assert ours <= {"harness.errors"}


@pytest.mark.parametrize("name", [name for name in ALL if name in SHIPPED])
def test_a_script_needs_common_and_harness_in_two_blocks(name):
    path = ROOT / f"{name}.py"
    assert packages(imported(path)) <= {"torch", "transformers", "accelerate", "numpy", "common", "harness"}
    block = None
    for line in path.read_text(encoding="utf-8").splitlines():
        block = {"# The algorithm.": "common", "# What runs it.": "harness"}.get(line, block)
        if match := re.match(r"from (common|harness)\.", line):
            assert match[1] == block, line


def test_no_file_imports_itself_by_way_of_others():
    graph = {module: names & FILES.keys() for module, names in IMPORTS.items()}
    graph["harness.loading"].discard("fast.shortcuts")  # imported when a model is loaded
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


@pytest.mark.parametrize("module", [*IN_ROOM["common"], *IN_ROOM["harness"]])
def test_no_file_of_common_and_harness_knows_an_algorithm_by_name(module):
    """A script passes whatever it alone needs, so that another algorithm needs no change there."""
    found = [(line, word) for line, word in words_of_code(FILES[module]) if word in ALGORITHMS]
    assert not found
