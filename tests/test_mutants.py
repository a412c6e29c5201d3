"""tools/mutants.py: a row whose code has gone says so, and only a test that fails kills."""

import mutants


def test_a_row_has_its_bug_or_no_text_and_only_a_failure_kills(monkeypatch):
    right = ("wrong sign", "grpo.py", "losses = -objective", "losses = objective", "test_grpo.py")
    gone = ("gone", "grpo.py", "no such code", "", "test_grpo.py")
    often = ("often", "grpo.py", "losses", "", "test_grpo.py")
    monkeypatch.setattr(mutants, "MUTANTS", [right, gone, often])
    *bugs, text, none, ambiguous = [text for _, _, text, _ in mutants.rows()]
    assert len(bugs) == len(mutants.BUGS) and all(bugs) and "losses = objective" in text
    assert none is None and ambiguous is None
    found = [mutants.verdict(code, output) for code, output in ((0, ""), (1, ""), (1, "E   NameError: x"), (4, ""))]
    assert found == ["survived", "killed", "broken", "broken"]
