"""tools/lines.py: each numbered detail of the docs links to the code that it is about, and what pages name exists."""

import pytest

import lines
from tree import Tree

CODE = """import math

LIMIT = 20


@math.cache
def ratio(x):
    return min(x, LIMIT)


class Args:
    clip: float = 0.2

    def check(self):
        return self.clip < LIMIT
"""
PAGE = "docs/page.md"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "script.py").write_text(CODE, encoding="utf-8")
    return Tree(tmp_path)


@pytest.mark.parametrize(
    "code, anchor, place",
    [
        ("ratio", "", (6, 8, True)),  # with its decorator
        ("LIMIT", "", (3, 3, True)),
        ("Args", "", (11, 15, True)),
        ("Args.clip", "", (12, 12, True)),
        ("Args.check", "", (14, 15, True)),
        ("return min(x", "#L8", (8, 8, False)),  # a piece of one line
    ],
)
def test_a_link_leads_to_what_its_text_names(tree, code, anchor, place):
    assert lines.place(tree, "script.py", code) == place
    for old in ("", "#L1", "#L1-L99"):
        text, found = lines.corrected(tree, PAGE, f"see [`{code}`](../script.py{old}).")
        assert (text, found) == (f"see [`{code}`](../script.py{anchor}).", [])


def test_a_link_to_a_whole_file_stays(tree):
    text = "[`script.py`](../script.py) and [text](../script.py)"
    assert lines.corrected(tree, PAGE, text) == (text, [])


@pytest.mark.parametrize(
    "link, why",
    [
        ("[`LIMIT)`](../script.py#L8)", None),
        ("[`gone`](../script.py)", "0 lines"),
        ("[`gone`](../script.py#L8)", "0 lines"),
        ("[`def `](../script.py#L8)", "2 lines"),
        ("[`ratio`](../other.py)", "no such file"),
    ],
)
def test_a_link_whose_text_names_nothing_or_two_lines_is_reported(tree, link, why):
    text, found = lines.corrected(tree, PAGE, link)
    assert text == link and len(found) == (why is not None)
    assert all(line.startswith(PAGE) and why in line for line in found)


def test_a_detail_without_a_link_is_reported(tree):
    text = "1. **One**\n   [`ratio`](../script.py).\n2. **Two**\n   [`script.py`](../script.py)\n\n   | a |\n\nMore.\n"
    assert lines.problems(tree, PAGE, text, "") == [f"{PAGE}: no link to code in: 2. **Two**"]


def test_a_test_or_file_that_does_not_exist_is_reported(tree):
    (tree.root / "tests").mkdir()
    (tree.root / "tests" / "test_a.py").write_text(tests := "def test_one():\n    pass\n", encoding="utf-8")
    text = "`test_one`, `tests/test_a.py`, [script](../script.py) and [site](https://example.org/page)"
    assert lines.problems(tree, PAGE, text, tests) == []
    text = "`test_two`, `tests/test_b.py` and [script](../other.py)"
    found = [f"{PAGE}: there is no {name}" for name in ("test test_two", "file tests/test_b.py", "file ../other.py")]
    assert lines.problems(tree, PAGE, text, tests) == found


def test_refresh_corrects_every_page(tree):
    """Also by a script that is itself about to be written."""
    (tree.root / "README.md").write_text("[`ratio`](script.py#L7-L9)\n", encoding="utf-8")
    (tree.root / PAGE).write_text("An older page.\n", encoding="utf-8")
    tree.write(PAGE, "1. [`ratio`](../script.py#L1) and [`return min(x`](../script.py)\n")
    tree.write("script.py", "# one more line\n" + CODE)
    assert lines.refresh(tree) == [] and tree.read("README.md") == "[`ratio`](script.py)\n"
    assert tree.read(PAGE) == "1. [`ratio`](../script.py) and [`return min(x`](../script.py#L9)\n"
    assert (tree.root / PAGE).read_text(encoding="utf-8") == "An older page.\n"
    assert sorted(tree.save()) == ["README.md", PAGE, "script.py"] and "#L9" in (tree.root / PAGE).read_text(
        encoding="utf-8"
    )
