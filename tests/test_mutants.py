"""The table of mutants.py fits the project: each old text is there once, each named test exists."""

import pytest

import mutants


def test_the_table_fits_the_project():
    assert mutants.problems(mutants.MUTANTS) == []
    assert len(mutants.MUTANTS) >= 80


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(old="no such text"), "found {'grpo.py': 0}"),
        (dict(old="losses"), "must stand once in grpo"),
        (dict(files="common"), "found nowhere"),
        (dict(tests=()), "name the tests"),
        (dict(tests=("test_grpo.py::test_no_such",)), "no test test_grpo.py::test_no_such"),
        (dict(tests=("test_refresh.py::test_nothing_is_due",)), "may kill it"),
        (dict(equivalent="it is not"), "or why nothing can"),
    ],
)
def test_a_row_that_does_not_fit_is_named(change, message):
    row = mutants.mutant("a row", "grpo", "losses = -objective", "losses = 0", "test_grpo.py::test_oracle_values")
    assert mutants.problems([row]) == []
    (line,) = mutants.problems([row._replace(**change)])
    assert line.startswith("a row: ") and message in line
    assert "two rows" in mutants.problems([row, row])[0]


@pytest.mark.parametrize(
    "code, failures, word",
    [
        (0, [], "survived"),
        (1, [("test_x", "assert 1 == 2")], "killed"),
        (None, [("", "no end in 300 s")], "killed"),
        (1, [("test_x", "NameError: name 'a' is not defined")], "broken"),
        (2, [], "broken"),  # a file that cannot be imported
        (4, [], "broken"),  # no such test
    ],
)
def test_only_a_test_that_fails_kills(code, failures, word):
    assert mutants.verdict(code, failures)[0] == word
