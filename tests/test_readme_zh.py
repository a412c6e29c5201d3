"""README.zh.md is README.md in Chinese: commands, links, figures and tables are the same, place by place.

Its last section, which README.md has not, is docs/corrections.md in a table.
"""

import collections
import itertools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(r"^```.*?^```$|\S.*?(?=\n\n|\n\||\n\d+\. |\n```|\s*\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)]+)\)")
CODE = re.compile(r"`[^`]+`")
NUMBER = re.compile(r"\d+(?:\.\d+)*")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
OWN = "\n\n## 文章里的说法\n"

SMALL = """[中文](README.zh.md)

# Title of 2 words

Text with `code`, 0.95 and 3 more.

## Next

1. First, [`f`](a.py#L1) and [two](b.md).
2. Second.

```bash
python a.py  # a comment
```

| a | 10 |
|---|---|
| c | 20 |
"""
SMALL_ZH = """[English](README.md)

# 标题有 2 个词

文字里有 3 个数、0.95 和 `code`。

## 下一节

1. 第一，[`f`](a.py#L1) 和 [二](b.md)。
2. 第二。

```bash
python a.py  # a comment
```

| 甲 | 10 |
|---|---|
| 丙 | 20 |
"""


def pieces(section):
    """[(kind, text)] in order: code blocks, items of a list, cells of a table, and paragraphs (titles among them)."""
    found = []
    for block in BLOCK.findall(section):
        if block.startswith("|"):
            cells = [cell.strip() for cell in block.strip("|").split("|")]
            found += [(f"cell {i} of {len(cells)} in a row", cell) for i, cell in enumerate(cells, 1)]
        elif block.startswith("```"):
            found += [("line of a code block", line) for line in block.splitlines()]
        else:
            found.append(("item of a list" if re.match(r"\d+\. ", block) else "paragraph", block))
    return found


def kept(kind, text):
    """{what: values} of a piece that a translation keeps. Only links stay in their order: sentences need not."""
    if kind == "line of a code block":
        return {"code": [text]}
    links = [(target, name if name.startswith("`") else "text") for name, target in LINK.findall(text)]
    code, numbers = CODE.findall(LINK.sub("", text)), NUMBER.findall(LINK.sub(r"\1", text))
    return {"links": links, "code": sorted(code), "numbers": sorted(numbers)}


def differences(english, chinese):
    """What differs between two pages below their first lines, each as one line: section, place, and what."""
    parts, parts_zh = (page.partition("\n")[2].split("\n## ") for page in (english, chinese))
    if len(parts) != len(parts_zh):
        return [f"README.md has {len(parts)} sections, README.zh.md has {len(parts_zh)}"]
    found = []
    for part, part_zh in zip(parts, parts_zh, strict=True):
        both = itertools.zip_longest(pieces(part), pieces(part_zh), fillvalue=("nothing more", ""))
        for (kind, text), (kind_zh, text_zh) in both:
            place = f"section {part.strip().splitlines()[0]!r}, {kind} {text[:50]!r}"
            if kind != kind_zh:
                found.append(f"{place}: README.zh.md has there: {kind_zh} {text_zh[:50]!r}")
                break  # all that follows in this section is shifted
            if kind in ("item of a list", "paragraph") and not text.startswith("![") and not CHINESE.search(text_zh):
                found.append(f"{place}: it is not translated")
            for (what, values), values_zh in zip(kept(kind, text).items(), kept(kind, text_zh).values(), strict=True):
                counts, counts_zh = collections.Counter(values), collections.Counter(values_zh)
                only, only_zh = [*(counts - counts_zh).elements()], [*(counts_zh - counts).elements()]
                if only or only_zh:
                    found.append(f"{place}: {what}: only README.md has {only}, only README.zh.md has {only_zh}")
                elif values != values_zh:
                    found.append(f"{place}: order of {what}: {values}, in README.zh.md {values_zh}")
    return found


def test_the_chinese_readme_has_the_commands_links_and_figures_of_the_english_one():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    assert english.startswith("[中文](README.zh.md)\n") and chinese.startswith("[English](README.md)")
    found = differences(english, chinese.partition(OWN)[0])
    assert not found, "\n" + "\n".join(found)


def anchor(title):
    """The anchor that a repository host gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def test_the_chinese_readme_has_each_correction_once_and_in_order():
    text = (ROOT / "docs" / "corrections.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (\d+\. .*)", text, re.MULTILINE)
    section = (ROOT / "README.zh.md").read_text(encoding="utf-8").partition(OWN)[2]
    rows = re.findall(r"^\| \[(\d+)\]\(docs/corrections\.md#(\S+)\) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert [(int(number), link) for number, link, *_ in rows] == [
        (i, anchor(title)) for i, title in enumerate(titles, 1)
    ]
    assert len(titles) == 24 and all(CHINESE.search(says + told) for *_, says, told in rows) and "\n## " not in section


@pytest.mark.parametrize(
    "old, new, where, what",
    [
        ("0.95", "0.96", "'# Title of 2 words', paragraph", "numbers: only README.md has ['0.95'], only README.zh.md"),
        ("3 个数", "三个数", "'# Title of 2 words', paragraph", "numbers: only README.md has ['3']"),
        ("`code`", "`kode`", "'# Title of 2 words', paragraph", "code: only README.md has ['`code`']"),
        ("| 10 |", "| 20 |", "'Next', cell 2 of 2 in a row '10'", "numbers: only README.md has ['10']"),
        ("| 丙 | 20 |\n", "", "'Next', cell 1 of 2 in a row 'c'", "has there: nothing more"),
        ("| 20 |", "| 20 | 5 |", "'Next', cell 1 of 2 in a row 'c'", "has there: cell 1 of 3"),
        ("b.md", "c.md", "'Next', item of a list", "links: only README.md has [('b.md', 'text')]"),
        ("[`f`]", "[`g`]", "'Next', item of a list", "links: only README.md has [('a.py#L1', '`f`')]"),
        ("[`f`](a.py#L1) 和 [二](b.md)", "[二](b.md) 和 [`f`](a.py#L1)", "'Next', item of a list", "order of links"),
        ("2. 第二。\n", "", "'Next', item of a list '2. Second.'", "has there: line of a code block"),
        ("第二", "Second", "'Next', item of a list '2. Second.'", "not translated"),
        ("a comment", "说明", "'Next', line of a code block 'python a.py", "code: only README.md has"),
    ],
)
def test_a_difference_is_named_with_its_section_and_place(old, new, where, what):
    changed = SMALL_ZH.replace(old, new, 1)
    assert changed != SMALL_ZH and differences(SMALL, SMALL_ZH) == []
    (found,) = differences(SMALL, changed)
    assert found.startswith(f"section {where}") and what in found


def test_a_missing_section_is_reported():
    found = differences(SMALL, SMALL_ZH.replace("## 下一节\n", ""))
    assert found == ["README.md has 2 sections, README.zh.md has 1"]
