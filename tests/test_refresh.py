"""tools/refresh.py: what is due after a change, in one test; what a change asks for, in a copy and small families."""

import ast
import functools
import shutil

import pytest
import torch

import family
import refresh
from small_family import GRPO, OWN, small_family
from testbed import ALL, FAMILY, ROOT, SCRIPTS
from tree import Tree

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="docs/one_step.md is that of a CPU")


@functools.cache
def due():
    tree = Tree()
    return "\n".join(refresh.due(tree, by_hand(tree)))


def test_nothing_is_due():
    """The one test that compares texts of the project: copies, links, pages, tables, and what is written by hand."""
    assert due() == "", "run python tools/refresh.py; it ends with this list"


@pytest.mark.needs("pygments", "latex2mathml", "scipy")
def test_nothing_is_due_in_what_is_made_with_these_packages():
    """The same where they are: then the page side by side and the verdicts are compared too."""
    assert due() == "", "run python tools/refresh.py; it ends with this list"


def test_the_suites_know_scripts_as_the_table_does():
    """Without tools/ they go by the arguments of a function."""
    tree = Tree()
    assert [sorted(FAMILY), sorted(ALL)] == [sorted(family.names(tree, "groups")), sorted(family.names(tree))]
    assert sorted(SCRIPTS) == sorted(family.names(tree, "groups", "critic"))


def test_a_comment_in_a_shared_function_is_due_and_then_is_not(tmp_path):
    """In a copy: 23 tests were red, and still 17 after seven programs."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.jsonl", "*.safetensors", "node_modules")
    root = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    text = (root / "grpo.py").read_text(encoding="utf-8")
    line = "    objective = torch.minimum("
    assert text.count(line) == 1
    before = by_hand(Tree(root))  # while a new script lacks something there is more: one red test is enough
    (root / "grpo.py").write_text(text.replace(line, "    # the pessimistic one of both\n" + line), encoding="utf-8")
    tree = Tree(root)
    assert by_hand(tree) == before and {"dr_grpo.py", "dapo.py", "gspo.py", "docs/grpo.md"} <= tree.new.keys()
    tree.save()
    commented = {name for name, source in family.found(tree).items() if "# the pessimistic one of both" in source}
    assert {"grpo.py", "dr_grpo.py", "dapo.py", "gspo.py"} <= commented and "ppo.py" not in commented
    tree = Tree(root)
    assert by_hand(tree) == before and not tree.new


def by_hand(tree):
    """What a person has to write; pages that want a package which is not there stay as they are."""
    return [line for line in refresh.refresh(tree) if "pip install" not in line]


# --- a script is found by its presence, and what it lacks is named ---


@pytest.fixture
def small(tmp_path, monkeypatch):
    return lambda **changed: small_family(tmp_path, monkeypatch, **changed)


def test_scripts_are_found_in_the_order_of_the_table(small):
    tree = small(alpha_py=GRPO)
    assert list(family.found(tree)) == ["grpo.py", "copy.py", "own.py"]  # reward.py has no Args
    (tree.root / "alpha.py").write_text(GRPO, encoding="utf-8")
    assert list(family.found(tree)) == ["grpo.py", "copy.py", "own.py", "alpha.py"]
    assert family.names(tree, "groups") == ["grpo", "copy", "own", "alpha"] and family.names(tree, "critic") == []


def test_what_a_new_script_lacks_is_named(small):
    tree = small()
    assert refresh.members(tree) == []
    (tree.root / "mine.py").write_text(GRPO.replace("    A_i = R_i", "    w_i = R_i"), encoding="utf-8")
    assert refresh.members(tree) == [
        "mine.py: no entry in FAMILY of tools/family.py; its fields are explained there",
        "mine.py: no docs/mine.md",
        "mine.py: no tests/test_mine.py",
        "mine.py: no configs/mine-paper.yaml",
        'mine.py: its run has another name: Run(accelerator, args, "mine")',
        "mine.py: which function computes “w_i ...”? Name it under `equations` of its entry in tools/family.py: "
        "w_i = R_i - mean(R)                                        Eq. 1",
    ]
    family.FAMILY |= {"mine.py": family.Entry(equations={"w_i": "gone"}), "old.py": family.Entry(paper="Old.")}
    found = refresh.members(tree)
    assert found[:2] == ["mine.py: no `paper` in its entry in tools/family.py",
                         "mine.py: no `column` of 11 cells in its entry in tools/family.py"]  # fmt: skip
    assert "w_i" in found[-2] and found[-1] == "old.py: an entry in tools/family.py, and no script"


def test_a_metric_without_a_row_is_named(small):
    tree = small(own_py=OWN.replace('"optim/loss"', '"optim/new": 1, "no/metric": 2, f"optim/{own}": 3, "optim/loss"'))
    assert refresh.metrics(tree) == ["own.py: no row in docs/metrics.md for the metric `optim/new`"]


def test_rows_of_the_tables_are_written(small):
    tree = small()
    (tree.root / "docs" / "new.md").write_text("A page.\n", encoding="utf-8")
    assert refresh.rows(tree) == ["docs/README.md: no link to new.md"]
    table = [line for line in tree.read("docs/algorithms.md").splitlines() if line.startswith("|")]
    heads = [f"[`{name}.py`](../{name}.py) · [details]({name}.md)" for name in ("grpo", "copy", "own")]
    assert table[:2] == [f"|  | {' | '.join(heads)} |", "| --- | --- | --- | --- |"]
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| **{row}**" for row in family.ROWS]
    assert "| **clip** | 0.2 | 0.2 | 0.2 / 10 |" in table
    assert tree.read("docs/algorithms.md").endswith("\n\nEnd.\n")
    readme = tree.read("README.md")
    assert "| [grpo.py](grpo.py) | A | r | w |\n| [copy.py](copy.py) | as GRPO | token, 0.2 | 1 / G |\n" in readme
    assert tree.read("docs/README.md").endswith("- [grpo.py](grpo.md)\n- [copy.py](copy.md).\n- [own.py](own.md).\n")
    tree.save()
    assert refresh.rows(tree) == ["docs/README.md: no link to new.md"] and not tree.new


# --- nothing that runs uses the tools or the laboratory ---


def test_nothing_that_runs_imports_the_tools():
    patterns = ("*.py", "common/**/*.py", "benchmarks/*.py", "examples/*.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    theirs = {path.stem for folder in ("tools", "lab") for path in ROOT.glob(f"{folder}/*.py")} | {"tools", "lab"}
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        used = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        used += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        assert not {name.split(".")[0] for name in used} & theirs, file.name
    assert [path.name for path in (ROOT / "docs").rglob("*") if path.suffix in (".py", ".jsonl", ".js")] == []
