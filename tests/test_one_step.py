"""The numbers of docs/one_step.md fit the formulas that it prints; test_refresh.py compares them with the step."""

import math
import re

import pytest

import one_step
from tree import Tree


def page():
    return Tree().read(one_step.PAGE)


def rows_of(heading):
    """The rows of the first table after a text of the page, as lists of cells."""
    table = page().split(heading)[1].split("\n\n|")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_sentences_are_true_of_the_numbers():
    texts, prompts = [row[2].strip("`") for row in rows_of("## 1.")], [row[1].strip("`") for row in rows_of("## 1.")]
    assert texts[one_step.SHORT].endswith("■") and not texts[one_step.CUT].endswith("■")
    gold = str(eval(prompts[one_step.CUT].rstrip("?")))  # a sum of digits
    assert gold == texts[one_step.CUT].split()[-1] + gold[-1] and len(gold) > 1, "one digit before the right answer"
    advantages = [float(row[-1]) for row in rows_of("## 2.")]
    assert advantages[one_step.SHORT] == advantages[one_step.LONG] > 0 == max(map(abs, advantages[4:]))
    ratios = [float(row[4]) for row in rows_of("## 4.")]
    assert ratios[one_step.TOKEN] > 1.2 and ratios[0] < 1


def test_the_numbers_fit_the_formulas():
    """As a reader checks them: with what the page prints, rounded as it is."""
    A = float(rows_of("## 2.")[one_step.SHORT][-1])
    for _, _, *cells in rows_of("## 4."):
        old, new, ratio, kl, loss, weight, term = map(float, cells)
        assert ratio == pytest.approx(math.exp(new - old), abs=2e-4)
        assert kl == pytest.approx(math.exp(old - new) - (old - new) - 1, abs=2e-4)
        least = min(ratio * A, min(max(ratio, 0.8), 1.2) * A)
        assert loss == pytest.approx(-least + 0.04 * kl, abs=2e-4)
        assert weight == pytest.approx(1 / 7 / 8, abs=1e-5) and term == pytest.approx(loss * weight, abs=2e-5)
    sums = [float(row[-1]) for row in rows_of("Row by row")]
    printed = float(re.search(r"last column = (\S+)", page())[1])
    assert len(sums) == 8 and sum(sums) == pytest.approx(printed, abs=1e-4) and printed != 0
    by_name = {row[0]: row[1:] for row in rows_of("## 5.")}
    assert float(by_name["**the sum**"][0]) == pytest.approx(printed, abs=1e-4)


@pytest.mark.parametrize(
    "fresh, found",
    [
        ("a 0.866 b -0.000", []),
        ("a 0.867 b  0.001", []),  # the last digit of another processor
        ("a 0.868 b -0.000", ["0.866: 0.868"]),
        ("a 0.866 c -0.000", ["the text"]),
        ("a 0.866 b", ["the text"]),
    ],
)
def test_a_number_may_differ_by_one_in_its_last_digit(fresh, found):
    differences = one_step.differences("a 0.866 b -0.000", fresh)
    assert [line.replace(" 0", "0").replace(":0", ": 0") for line in differences] == found
