"""common/ stays thin: lines that a script loads, lines of all of it, and characters a line."""

import json
import pathlib

import pytest

from processes import run_processes
from testbed import ROOT

LOADED = {"grpo": 3200, "ppo": 3400, "dpo": 3400, "reward_model": 3400}  # the most lines of common/ in a step
ALL = 3500
FILES = [path for path in sorted((ROOT / "common").rglob("*.py")) if path.name != "build.py"]


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def by_size(paths):
    """The number of lines of these files together, and the files with theirs, the longest first."""
    sizes = {str(path.relative_to(ROOT)): len(lines(path)) for path in paths}
    return sum(sizes.values()), [f"{size:4} {name}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])]


def refuse_more(paths, most, what):
    total, files = by_size(paths)
    assert total <= most, "\n".join([f"{what}: {total} lines of common/, at most {most}", *files])


@pytest.mark.parametrize("name", [name for name in LOADED if (ROOT / f"{name}.py").is_file()])
def test_a_step_without_options_loads_few_lines(name, tmp_path):
    result = run_processes("tests/helpers/copied.py", "load", ROOT, f"{name}.py", tmp_path)
    assert result.returncode == 0, result.stderr
    loaded = [pathlib.Path(path) for path in json.loads((tmp_path / "loaded.json").read_text(encoding="utf-8"))]
    assert ROOT / "common" / "policy.py" in loaded or name == "reward_model"
    refuse_more(loaded, LOADED[name], f"{name}.py has loaded")


def test_all_of_common_is_small():
    refuse_more(FILES, ALL, "all but the two build.py")


def test_it_is_not_small_print():
    """Fewer things, not longer lines; a line has at most 120 characters, which ruff holds."""
    text = [line for path in FILES for line in lines(path)]
    average = sum(map(len, text)) / len(text)
    dense = sorted(FILES, key=lambda path: -sum(map(len, lines(path))) / max(1, len(lines(path))))
    worst = [f"{sum(map(len, lines(path))) / len(lines(path)):4.1f} {path.relative_to(ROOT)}" for path in dense[:8]]
    assert average <= 55, "\n".join([f"{average:.1f} characters a line on average, at most 55", *worst])
