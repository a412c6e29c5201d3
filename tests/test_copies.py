"""A fork is a copy of some files: each script runs with common/ alone, and its test with the helpers that it names."""

import ast
import json
import re
import shutil

import pytest

from processes import run_processes
from testbed import ALL, ROOT, metric_rows

COPIED = "tests/helpers/copied.py"


def copy(folder, *paths):
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, target)


@pytest.mark.parametrize("name", ALL)
def test_a_script_and_common_run_in_an_empty_folder(name, tmp_path):
    """It trains, evaluates, saves and resumes, and says in one line what it lacks."""
    copy(tmp_path, f"{name}.py", "common")
    result = run_processes(COPIED, "run", tmp_path, f"{name}.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    errors = re.findall(rf"^{name}\.py: error: (.*)$", result.stderr, re.MULTILINE)
    assert errors == [
        "unknown option --num_generations (--help lists the options)",
        "--dry_run needs tools/ (beside the script)",
    ]
    rows = metric_rows(tmp_path / "run")
    assert [row["step"] for row in rows if any(key.startswith("optim/") for key in row)] == [1, 2]
    assert any(key.startswith("eval/") for row in rows for key in row)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert f"tags: [{name}]" in card and f"{name}.py --" in card and len(card.splitlines()) <= 9
    assert json.loads((tmp_path / "run" / "args.json").read_text(encoding="utf-8"))["max_steps"] == 2


def named(path, found=()):
    """A file of tests/ and the helpers that it imports, with those that they import."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    found = {*found, path}
    for helper in [f"tests/helpers/{name}.py" for name in names if name]:
        if (ROOT / helper).is_file() and helper not in found:
            found |= named(helper, found)
    return found


# Those of dapo.py that start whole runs take ten seconds; the test above has such runs.
@pytest.mark.parametrize(
    "name, selected", [("grpo", ""), ("dapo", "not processes and not run and not by_reward and not skipped_steps")]
)
def test_the_tests_of_a_script_pass_beside_it_alone(name, selected, tmp_path):
    helpers = named(f"tests/test_{name}.py") | named("tests/conftest.py")
    if "tests/helpers/processes.py" in helpers:
        helpers |= named("tests/helpers/preload.py")
    copy(tmp_path, f"{name}.py", "common", "pyproject.toml", "tests/oracles.json", *sorted(helpers))
    result = run_processes(COPIED, "test", tmp_path, "-k", selected, f"tests/test_{name}.py", cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"^[4-9]\d passed", result.stdout, re.MULTILINE), result.stdout[-300:]
