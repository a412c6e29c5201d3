"""Imports run one way: from scripts to common/harness/, from there to common/, never in a circle."""

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


FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.glob("common/**/*.py")}
IMPORTS = {module: imported(path) for module, path in FILES.items()}


def test_no_arrow_goes_up():
    for module, names in IMPORTS.items():
        assert not ABOVE & {name.partition(".")[0] for name in names}, module
        if not module.startswith("common."):
            assert not [name for name in names if name.startswith("common.harness")], module


def test_no_file_imports_itself_by_way_of_others():
    graph = {module: names & FILES.keys() for module, names in IMPORTS.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a circle is a CycleError that names its files
