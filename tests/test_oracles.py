"""The worked examples that other tests hold the project to are what oracles.py computes from the papers' formulas."""

import json

import oracles


def test_the_file_is_what_the_formulas_give():
    assert json.loads(oracles.FILE.read_text(encoding="utf-8")) == json.loads(json.dumps(oracles.examples()))
