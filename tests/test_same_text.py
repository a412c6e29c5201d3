"""tools/same_text.py: the scripts share what they may, and what differs is named or copied."""

import pytest

import same_text

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
THIRD = GRPO.replace('"grpo"', '"third"').replace("GRPO", "Third")
SOURCES = {"grpo.py": GRPO, "copy.py": COPY, "third.py": THIRD, "mine.py": COPY}


@pytest.fixture
def small(monkeypatch):
    """The scripts above; `mine.py` is not in the table."""
    table = {"grpo.py": {}, "third.py": {}, "copy.py": {"policy_loss": "the square"}}
    monkeypatch.setattr(same_text, "DIFFERS", table)


def changed(script, old, new):
    assert SOURCES[script].count(old) == 1
    return SOURCES | {script: SOURCES[script].replace(old, new)}


def test_the_scripts_share_one_text():
    found = same_text.problems(same_text.found())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "script, old, new, sentence",
    [
        ("third.py", "loss of each", "loss of a", "policy_loss differs between third.py and grpo.py: "),
        ("copy.py", 'Run("copy")', 'Run("grpo")', "main differs between copy.py and grpo.py: "),
        ("copy.py", "    ratio = ratio**2\n", "", "policy_loss of copy.py equals that of grpo.py: take it out of"),
        ("copy.py", "def policy_loss", "def loss", "copy.py has no policy_loss: take it out of DIFFERS"),
        ("third.py", "group_size: int", "group_size: float", "third.py: give the options that grpo.py has too"),
    ],
)
def test_what_drifted_is_named(small, script, old, new, sentence):
    assert same_text.problems(SOURCES) == []
    (found,) = same_text.problems(changed(script, old, new))
    assert found.startswith(sentence)


def test_fix_writes_the_copies_and_leaves_what_differs_and_what_is_your_own(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(same_text, "ROOT", tmp_path)
    new = GRPO.replace("# Above", "def new():\n    pass\n\n\n# Above")
    new = new.replace("rewards - mean", "mean").replace("loss of each", "loss of a").replace("run =", "ran =")
    sources = SOURCES | {"grpo.py": new}
    monkeypatch.setattr(same_text, "found", lambda: dict(sources))
    for script, source in sources.items():
        (tmp_path / script).write_text(source, encoding="utf-8")
    assert same_text.main([]) == 1
    assert same_text.main(["--fix", "grpo.py"]) == 0
    assert "Copied from grpo.py into copy.py, third.py." in capsys.readouterr().out
    texts = {script: (tmp_path / script).read_text(encoding="utf-8") for script in sources}
    copied = {"rewards - mean": "mean", "run =": "ran ="}
    for old, right in (copied | {"loss of each": "loss of a"}).items():
        assert right in texts["third.py"] and old not in texts["third.py"]
    expected = COPY
    for old, right in copied.items():
        expected = expected.replace(old, right)
    assert texts["copy.py"] == expected
    assert texts["mine.py"] == COPY
    assert 'Run("third")' in texts["third.py"]
    for wrong in (["--fix"], ["--fix", "mine.py"], ["grpo.py"]):
        with pytest.raises(SystemExit):
            same_text.main(wrong)
