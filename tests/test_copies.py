"""A fork copies some files: a script runs with only common/, and its test with only its helpers."""

import ast
import re
import shutil

import pytest

from processes import run_processes
from small_run import same_run
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


def with_fast(names):
    """Each script without fast/; grpo.py --fast too, where that is here."""
    return [(name, ()) for name in names] + [("grpo", ("fast",))] * (ROOT / "fast").is_dir()


@pytest.mark.parametrize("name, more", with_fast(ALL))
def test_a_script_and_common_are_enough(name, more, tmp_path):
    """It trains, evaluates and saves; it resumes bit-exact after a kill; an unknown option prints one line."""
    copy(tmp_path, f"{name}.py", "common", *more)
    words = [f"--{folder}" for folder in more]
    result = run_processes(COPIED, "run", tmp_path, f"{name}.py", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (error,) = re.findall(rf"^{name}\.py: error: (.*)$", result.stderr, re.MULTILINE)
    assert error.startswith("unknown option --num_generations")
    same_run(tmp_path / "straight", tmp_path / "killed")
    rows = metric_rows(tmp_path / "killed")
    assert [row["step"] for row in rows if any(key.startswith("optim/") for key in row)] == [1, 2]
    assert any(key.startswith("eval/") for row in rows for key in row)


def named(path, found=()):
    """Return a file of tests/, the helpers that it imports, and those that they import."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    found = {*found, path}
    for helper in [f"tests/helpers/{name}.py" for name in names if name]:
        if (ROOT / helper).is_file() and helper not in found:
            found |= named(helper, found)
    return found


def test_script_tests_pass_in_a_fork(tmp_path):
    helpers = named("tests/test_grpo.py") | named("tests/conftest.py")
    copy(tmp_path, "grpo.py", "common", "pyproject.toml", *sorted(helpers))
    result = run_processes(COPIED, "test", tmp_path, "tests/test_grpo.py", cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"^[1-9]\d* passed", result.stdout, re.MULTILINE), result.stdout[-300:]


@pytest.mark.beside("docs")
def test_copied_files_are_enough(tmp_path):
    """docs/fork.md: its command, its folders for the tests, its three steps. Collection failed without some page."""
    page = (ROOT / "docs/fork.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"cp -r (.*) \.\./mine && cd", page)
    (folders,) = re.findall(r"^Add .*, and (.*?) for the tests", page, re.MULTILINE)
    copy(tmp_path, *command.split(), *re.findall("`(.*?)`", folders))
    (script, own) = re.search(r"^cp (\S+) (\S+)  +# 1. copy$", page, re.MULTILINE).groups()
    shutil.copy(tmp_path / script, tmp_path / own)
    assert f"\npytest --script {own}  " in page
    result = run_processes(COPIED, "test", tmp_path, "--script", own, "-k", FAST, cwd=tmp_path)
    passed = re.search(r"^(\d+) passed, \d+ skipped, \d+ deselected", result.stdout, re.MULTILINE)
    assert result.returncode == 0 and passed and int(passed[1]) >= 10, result.stdout[-3000:]


FILES = ("test_invariances.py", "test_pair_suite.py", "test_suite.py", "test_vectors.py")
FAST = "bad_input or answer_the_cases or first_ratio or valid_tokens or before_the_step"


@pytest.mark.beside("examples", "vectors")
def test_suites_pass_under_other_names(tmp_path):
    """The fast half of what `pytest --script` runs: no test depends on the name of a script."""
    copy(tmp_path, "conftest.py", "pyproject.toml", "common", "tests", "examples", "vectors")
    words = []
    for name in ALL:
        shutil.copy(ROOT / f"{name}.py", tmp_path / f"own_{name}.py")
        words += ["--script", f"own_{name}.py"]
    files = [f"tests/{file}" for file in FILES]
    chosen = f"{FAST} or invariant and micro_batches and not tokens"
    result = run_processes(COPIED, "test", tmp_path, *words, *files, "-k", chosen, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    passed = re.search(r"^(\d+) passed, .*\d+ deselected", result.stdout, re.MULTILINE)
    assert passed and int(passed[1]) >= 12 * len(ALL), result.stdout[-300:]
