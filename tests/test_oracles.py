"""The worked examples that other tests hold the project to are what oracles.py computes from the papers' formulas."""

import json

import pytest

import oracles


def same(mine, others):
    """Whether two nested examples are equal; versions of torch may round the last of twelve digits differently."""
    if isinstance(mine, dict):
        return mine.keys() == others.keys() and all(same(mine[key], others[key]) for key in mine)
    if isinstance(mine, list):
        return len(mine) == len(others) and all(map(same, mine, others))
    return mine == pytest.approx(others, rel=1e-10, abs=1e-11) if isinstance(mine, float) else mine == others


def test_the_file_is_what_the_formulas_give():
    assert same(json.loads(oracles.FILE.read_text(encoding="utf-8")), json.loads(json.dumps(oracles.examples())))
