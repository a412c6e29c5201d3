"""tools/same_text.py: what drifts is seen, copies are made from what changed, and comments count nowhere."""

import subprocess

import pytest

import family
import same_text
from small_family import COPY, ENTRIES, GRPO, OWN, small_family

SOURCES = {"grpo.py": GRPO, "copy.py": COPY, "own.py": OWN}
COMMENT = "    # a better comment\n"


@pytest.fixture(autouse=True)
def entries(monkeypatch):
    monkeypatch.setattr(family, "FAMILY", dict(ENTRIES))


def changed(old, new, *scripts, sources=SOURCES):
    assert all(sources[script].count(old) == 1 for script in scripts)
    return sources | {script: sources[script].replace(old, new) for script in scripts}


def test_a_family_without_a_fault_passes():
    assert same_text.problems(SOURCES) == [] and same_text.copied(SOURCES, SOURCES) == (SOURCES, [])


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("The loss of each token", "The loss of a token", "policy_loss is not the text of grpo.py (-1 +1): say why"),
        ("@functools.cache\n", "", "compute_advantages is not the text of grpo.py (-1 +0)"),
        ("import time\n", "from common import time\n", "time is imported otherwise than in grpo.py"),
        ("    group_size: int = ", "    group_size: float = ", "the options of grpo.py are not all there"),
        ("    clip: float", "    clips: float", "the options of grpo.py are not all there"),
        (
            "    clip: float",
            "    late: int = option(1, '')\n    clip: float",
            "its own options (late) must follow std_eps",
        ),
        ("    batch = {", "    a = 1\n    b = 1\n    batch = {", "main differs from grpo.py by 4 lines, allowed are 2"),
        ("mask / args.group_size  # a constant", "mask / mask.sum()", "token_weights is the text of grpo.py: take it"),
        ("def token_weights", "def weights", "there is no token_weights: take it out of `differs`"),
    ],
)
def test_a_drifted_copy_is_seen(old, new, message):
    assert any(f"copy.py: {message}" in line for line in same_text.problems(changed(old, new, "copy.py")))


def test_a_method_of_args_has_one_text():
    clip, methods = "    clip: float = ", "    def check(self):\n        # first\n        return {}\n\n".format
    both = changed(clip, methods(1) + clip, "copy.py", sources=changed(clip, methods(2) + clip, "own.py"))
    message = "own.py: Args.check is not the text of copy.py"
    assert message in same_text.problems(both)
    equal = both | {"own.py": both["own.py"].replace("# first\n        return 2", "return 1")}
    assert equal["own.py"] != both["own.py"] and not any("Args.check" in line for line in same_text.problems(equal))
    mine = both | {"mine.py": both["own.py"], "own.py": OWN}
    assert not any("Args.check" in line for line in same_text.problems(mine))


def test_a_budget_counts_code_and_neither_docstring_nor_help_nor_comments(monkeypatch):
    base = same_text.bare(GRPO)
    other = GRPO.replace("a small one", "another").replace("completions of a prompt, G", "G")
    other = other.replace("    ratio = (", COMMENT + "    ratio = (").replace("    # the pessimistic one\n", "")
    assert other != GRPO and same_text.changes(base, same_text.bare(other)) == (0, 0, 0)
    other = other.replace("group_size: int = option(8", "group_size: int = option(16") + "\nEND = 1\n"
    assert same_text.changes(base, same_text.bare(other)) == (1, 3, 2)
    monkeypatch.setattr(family.FAMILY["own.py"], "budget", (0, 1, 1))
    (line,) = same_text.problems(SOURCES)
    assert line == "own.py: lines removed, added, hunks are (1, 3, 3), the budget is (0, 1, 1)"


# --- copies ---


@pytest.mark.parametrize("with_git", [True, False])
def test_a_comment_goes_into_copies_and_to_where_the_lines_around_it_are_equal(with_git):
    """Into copy.py as into own.py, whose `policy_loss` may differ; not where its own line stands in between."""
    base = SOURCES if with_git else {}
    for line, copies in (("    ratio = (", 3), ("    objective = min(", 2)):
        fixed, found = same_text.copied(changed(line, COMMENT + line, "grpo.py"), base)
        assert found == [] and [COMMENT in fixed[script] for script in SOURCES] == [True, True, copies == 3]
        assert same_text.problems(fixed) == [] and same_text.copied(fixed, base) == (fixed, [])


def test_a_comment_that_goes_goes_everywhere():
    fixed, _ = same_text.copied(changed("    # the pessimistic one\n", "", "grpo.py"), SOURCES)
    assert not any("pessimistic" in source for source in fixed.values())
    fixed, _ = same_text.copied(changed("# Above a function.\n", "# Before it.\n", "grpo.py"), SOURCES)
    assert all("# Before it." in source and "# Above" not in source for source in fixed.values())


def test_what_changed_since_the_last_commit_is_the_new_text():
    """Wherever it was changed; and a text that is nobody's copy stays."""
    code = "    return rewards - mean(rewards)"
    fixed, found = same_text.copied(changed(code, code + " / 2", "own.py"), SOURCES)
    assert found == [] and all(source.count(code + " / 2") == 1 for source in fixed.values())
    mine = SOURCES | {"mine.py": GRPO.replace(code, "    return 0")}
    fixed, found = same_text.copied(mine, SOURCES)
    assert fixed == mine and found == []
    assert any(line.startswith("mine.py: compute_advantages is not") for line in same_text.problems(mine))
    drifted = changed(code, "    return 0", "own.py")
    assert same_text.copied(drifted, drifted) == (drifted, [])
    # Of a script without an entry nothing is copied, and nothing into it, whether it is in the last commit or not.
    edit = changed(code, code + " / 2", "mine.py", sources=SOURCES | {"mine.py": GRPO})
    noted = changed("    ratio = (", COMMENT + "    ratio = (", "mine.py", sources=SOURCES | {"mine.py": GRPO})
    for own, base in ((edit, SOURCES | {"mine.py": GRPO}), (noted, SOURCES), (noted, {})):
        assert same_text.copied(own, base) == (own, [])
    both = changed(code, code + " / 3", "copy.py", sources=changed(code, code + " / 2", "own.py"))
    fixed, found = same_text.copied(both, SOURCES)
    assert fixed == both and found == ["compute_advantages has different new texts in copy.py, own.py: make them one"]
    fixed, found = same_text.copied(changed(code, code + " / 2", "grpo.py"), {})  # without git: the copies agree
    assert all(code + " / 2" in source for source in fixed.values())


def test_fix_rewrites_copies_and_leaves_what_may_differ():
    assert same_text.fix("grpo.py", SOURCES) == SOURCES
    broken = changed("    clipped = ratio", "    drifted = 1\n    clipped = ratio", "copy.py", "own.py")
    fixed = same_text.fix("grpo.py", broken)
    assert fixed["copy.py"] == COPY and fixed["own.py"] == broken["own.py"]
    assert same_text.fix("grpo.py", SOURCES | {"mine.py": COPY}) == SOURCES
    mine = SOURCES | {"mine.py": GRPO.replace("    return rewards - mean(rewards)", "    return 0")}
    assert not any("--fix" in line for line in same_text.problems(mine))


def test_the_last_commit_is_read_from_git(tmp_path, monkeypatch):
    tree = small_family(tmp_path, monkeypatch)
    assert same_text.committed(tree) == {}  # no git
    for words in ("init -q", "add .", "-c user.name=a -c user.email=b commit -qm one"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    (tmp_path / "grpo.py").write_text(GRPO + "# more\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text(GRPO, encoding="utf-8")
    assert same_text.committed(tree) == SOURCES
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert same_text.committed(tree) == {}
