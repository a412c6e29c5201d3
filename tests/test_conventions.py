"""Other people's reference for these losses agrees with the scripts. See docs/conventions.md."""

import dataclasses

import pytest

from testbed import script, totals_of

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
