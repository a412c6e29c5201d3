"""lab/bugs.py: the pairs of docs/exercises.md fit today's scripts, and the page says what the results say."""

import re

import pytest
import torch

import bugs
import grpo
import mutants
from testbed import ROOT

PAGE = bugs.TITLE + (ROOT / bugs.PAGE).read_text(encoding="utf-8").partition(bugs.TITLE)[2]
EACH = pytest.mark.parametrize("bug", bugs.BUGS, ids=lambda bug: bug.name)


def source(bug):
    return (ROOT / f"{bug.script}.py").read_text(encoding="utf-8")


@EACH
def test_a_bug_fits_its_script(bug):
    text = bugs.edited(bug, source(bug))
    compile(text, bug.name, "exec")
    assert text != source(bug) and text.count(bug.new) >= 1
    assert sum(bug.line in line for line in source(bug).splitlines()) == 1


def test_a_bug_whose_text_has_gone_is_named():
    with pytest.raises(ValueError, match="order: its old text must stand once in grpo.py, and stands 0 times"):
        bugs.edited(next(bug for bug in bugs.BUGS if bug.name == "order"), "advantages = 0")


def test_each_bug_is_a_mutant_with_its_test():
    """So its test exists (tests/test_mutants.py), and tools/mutants.py runs it on the edited script."""
    rows = {row.name: row for row in mutants.MUTANTS}
    for bug in bugs.BUGS:
        row = rows[f"which curve: {bug.title}"]
        assert (row.files, row.old, row.new, row.tests) == (bug.script, bug.old, bug.new, (bug.test,))


@EACH
def test_the_metrics_that_give_a_bug_away_do_so_for_every_seed(bug):
    """In step 1, of one model, all seeds differ in one direction; later all values of one run are above the other's."""
    for metric, when in bug.tells:
        healthy, broken = ([bugs.value(name, seed, metric, when) for seed in bug.seeds] for name in bugs.twins(bug))
        if when == "step 1":
            signs = {(after > before) - (after < before) for before, after in zip(healthy, broken, strict=True)}
            assert signs in ({1}, {-1}), (metric, healthy, broken)
        else:
            assert max(healthy) < min(broken) or max(broken) < min(healthy), (metric, when, healthy, broken)
    assert any(metric in bug.panels for metric, _ in bug.tells)


@EACH
def test_twins_have_one_command_and_one_model_to_start_from(bug):
    for seed in bug.seeds:
        healthy, broken = (bugs.packed(name, seed) for name in bugs.twins(bug))
        assert healthy[0]["command"] == broken[0]["command"] == f"python {bugs.SETTINGS[bug.setting][0]} --seed {seed}"
        assert healthy[0]["bug"] is None and broken[0]["bug"] == bug.title
        assert healthy[1]["eval/pass@1"] == broken[1]["eval/pass@1"]
        assert [row["step"] for row in healthy[1:]] == [row["step"] for row in broken[1:]] == list(range(21))


def test_the_page_is_what_the_results_say():
    assert re.sub(r"(?<=\.py)#L[\d-]+L?\d*(?=\))", "", PAGE) == bugs.build()


def test_no_answer_stands_outside_of_a_click():
    shown = re.sub(r"<details>.*?</details>", "", PAGE, flags=re.DOTALL)
    assert len(PAGE) > 2 * len(shown) and not any(bug.title in shown or bug.old in shown for bug in bugs.BUGS)
    assert {bug.buggy for bug in bugs.BUGS} == {"A", "B"}
    for number in range(1, len(bugs.BUGS) + 1):
        assert f"(figures/which_curve/pair{number}.png)" in shown
        assert (bugs.FIGURES / f"pair{number}.png").is_file()


def test_a_run_is_condensed_to_what_the_page_shows():
    rows = [{"step": 0, "eval/pass@1": 0.34567891}, {"step": 1, "reward/mean": 1 / 3, "time/update_s": 2.0}]
    assert bugs.condensed(rows) == [{"step": 0, "eval/pass@1": 0.34568}, {"step": 1, "reward/mean": 0.33333}]


def test_an_edited_script_is_loaded_beside_the_one_that_is_imported(monkeypatch):
    """And what the page says of the whole batch: a reward of the prompt alone has no advantages in a healthy script."""
    monkeypatch.setitem(bugs.sys.modules, "grpo", grpo)  # `load` puts its module there
    bug = next(bug for bug in bugs.BUGS if bug.name == "batch")
    module = bugs.load("grpo", bugs.edited(bug, source(bug)))
    rewards, args = torch.tensor([1.0, 1.0, 0.0, 0.0]), grpo.Args(group_size=2)
    assert grpo.compute_advantages(rewards, args).eq(0).all()
    assert module.compute_advantages(rewards, args).ne(0).all()
