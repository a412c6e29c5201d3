"""The checker of `same_text.py`: the scripts pass it, and it sees what it is there for."""

import pytest

import same_text

SOURCES = same_text.load()
BEFORE = same_text.problems(SOURCES)


def test_the_scripts_pass():
    assert BEFORE == []


def changed(script, old, new):
    assert SOURCES[script].count(old) == 1
    return SOURCES | {script: SOURCES[script].replace(old, new)}


def new_problems(sources, **keywords):
    return [line for line in same_text.problems(sources, **keywords) if line not in BEFORE]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("KL(old || new): the old", "KL(old || new), the old", "policy_loss is not the text of grpo.py"),
        ("def evaluate(", "# a comment of its own\ndef evaluate(", "evaluate is not the text of grpo.py"),
        ("@torch.no_grad()\ndef rollout(", "def rollout(", "rollout is not the text of grpo.py"),
        ("import time\n", "from common import time\n", "time is imported otherwise than in grpo.py"),
        ("    group_size: int = ", "    group_size: float = ", "the options of grpo.py are not all there"),
        ("    entropy_coef: float", "    entropy: float", "the options of grpo.py are not all there"),
        ("    clip_low: float", "    late: int = option(1, '')\n    clip_low: float", "must follow std_eps"),
        (
            "    run.start(data_summary",
            "    a = 1\n    b = 1\n    run.start(data_summary",
            "main differs from grpo.py by 6 lines, allowed are",
        ),
    ],
)
def test_a_drifted_copy_is_seen(old, new, message):
    assert any(message in line for line in new_problems(changed("dr_grpo.py", old, new)))


def test_what_differs_needs_its_reason_and_a_reason_needs_a_difference():
    assert any("token_weights is not the text" in line for line in same_text.problems(SOURCES, differs={}))
    sources = SOURCES | {"dr_grpo.py": SOURCES["grpo.py"]}
    assert any("token_weights is the text of grpo.py, DIFFERS still" in line for line in same_text.problems(sources))
    differs = same_text.DIFFERS | {("gspo.py", "no_such"): ("", 1)}
    assert "gspo.py: DIFFERS names no_such, which is not there" in same_text.problems(SOURCES, differs)


def test_a_budget_counts_code_and_neither_docstring_nor_help():
    base = same_text.bare(SOURCES["grpo.py"])
    other = SOURCES["grpo.py"].replace("GRPO: Group", "Another: Group")
    other = other.replace('"completions of a prompt, G (DeepSeekMath: 64)"', '"G"')
    assert other != SOURCES["grpo.py"] and same_text.changes(base, same_text.bare(other)) == (0, 0, 0)
    other = other.replace("group_size: int = option(8", "group_size: int = option(16") + "\n# the end\n"
    assert same_text.changes(base, same_text.bare(other)) == (1, 3, 2)
    assert any(
        "the budget is (0, 0, 0)" in line for line in same_text.problems(SOURCES, budgets={"gspo.py": (0, 0, 0)})
    )


def test_fix_rewrites_copies_and_leaves_what_may_differ():
    right = same_text.fix("grpo.py", SOURCES)
    assert right == SOURCES  # nothing to do
    broken = changed("gspo.py", "    mean, _, std, zero =", "    # drifted\n    mean, _, std, zero =")
    assert same_text.fix("grpo.py", broken)["gspo.py"] == SOURCES["gspo.py"]
    improved = changed("grpo.py", "    mean, _, std, zero =", "    # better\n    mean, _, std, zero =")
    fixed = same_text.fix("grpo.py", improved)
    assert "# better" in fixed["gspo.py"] and "# better" in fixed["dr_grpo.py"]
    assert same_text.texts(fixed["gspo.py"])["policy_loss"] == same_text.texts(SOURCES["gspo.py"])["policy_loss"]
