"""docs/one_step.md is what the step gives, and its numbers fit the formulas that it prints."""

import math
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))

import one_step  # noqa: E402


def page():
    return one_step.PAGE.read_text(encoding="utf-8")


def rows_of(heading):
    """The rows of the first table after a text of the page, as lists of cells."""
    table = page().split(heading)[1].split("\n\n|")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_page_is_what_the_step_gives():
    """All numbers of it, with those of the other algorithms; and the sentences are true of this step."""
    step = one_step.Step()
    assert one_step.differences(page(), one_step.written(step)) == []
    ratio, A = step.result("policy_loss", 1)[1]["ratio_max"], step.result("compute_advantages")
    assert ratio[one_step.SHORT, one_step.TOKEN] > 1.2 and ratio[one_step.SHORT, 0] < 1 and A[one_step.SHORT] > 0
    assert (step.result("policy_loss", 0)[1]["ratio_max"] == 1).all() and (A[4:] == 0).all()
    assert step.prompts[1].answer == step.texts[one_step.CUT].split()[-1] + "8"


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
