"""The Chinese pages: README.zh.md has the numbers of README.md, and what both link to is there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.zh.md", "docs/theory.zh.md"]


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def sections(path):
    """The anchors of a page, as GitHub makes them of its titles."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def facts(page):
    """The code blocks of a page without their comments, and the numbers of its table of results."""
    code = re.findall(r"^```.*?^```", read(page), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `\w+\.py` \| .*$", read(page), re.MULTILINE)
    return [re.sub(r"^# .*\n", "", block, flags=re.MULTILINE) for block in code], rows


def test_the_chinese_readme_has_the_code_and_the_numbers_of_the_english_one():
    code, rows = facts("README.zh.md")
    assert len(code) >= 4 and len(rows) >= 7
    assert (code, rows) == facts("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_each_link_leads_to_a_file_a_section_and_a_definition(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    links = re.findall(r"\[([^\[\]]*)\]\((?!http)([^)#]*)#?([^)]*)\)", text)
    assert len(links) > 40
    for label, file, section in links:
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), file
        assert not section or section in sections(target), f"{file}#{section}"
        if label.startswith("`") and file.endswith(".py"):
            name = label.strip("`").split(".")[-1]
            defined = rf"^ *(def|class) {name}\b|^ +{name}: "
            assert re.search(defined, target.read_text(encoding="utf-8"), re.MULTILINE), label
