"""docs/conventions.md: what other people's code computes. Each test needs an extra package."""

import dataclasses
import pathlib

import pytest

from testbed import ROOT, script, totals_of

WIDTH = 16  # of dr_grpo.py's constant denominator


def mean_loss(name):
    """The loss of one optimizer step by a script, as a function of the four tensors that polgrad draws."""
    module = script(name)
    args = module.Args(max_new_tokens=WIDTH)

    def loss(logprobs, old_logprobs, advantages, response_mask):
        losses, _ = module.policy_loss(logprobs, old_logprobs, advantages[:, None], response_mask, args)
        totals = totals_of(response_mask, group_size=1)
        return (losses * module.token_weights(response_mask, totals, args)).sum()

    return loss


@pytest.mark.needs("polgrad")
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "ppo"])
def test_polgrad_finds_the_loss_and_its_gradient_the_same(name):
    """A clip on the wrong side, another average, or a value behind the mask that reaches the loss."""
    from polgrad import ALGORITHMS
    from polgrad.testing import assert_conforms

    reference = dataclasses.replace(ALGORITHMS[name].loss, norm_len=WIDTH)
    report = assert_conforms(mean_loss(name), reference, n_cases=64, loss_rtol=1e-12, grad_rtol=1e-12)
    assert report.n_cases == 64


@pytest.mark.beside("vectors")
@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("trl", "polgrad")],
)
def test_each_difference_of_a_library_has_a_reason(monkeypatch, library):
    """An adapter that no longer fits its library, or a case that changed under the page."""
    monkeypatch.syspath_prepend(str(ROOT / "vectors" / "libraries"))
    import report

    adapter = report.adapter_of(library, pathlib.Path("unused"))
    verdicts = report.verdicts_of(adapter, report.check.load_cases())
    assert report.unexplained(library, verdicts) == []
    assert verdicts["splits/dapo-2"][0] == {"trl": report.SAME, "polgrad": report.OTHER}[library]
