"""docs/diffs.md is what tools/diffs.py makes of the scripts, and no hunk keeps a sentence that was not meant for it."""

import collections

import pytest

import diffs
import same_text
from tools import ROOT

SOURCES = same_text.load()


def changed(old, new, script="dr_grpo.py"):
    assert SOURCES[script].count(old) == 1
    return SOURCES | {script: SOURCES[script].replace(old, new)}


def test_the_page_is_fresh():
    page, found = diffs.build(SOURCES)
    assert found == []
    assert (ROOT / "docs" / "diffs.md").read_text(encoding="utf-8") == page, "run python tools/diffs.py --write"


@pytest.mark.parametrize("script", diffs.PAPERS)
def test_the_hunks_make_the_script_out_of_grpo(script):
    grpo, own = (collections.Counter(filter(None, same_text.bare(SOURCES[name]))) for name in ("grpo.py", script))
    for _, _, lines in diffs.hunks(SOURCES["grpo.py"], SOURCES[script]):
        grpo.update(line[2:] for line in lines if line.startswith("+ "))
        grpo.subtract(line[2:] for line in lines if line.startswith("- "))
    assert {line: n for line, n in grpo.items() if n} == own


@pytest.mark.parametrize(
    "old, new, missing, left",
    [
        # a hunk that changes needs its sentence read again
        ('/ args.max_new_tokens / totals["rows"]', '/ args.max_new_tokens / totals["prompts"]', 1, 1),
        ("mask_truncated: bool = option(False", "mask_truncated: bool = option(True", 1, 1),
        # a new one needs a sentence
        ("    run.start(data_summary", "    more = 1\n    run.start(data_summary", 1, 0),
        ("def evaluate(", "def one_more():\n    pass\n\n\ndef evaluate(", 1, 0),
        ("import time\n", "import math\nimport time\n", 1, 0),
        # one that is gone leaves a sentence over
        ('normalize_std: bool = option(False, "', 'normalize_std: bool = option(True, "', 0, 1),
        # what is not shown, or only moves, needs nothing
        ('option(False, "divide advantages', 'option(False, "whether to divide advantages', 0, 0),
        ("Dr. GRPO: GRPO done right", "Dr. GRPO", 0, 0),
    ],
)
def test_sentences_are_missing_and_left_over_as_the_code_changes(old, new, missing, left):
    _, found = diffs.build(changed(old, new))
    assert all(line.startswith("dr_grpo.py: no ") and "tools/diffs.py" in line for line in found)
    assert sum("no sentence for" in line for line in found) == missing
    assert sum("no hunk for the sentence" in line for line in found) == left


def test_a_change_of_grpo_and_its_copies_asks_for_nothing():
    line = "    betas = (args.adam_beta1, args.adam_beta2)\n"
    sources = {script: source.replace(line, "    first = 1\n" + line) for script, source in SOURCES.items()}
    page, found = diffs.build(sources)
    assert sources["dapo.py"] != SOURCES["dapo.py"] and found == [] and page != diffs.build(SOURCES)[0]


def test_a_script_without_its_paper_is_seen():
    _, found = diffs.build(SOURCES, papers={})
    assert len(found) == len(diffs.SENTENCES) and all("PAPERS" in line for line in found)


def test_functions_that_are_gone_are_a_list():
    page = diffs.build(SOURCES)[0].partition("## dpo.py")[2]
    assert "- def token_weights" not in page and "\n- `token_weights`: The loss is that of a pair" in page
