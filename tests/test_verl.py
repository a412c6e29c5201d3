"""The losses, averages and clip metrics of the scripts against those of verl (helpers/as_in_verl.py)."""

import pytest
import torch

import dapo
import dr_grpo
import grpo
import ppo
from as_in_verl import ADVANTAGES, averaged, pg_losses
from common.masked import log_ratio
from testbed import b1, totals_of

CLIPS = dict(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
MODULES = [ppo, grpo, dapo, dr_grpo]


@pytest.fixture(params=["B1", "random"])
def batch(request):
    """Old and new log-probs, advantages and the mask: of the specification's example, or far off the old policy."""
    if request.param == "B1":
        old, new, _, mask = b1()
        return old, new, torch.tensor(ADVANTAGES).double(), mask
    old, step, signs = torch.rand(3, 16, 6, generator=torch.Generator().manual_seed(0)).double()
    return -old, 4 * step - 2 - old, signs - 0.5, torch.arange(6) < torch.tensor([[6], [3], [1], [5]]).repeat(4, 1)


@pytest.mark.parametrize("module", MODULES)
def test_loss_and_clip_metrics_are_those_of_verl(module, batch):
    """`pg_clipfrac` is our two clip fractions together, and `pg_clipfrac_lower` is dual clip, no lower bound."""
    old, new, advantages, mask = batch
    found, stats = module.policy_loss(new, old, advantages, mask, module.Args(**CLIPS))
    losses, clipped, lower = pg_losses(old, new, advantages, 0.2, 0.28, 3.0)
    torch.testing.assert_close(found[mask], losses[mask])
    low, high = stats["clip_fraction_low"][mask], stats["clip_fraction_high"][mask]
    assert (low | high).tolist() == clipped[mask].bool().tolist() and not (low & high).any()
    assert stats["dual_clip"][mask].tolist() == lower[mask].bool().tolist() and lower[mask].any() and low.any()
    assert not (stats["dual_clip"][mask] & low).any()


def test_the_kls_to_the_old_policy_differ(batch):
    """`ppo_kl` is k1, ours is k3: both estimate KL(old, new), and differ by the mean of the ratio less 1."""
    old, new, advantages, mask = batch
    _, stats = ppo.policy_loss(new, old, advantages, mask, ppo.Args())
    ppo_kl, approx_kl = (old - new)[mask].mean(), stats["approx_kl"][mask].mean()
    assert approx_kl.item() == pytest.approx((ppo_kl + log_ratio(new, old, mask)[mask].exp().mean() - 1).item())
    assert approx_kl > 0 and approx_kl > 1.5 * ppo_kl.abs()


@pytest.mark.parametrize(
    "module, mode, factor",
    [
        (ppo, "token-mean", 1),
        (dapo, "token-mean", 1),
        (grpo, "seq-mean-token-mean", 1),
        (dr_grpo, "seq-mean-token-sum-norm", "rows"),  # which Dr. GRPO's mean over rows has, and verl's sum has not
        (dr_grpo, "seq-mean-token-sum", "constant"),
    ],
)
def test_averages_are_those_of_verl(module, mode, factor, batch):
    old, new, advantages, mask = batch
    args = module.Args(group_size=4, max_new_tokens=8)
    losses, _ = module.policy_loss(new, old, advantages, mask, args)
    found = (losses * module.token_weights(mask, totals_of(mask, 4), args)).sum()
    factor = {"rows": len(mask), "constant": 8}.get(factor, 1)
    torch.testing.assert_close(factor * found, averaged(losses, mask, mode, scale=8))


def test_what_the_source_of_verl_gave():
    """verl's own functions, run on B1: PPO with dual clip, then GRPO's losses by its four averages."""
    old, new, _, mask = b1()
    losses, clipped, lower = pg_losses(old, new, torch.tensor(ADVANTAGES).double(), 0.2, 0.2, 3.0)
    found = averaged(losses, mask, "token-mean"), clipped[mask].mean(), lower[mask].mean(), (old - new)[mask].mean()
    assert [round(value.item(), 6) for value in found] == [0.207309, 0.214286, 0.071429, -0.095]
    advantages = grpo.compute_advantages(torch.tensor([1.0, 0, 0, 1]).double(), grpo.Args(group_size=4))
    losses, _, _ = pg_losses(old, new, advantages.expand_as(new), 0.2, 0.2, float("inf"))
    modes = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
    assert [round(averaged(losses, mask, mode, 8).item(), 6) for mode in modes] == [
        0.267955,
        0.467156,
        0.937841,
        0.46892,
    ]
