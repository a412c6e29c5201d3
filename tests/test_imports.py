"""Imports run one way: from scripts to common/ and fast/, never back and never in a circle."""

import ast
import graphlib

from testbed import ALL, ROOT

ABOVE = {*ALL, "tools", "lab", "examples", "tests"}  # what common/ must not need


def imported(path):
    """The modules that a file imports, at its top or in a function: `from a import b` may be a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FOLDERS = ("common", "fast")
PATHS = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
IMPORTS = {module: imported(path) for module, path in FILES.items()}


def test_no_arrow_goes_up():
    """`tools` is reached by one line of the parser, for the hints, where that folder is there."""
    for module, names in IMPORTS.items():
        names = names - {"tools.names", "tools.names.hints"} if module == "harness.args" else names
        assert not ABOVE & {name.partition(".")[0] for name in names}, module


def test_common_reaches_fast_in_one_place():
    """So that a fork can delete the folder."""
    names = [name for name in IMPORTS if name.startswith("common.")]
    users = [module for module in names if any(name.startswith("fast.") for name in IMPORTS[module])]
    assert set(users) <= {"harness.loading"}


def test_no_file_imports_itself_by_way_of_others():
    graph = {module: names & FILES.keys() for module, names in IMPORTS.items()}
    graph["harness.loading"].discard("fast.shortcuts")  # the one door, which it opens as a model is loaded
    graphlib.TopologicalSorter(graph).prepare()  # a circle is a CycleError that names its files
