"""The scripts share one text where they may, and what tools/same_text.py says and writes where they do not."""

import ast
import re

import pytest

import family
import same_text
import side_by_side
from testbed import ROOT

GRPO = '''"""GRPO."""
import functools


@dataclass
class Args:
    group_size: int = option(8, "completions of a prompt, G")
    clip: float = option(0.2, "the ratio is clipped at 1 - this")


@functools.cache
def compute_advantages(rewards, args):
    return rewards - mean(rewards)


# Above a function.
def policy_loss(ratio, advantages, args):
    """The loss of each token."""
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    return -min(ratio * advantages, clipped * advantages)


def main(argv=None):
    run = Run("grpo")


if __name__ == "__main__":
    main()
'''
COPY = GRPO.replace("clipped = ratio", "ratio = ratio**2\n    clipped = ratio").replace('"grpo"', '"copy"')
SOURCES = {"grpo.py": GRPO, "copy.py": COPY, "third.py": GRPO.replace('"grpo"', '"third"'), "mine.py": COPY}


@pytest.fixture
def small(monkeypatch):
    """The scripts above; `mine.py` is not in the table."""
    table = {"grpo.py": family.Entry(), "third.py": family.Entry(differs={"main": "its name"})}
    table["copy.py"] = family.Entry(differs={"policy_loss": "the square", "main": "its name"})
    monkeypatch.setattr(family, "FAMILY", table)


def changed(script, old, new):
    assert SOURCES[script].count(old) == 1
    return SOURCES | {script: SOURCES[script].replace(old, new)}


def test_the_scripts_share_one_text():
    found = same_text.problems(family.found())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "script, old, new, sentence",
    [
        ("grpo.py", "    return rewards", "    # new\n    return rewards", "compute_advantages has another text in "
         "copy.py, third.py than in grpo.py. If that of grpo.py is the new one: python tools/same_text.py --fix "),
        ("third.py", "loss of each", "loss of a", "policy_loss has another text in third.py than in grpo.py."),
        ("third.py", "# Above a", "# Over a", "policy_loss has another text in third.py than in grpo.py."),
        ("third.py", "@functools.cache\n", "", "compute_advantages has another text in third.py than in grpo.py."),
        ("copy.py", "    ratio = ratio**2\n", "", "policy_loss of copy.py is that of grpo.py: take it out of"),
        ("copy.py", "def main", "def start", "copy.py has no main: take it out of `differs`"),
        ("third.py", "group_size: int", "group_size: float", "third.py: `Args` must have the options of grpo.py"),
    ],
)  # fmt: skip
def test_what_drifted_is_said_in_a_sentence(small, script, old, new, sentence):
    assert same_text.problems(SOURCES) == []
    (found,) = same_text.problems(changed(script, old, new))
    assert found.startswith(sentence)


def test_fix_writes_the_copies_and_leaves_what_differs_and_what_is_your_own(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(family, "ROOT", tmp_path)
    sources = changed("grpo.py", "# Above", "def new():\n    pass\n\n\n# Above")
    sources = {
        name: text.replace("rewards - mean", "mean" if name == "grpo.py" else "-mean") for name, text in sources.items()
    }
    sources["grpo.py"] = sources["grpo.py"].replace("loss of each", "loss of a")
    monkeypatch.setattr(family, "found", lambda: dict(sources))
    for script, source in sources.items():
        (tmp_path / script).write_text(source, encoding="utf-8")
    assert same_text.main([]) == 1
    assert same_text.main(["--fix", "grpo.py"]) == 0
    assert capsys.readouterr().out.endswith(
        "Copied from grpo.py into copy.py, third.py.\nEvery function that scripts share has one text.\n"
    )
    texts = {script: (tmp_path / script).read_text(encoding="utf-8") for script in sources}
    assert texts["third.py"] == sources["third.py"].replace("-mean", "mean").replace("loss of each", "loss of a")
    assert texts["copy.py"] == sources["copy.py"].replace("-mean", "mean") and texts["mine.py"] == sources["mine.py"]
    for wrong in (["--fix"], ["--fix", "mine.py"], ["grpo.py"]):
        with pytest.raises(SystemExit):
            same_text.main(wrong)


def test_the_lines_of_the_readme_are_still_in_the_scripts():
    """Of its excerpt of a diff: code, and options without their help texts."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ((old, new, excerpt),) = re.findall(r"^diff (\w+\.py) (\w+\.py).*\n((?:[-+@].*\n)+)", text, re.MULTILINE)
    sides = {
        sign: {line for _, line in side_by_side.without_help(family.found()[name])}
        for sign, name in (("-", old), ("+", new))
    }
    lines = [line for line in excerpt.splitlines() if line[0] in sides]
    assert len(lines) > 10
    for line in lines:
        assert line[1:] in sides[line[0]], f"README.md shows a line that is no longer in the script: {line}"


def test_nothing_that_runs_imports_the_tools():
    theirs = {path.stem for folder in ("tools", "lab") for path in ROOT.glob(f"{folder}/*.py")} | {"tools", "lab"}
    for pattern in ("*.py", "common/**/*.py", "examples/*.py"):
        for file in ROOT.glob(pattern):
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            used = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
            used += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
            assert not {name.split(".")[0] for name in used} & theirs, file.name
