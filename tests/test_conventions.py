"""vectors/conventions.md: what other libraries compute. Most tests need an extra package."""

import dataclasses
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "vectors" / "conventions.md"
WIDTH = 16  # the constant denominator of dr_grpo.py


def mean_loss(name):
    """Return a script's loss of one optimizer step as a function of the tensors that polgrad draws."""
    module = importlib.import_module(name)
    args = module.Args(max_new_tokens=WIDTH)

    def loss(logprobs, old_logprobs, advantages, response_mask):
        losses, _ = module.policy_loss(logprobs, old_logprobs, advantages[:, None], response_mask, args)
        totals = {"tokens": int(response_mask.sum()), "rows": len(response_mask)}
        return (losses * module.token_weights(response_mask, totals, args)).sum()

    return loss


@pytest.mark.needs("polgrad")
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "ppo"])
def test_polgrad_agrees_on_loss_and_gradient(name):
    """Catches a clip on the wrong side, another mean, or a masked value in the loss."""
    from polgrad import ALGORITHMS
    from polgrad.testing import assert_conforms

    reference = dataclasses.replace(ALGORITHMS[name].loss, norm_len=WIDTH)
    report = assert_conforms(mean_loss(name), reference, n_cases=64, loss_rtol=1e-12, grad_rtol=1e-12)
    assert report.n_cases == 64


# --- vectors/libraries ---


@pytest.fixture
def report(monkeypatch):
    """Import the program of the page, whose folder is not on the path of other tests."""
    monkeypatch.syspath_prepend(str(ROOT / "vectors" / "libraries"))
    import report

    return report


def asked(report, library):
    return report.adapter_of(library, pathlib.Path("unused")), report.check.load_cases()


@pytest.mark.beside("vectors")
@pytest.mark.needs("trl")
def test_each_difference_has_a_reason(report):
    """Catches an adapter that no longer fits its library, or a changed case."""
    adapter, cases = asked(report, "trl")
    verdicts = report.verdicts_of(adapter, cases)
    assert report.unexplained("trl", verdicts) == []
    assert verdicts["splits/dapo-2"][0] == report.SAME
    assert verdicts["variants/cispo"][0] == report.SAME
    names, verdicts = {"trl": adapter.name}, {"trl": verdicts}
    printed = report.differences(names, verdicts)
    assert "- `advantages/ddof-0`: the std has ddof 1. (`trainer/utils.py`, `nanstd`)" in printed
    assert report.totals(names, verdicts)[-1] in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.beside("vectors")
@pytest.mark.needs("trl")
def test_settings_compute_what_the_page_says(report, monkeypatch):
    """Each row of the table runs with only its settings, and needs all of them."""
    adapter, cases = asked(report, "trl")
    assert report.settings.problems("trl", adapter, cases, report.is_right) == []
    methods = report.settings.load_methods()
    methods["DAPO's loss"]["trl"] = ["epsilon_high=0.28"]  # no effect with one update per rollout
    methods["GRPO"]["trl"].append("beta=0.0")  # the default
    monkeypatch.setattr(report.settings, "load_methods", lambda: methods)
    problems = report.settings.problems("trl", adapter, cases, report.is_right)
    assert "DAPO's loss: policy/dapo has another answer" in problems
    assert "GRPO: beta=0.0 is not needed" in problems


@pytest.mark.beside("vectors")
def test_page_lists_the_settings(report):
    assert "\n".join(report.settings.table()) in PAGE.read_text(encoding="utf-8")
