"""Each numbered detail of the docs links to the lines that it is about, and what the pages name exists."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))

import lines  # noqa: E402

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


@pytest.fixture
def page(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "script.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "docs" / "page.md"


@pytest.mark.parametrize("path", lines.pages(), ids=lambda path: path.name)
def test_the_links_of_every_page_are_fresh(path):
    text = path.read_text(encoding="utf-8")
    fresh, found = lines.refresh(path, text)
    assert found == [] and lines.problems(path, text) == []
    assert fresh == text, "run python docs/lines.py --write"


@pytest.mark.parametrize(
    "code, anchor",
    [
        ("ratio", "#L6-L8"),  # with its decorator
        ("LIMIT", "#L3"),
        ("Args", "#L11-L15"),
        ("Args.clip", "#L12"),
        ("Args.check", "#L14-L15"),
        ("return min(x", "#L8"),  # a piece of one line
    ],
)
def test_a_link_leads_to_what_its_text_names(page, code, anchor):
    for old in ("", "#L1", "#L1-L99"):
        assert lines.refresh(page, f"see [`{code}`](../script.py{old}).") == (
            f"see [`{code}`](../script.py{anchor}).",
            [],
        )


def test_a_link_to_a_whole_file_stays(page):
    text = "[`script.py`](../script.py) and [text](../script.py)"
    assert lines.refresh(page, text) == (text, [])


@pytest.mark.parametrize(
    "link, why", [("[`LIMIT)`](../script.py#L8)", None), ("[`gone`](../script.py#L8)", "0 lines"),
                  ("[`def `](../script.py#L8)", "2 lines"), ("[`ratio`](../other.py)", "no such file")],
)  # fmt: skip
def test_a_link_whose_text_names_nothing_or_two_lines_is_reported(page, link, why):
    text, found = lines.refresh(page, link)
    assert text == link and len(found) == (why is not None)
    assert all(line.startswith("page.md") and why in line for line in found)


def test_a_detail_without_a_link_is_reported(page):
    text = "1. **One**\n   [`ratio`](../script.py#L6-L8).\n2. **Two**\n   nothing\n\n   | a table |\n\nOther text.\n"
    assert lines.problems(page, text, page.parent.parent) == ["page.md: no link to lines in: 2. **Two**"]


def test_a_test_or_file_that_does_not_exist_is_reported(page):
    (page.parent.parent / "tests").mkdir()
    (page.parent.parent / "tests" / "test_a.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    text = "`test_one`, `tests/test_a.py`, [script](../script.py) and [site](https://example.org/page)"
    assert lines.problems(page, text, page.parent.parent) == []
    text = "`test_two`, `tests/test_b.py` and [script](../other.py)"
    found = [f"page.md: there is no {name}" for name in ("test test_two", "file tests/test_b.py", "file ../other.py")]
    assert lines.problems(page, text, page.parent.parent) == found


def test_write_corrects_every_page_and_a_second_run_finds_nothing(page, monkeypatch, capsys):
    page.write_text("1. [`ratio`](../script.py#L1) and [`return min(x`](../script.py)\n", encoding="utf-8")
    monkeypatch.setattr(lines, "ROOT", page.parent.parent)
    monkeypatch.setattr(lines, "pages", lambda: [page])
    assert lines.main([]) == 1 and "python docs/lines.py --write" in capsys.readouterr().out
    assert lines.main(["--write"]) == 0
    assert (
        page.read_text(encoding="utf-8") == "1. [`ratio`](../script.py#L6-L8) and [`return min(x`](../script.py#L8)\n"
    )
    assert lines.main([]) == 0 and capsys.readouterr().out.endswith("all links are fresh\n")
