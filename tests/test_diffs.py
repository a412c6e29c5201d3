"""tools/diffs.py: the hunks make the scripts out of grpo.py, and none keeps a sentence that was not meant for it."""

import collections
import copy

import pytest

import diffs
import family
import same_text
from small_family import COPY, ENTRIES, GRPO, OWN
from tree import Tree

SOURCES = {"grpo.py": GRPO, "copy.py": COPY, "own.py": OWN}


@pytest.fixture
def sentences(monkeypatch):
    """One for each hunk."""
    monkeypatch.setattr(family, "FAMILY", copy.deepcopy(ENTRIES))
    return {
        script: {key: f"Why {key}." for _, key, _ in diffs.hunks(GRPO, SOURCES[script])}
        for script in ("copy.py", "own.py")
    }


def changed(old, new, script="own.py"):
    assert SOURCES[script].count(old) == 1
    return SOURCES | {script: SOURCES[script].replace(old, new)}


@pytest.mark.parametrize("script", ["copy.py", "own.py"])
def test_the_hunks_make_the_script_out_of_grpo(script):
    grpo, own = (collections.Counter(filter(None, same_text.bare(SOURCES[name]))) for name in ("grpo.py", script))
    for _, _, lines in diffs.hunks(GRPO, SOURCES[script]):
        grpo.update(line[2:] for line in lines if line.startswith("+ "))
        grpo.subtract(line[2:] for line in lines if line.startswith("- "))
    assert {line: n for line, n in grpo.items() if n} == own


@pytest.mark.parametrize(
    "old, new, missing, left",
    [
        # a hunk that changes needs its sentence read again
        ("clamp(max=args.cap)", "clamp(max=2)", 1, 1),
        ("cap: float = option(10.0", "cap: float = option(11.0", 1, 1),
        # a new one needs a sentence
        ("    ratio = (", "    more = 1\n    ratio = (", 1, 1),  # here as part of another hunk
        ("def token_weights(", "def one_more():\n    pass\n\n\ndef token_weights(", 1, 0),
        ("import time\n", "import math\nimport time\n", 1, 0),
        # one that is gone leaves a sentence over
        ('    cap: float = option(10.0, "the cap")\n', "", 0, 1),
        # what is not shown, or only moves, or is only a comment, needs nothing
        ('"the cap"', '"the most"', 0, 0),
        ("OWN: its ratio", "OWN: the ratio", 0, 0),
        ("    ratio = (", "    # by logs\n    ratio = (", 0, 0),
        ("    clipped = clipped.clamp", "    # capped\n    clipped = clipped.clamp", 0, 0),
        ("    # the pessimistic one\n", "", 0, 0),
    ],
)
def test_sentences_are_missing_and_left_over_as_the_code_changes(sentences, old, new, missing, left):
    _, found = diffs.build(changed(old, new), sentences)
    assert all(line.startswith("own.py: no ") and "tools/family.py" in line for line in found)
    assert sum("no sentence for" in line for line in found) == missing
    assert sum("no hunk for the sentence" in line for line in found) == left


def test_a_change_of_grpo_and_its_copies_asks_for_nothing(sentences):
    line = "    return rewards - mean(rewards)\n"
    sources = {script: source.replace(line, "    first = 1\n" + line) for script, source in SOURCES.items()}
    assert sources["own.py"] != OWN and diffs.build(sources, sentences)[1] == []


def test_the_page_has_each_hunk_after_its_sentence(sentences):
    page, found = diffs.build(changed("def token_weights(", "def weights("), sentences)
    _, own = page.split("\n## copy.py")[1].split("\n## own.py")
    assert "OWN has a cap." in own and "1 lines removed, 3 added" not in own
    (key,) = [key for key in sentences["own.py"] if key.startswith("policy_loss")]
    hunk = own.split(f"Why {key}.\n\n```diff\n")[1].split("```")[0].splitlines()
    assert hunk == [
        "      clipped = ratio.clamp(1 - args.clip, 1 + args.clip)",
        "+     clipped = clipped.clamp(max=args.cap)",
        "      objective = min(ratio * advantages, clipped * advantages)",
    ]
    (key,) = [key for key in sentences["own.py"] if key.startswith("Args")]
    assert f"### own.py: Args\n\n- `cap 10.0`: Why {key}.\n\n###" in own
    assert "### Gone from own.py\n\n- `token_weights`:" in own and "- def token_weights" not in own
    assert len(found) == 2  # `weights` is new, and `token_weights` gone
    assert "### copy.py: token_weights" in page and '"copy")' not in page  # its name alone


def test_pairs_and_a_critic_are_left_to_the_page_side_by_side(sentences):
    family.FAMILY["own.py"].kind = "pairs"
    page, found = diffs.build(SOURCES, sentences)
    assert "## own.py" not in page and "`own.py` are programs of their own" in page and found == []
    assert len(diffs.build(SOURCES, {})[1]) == sum(map(len, sentences.values()))  # it needs its sentences all the same


def test_docstrings_are_shown_of_new_functions_alone(sentences):
    new = '''def mine():
    """A new one."""
    return 1


def policy_loss('''
    source = OWN.replace("def policy_loss(", new).replace("The loss of each token.", "Another text.")
    page = diffs.section("own.py", GRPO, source, {})
    assert '+     """A new one."""' in page and "Another text" not in "\n".join(page)
    assert "+     clipped = clipped.clamp(max=args.cap)" in page


def test_a_hunk_has_one_line_of_context():
    lines = ["  a", "  b", "- c", "  d", "  e", "  f", "+ g", "  h", "  i"]
    assert diffs.shown(lines) == ["  b", "- c", "  d", "@@", "  f", "+ g", "  h"]
    assert diffs.shown(lines[2:4] + lines[5:7]) == ["- c", "  d", "  f", "+ g"] and diffs.shown(["+ a"]) == ["+ a"]
    args = ["-     kl: float = option(0.04)", "+     kl: float = option(0.0)", "+     top: str = option('all')"]
    assert diffs.options(args) == "`kl 0.04 -> 0.0`, `top all`"


def test_a_readme_shows_all_code_that_makes_one_script_of_another(tmp_path, monkeypatch):
    """Worked by hand: places, counts, no docstring; other blocks stay."""
    copy = COPY.replace("The loss of each token.", "Another text.\n\n    Of two paragraphs.\n    ")
    assert copy != COPY
    monkeypatch.setattr(family, "found", lambda tree: {"grpo.py": GRPO, "copy.py": copy})
    (tmp_path / "docs").mkdir()
    page = "```diff\n{}```\n\n```diff\n- 1\n+ 2\n```\n"
    for readme in ("README.md", "README.zh.md"):
        (tmp_path / readme).write_text(page.format("diff grpo.py copy.py    # old\n- x\n"), encoding="utf-8")
    tree = Tree(tmp_path)
    diffs.refresh(tree)
    shown = [
        "diff grpo.py copy.py    # 2 lines removed, 2 added",
        "@@ token_weights",
        "-    return mask / mask.sum()",
        "+    return mask / args.group_size  # a constant",
        "@@ main",
        '-    run = Run(accelerator, args, "grpo")',
        '+    run = Run(accelerator, args, "copy")',
    ]
    assert tree.read("README.md") == tree.read("README.zh.md") == page.format("".join(f"{line}\n" for line in shown))
