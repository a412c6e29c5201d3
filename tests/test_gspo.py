"""gspo.py: one ratio for a sequence, its clip, and its clamp."""

import math

import pytest
import torch
from accelerate import Accelerator

import gspo
from common.masked import Means
from testbed import gradients, largest_difference, problem, ragged, totals_of


def args_of(**options):
    return gspo.Args(**{"group_size": 4, **options})


def example():
    """Old and new (requires grad) log-probs of four rows, their mask and advantages; two of the rows are clipped."""
    old, mask = ragged([[-0.5, -1.2, -0.3], [-2.0, -0.1, -0.7, -1.5], [-0.9, -3.0], [-0.05, -0.6, -1.1, -0.2, -0.4]])
    change = [[9, -3, 9], [4, -10, 2, -12], [12, -4], [-10, 5, 0, 6, 4]]
    new = (old + 1e-4 * ragged(change)[0]).requires_grad_()
    return old, new, mask, torch.tensor([[0.9], [-0.9], [-0.9], [0.9]], dtype=torch.float64)


OF_TOKENS = [[0.5, -0.3, 1], [-1, 0.4, -0.6, 0.2], [-1.2, -0.7], [0.9, 0.9, -0.1, 0.3, 0.2]]  # their advantages


def test_clip_fractions_by_token_advantages():
    old, new, mask, _ = example()
    advantages = ragged(OF_TOKENS)[0]
    _, stats = gspo.policy_loss(new, old, advantages, mask, args_of(ratio_level="token"))
    assert stats["clip_fraction_low"].shape == stats["clip_fraction_high"].shape == mask.shape


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_clamp_is_on_the_mean(level):
    # verl clamps log s at 10 and not from below. A token of log-ratio -60 beside one of +30 counts in full.
    old, mask = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool)
    new = torch.tensor([[30.0, -60.0], [300.0, 300.0], [-300.0, -300.0]], requires_grad=True)
    losses, stats = gspo.policy_loss(new, old, -torch.ones(3, 1), mask, args_of(ratio_level=level))
    losses.sum().backward()
    assert stats["ratio_max"][:, 0].tolist() == pytest.approx([math.exp(-15), math.exp(20), math.exp(-20)], rel=1e-5)
    assert stats["log_s"][:, 0].tolist() == [15, 300, 300]  # the ratio is 1 in both directions
    assert torch.isfinite(losses).all() and torch.isfinite(new.grad).all()
    assert (new.grad[1:] == 0).all()  # beyond the clamp there is no gradient


def test_one_update_equals_grpo():
    # The documented identity: gradients of whole updates, every s_i being 1.
    results = []
    for name in ("grpo", "gspo"):
        module, args, lm, _, batch = problem(name, kl_coef=0.0)
        (step,), metrics = gradients(module, args, lm, batch)
        results.append(step)
    assert largest_difference(*results) < 1e-6 and max(float(g.abs().max()) for g in results[0]) > 1e-3
    assert metrics["policy/log_s"] == 0


def test_an_empty_row_has_no_gradient():
    old, new, mask, advantages = example()
    mask = mask & torch.tensor([[True], [True], [False], [True]])
    losses, stats = gspo.policy_loss(new, old, advantages, mask, args_of())
    (gradient,) = torch.autograd.grad((losses * gspo.token_weights(mask, totals_of(mask, 4), args_of())).sum(), new)
    assert torch.isfinite(gradient).all() and (gradient[2] == 0).all() and (gradient[3, :5] != 0).all()
    metrics = Means()
    metrics.add("policy/clip_fraction_low", stats["clip_fraction_low"], mask)
    low = metrics.reduce(Accelerator(cpu=True))["policy/clip_fraction_low"]
    assert low == pytest.approx(1 / 3)  # rows with tokens
