"""Pages whose tables of numbers a test computes again: each stands below a line <!-- table: NAME -->."""

import re
from decimal import Decimal

import torch

from testbed import ROOT

TABLE = re.compile(r"<!-- table: (\w+) -->\n((?:\|.*\n)+)")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def numbers(*cells):
    return [float(number) for number in NUMBER.findall(" ".join(cells))]


class Page:
    """`tables` {name: rows of cells}, the rows below the head; `heads` {name: the last number of each, or None}."""

    def __init__(self, name):
        self.text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        found = {name: [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
                 for name, table in TABLE.findall(self.text)}  # fmt: skip
        self.tables = {name: rows[2:] for name, rows in found.items()}
        self.heads = {name: [(numbers(cell) or [None])[-1] for cell in rows[0]] for name, rows in found.items()}

    def numbers(self):
        """Those in the tables, heads included."""
        return {value for _, table in TABLE.findall(self.text) for value in numbers(table)}

    def prose(self):
        """The text without tables, code, formulas, links and the numbers of papers."""
        text = re.sub(r"```.*?```", " ", TABLE.sub("", self.text), flags=re.DOTALL)
        return re.sub(r"\$`[^`]*`\$|`[^`]*`|\]\([^)]*\)|\d{4}\.\d{5}", " ", text)


def agrees(printed, value):
    """Whether a printed number is `value`, rounded to its last digit."""
    return abs(float(printed) - value) <= 0.5000001 * 10.0 ** Decimal(printed).as_tuple().exponent


def differences(rows, given, computed):
    """What is wrong in a table: `computed` has for each row {place of a cell: its number or numbers}, and the cells at
    the places `given` are what they were computed from. Every cell is one or the other."""
    found, computed = [], list(computed)
    assert len(computed) == len(rows) > 0
    for row, values in zip(rows, computed, strict=True):
        assert sorted([*given, *values]) == list(range(len(row)))
        for place, expected in values.items():
            printed, expected = NUMBER.findall(row[place]), torch.as_tensor(expected).flatten().tolist()
            if len(printed) != len(expected) or not all(map(agrees, printed, expected)):
                found.append(f"{' | '.join(row)}: {row[place]} is {', '.join(f'{value:.6g}' for value in expected)}")
    return found
