"""grpo.py and what other scripts share with it: defaults, the clip table, and masking.

Vectors and whole updates compare advantages, losses and weights with other implementations.
"""

import math

import pytest
import torch
from accelerate import Accelerator

import grpo
from common.masked import Means
from common.run import add_rewards
from small_run import samples_of
from testbed import b1, script, totals_of


def args_of(**options):
    return grpo.Args(**{"group_size": 4, **options})


def advantages(rewards, dtype=torch.float64, **options):
    found = grpo.compute_advantages(torch.tensor(rewards, dtype=dtype), args_of(**options))
    assert found.shape == (len(rewards), 1)
    return found[:, 0].tolist()


DEFAULTS = {
    "grpo": dict(clip_low=0.2, clip_high=0.2, kl_coef=0.04, kl_estimator="k3", normalize_std=True),
    "dr_grpo": dict(clip_low=0.2, clip_high=0.2, kl_coef=0.0, normalize_std=False),
    "dapo": dict(clip_low=0.2, clip_high=0.28, kl_coef=0.0, overlong="soft", eval_top_p=0.7),
    "gspo": dict(clip_low=3e-4, clip_high=4e-4, kl_coef=0.0, ratio_level="sequence"),  # at 0.2 no sequence is clipped
    "dcpo": dict(clip_low=0.16, clip_high=0.2, max_ratio=10.0, kl_coef=0.0),
    "ppo": dict(clip_low=0.2, clip_high=0.2, kl_coef=0.0, gamma=1.0, gae_lambda=1.0),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    args = script(name).Args()
    assert {option: getattr(args, option) for option in DEFAULTS[name]} == DEFAULTS[name]
    assert (args.num_epochs, args.num_minibatches) == (1, 1 if name == "grpo" else 4)  # with one update no clip acts


# --- advantages ---


def test_groups_are_adjacent_rows():
    # nanoGRPO, R-1V#67: rewards grouped across prompts. Group 0 is rows 0-3: constant inside, different between.
    assert advantages([0.0] * 4 + [1.0] * 4) == [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_without_std_rewards_are_centred(dtype):
    # With integer rewards they were truncated to 0, 0, 0 and 1.
    assert advantages([1, 0, 0, 2], dtype, normalize_std=False) == [0.25, -0.75, -0.75, 1.25]


def test_rewards_that_differ_by_rounding_agree():
    # Weighted terms: 0.1 + 0.2 and 0.3. With std_eps 0 the advantages were -1.2.
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.3, 0.3, 0.3001, 0.3, 0.3]
    found, metrics = advantages(rewards, std_eps=0.0), Means()
    assert found[:4] == [0.0] * 4 and all(found[4:])
    accelerator = Accelerator(cpu=True)
    add_rewards(metrics, samples_of(rewards), 4, accelerator)
    assert metrics.reduce(accelerator)["advantage/zero_groups"] == 0.5


# --- the loss ---

CASES = [  # clips at 0.2 and 0.28: advantage, ratio, loss, gradient by the log-prob, clip_low, clip_high
    (1.0, 0.5, -0.5, -0.5, 0, 0),  # good and already less likely: pull up, never clipped
    (1.0, 1.1, -1.1, -1.1, 0, 0),
    (1.0, 1.25, -1.25, -1.25, 0, 0),
    (1.0, 1.5, -1.28, 0.0, 0, 1),  # good and up enough
    (-1.0, 0.5, 0.8, 0.0, 1, 0),  # bad and down enough
    (-1.0, 0.9, 0.9, 0.9, 0, 0),
    (-1.0, 1.5, 1.5, 1.5, 0, 0),  # bad and more likely: push down with full force (inverted in six published scripts)
    (-1.0, 5.0, 5.0, 5.0, 0, 0),  # ... however far
    (1.0, 5.0, -1.28, 0.0, 0, 1),
    (0.0, 5.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize("name, dual", [("grpo", 0), ("dr_grpo", 0), ("dapo", 0), ("ppo", 0), ("ppo", 3.0)])
def test_clip_table(name, dual):
    # trl#3032, RL2#21, reasoning-from-scratch: clip inverted for A < 0, clip fraction by |r - 1| alone.
    module = script(name)
    options = dict(dual_clip=dual) if dual else {}
    args, mask = module.Args(clip_low=0.2, clip_high=0.28, kl_coef=0.0, **options), torch.tensor([[True]])
    for advantage, ratio, loss, gradient, low, high in CASES:
        dually_clipped = dual and (advantage, ratio) == (-1.0, 5.0)
        if dually_clipped:  # which must not touch a positive advantage
            loss, gradient = dual, 0.0
        new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        losses, stats = module.policy_loss(new, new.detach() * 0, new.detach() * 0 + advantage, mask, args)
        losses.sum().backward()
        assert (losses.item(), new.grad.item()) == pytest.approx((loss, gradient), abs=1e-12), (advantage, ratio)
        assert (int(stats["clip_fraction_low"]), int(stats["clip_fraction_high"])) == (low, high)
        assert bool(stats.get("dual_clip", False)) == bool(dually_clipped)


GARBAGE = [(name, {}) for name in DEFAULTS]
GARBAGE += [("gspo", dict(ratio_level="token")), ("ppo", dict(dual_clip=3.0, entropy_coef=0.01))]


@pytest.mark.parametrize("name, options", GARBAGE, ids=str)
def test_garbage_under_the_mask_changes_nothing(name, options):
    # Padding leaks: loss, gradient and every diagnostic with NaN, inf or 1e4 under the mask.
    module = script(name)
    args = module.Args(group_size=4, kl_coef=0.04, **options)
    old, new, ref, mask = b1()
    signs, entropy = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]).double(), new.detach() ** 2
    weights, results = module.token_weights(mask, totals_of(mask, 4), args), []
    for garbage in (0.0, 1e4, -1e4, math.nan, math.inf, -math.inf):
        columns = (new, old, ref, entropy) if "entropy_coef" in options else (new, old, ref)
        dirty, *others = (torch.where(mask, x.detach(), garbage) for x in columns)
        losses, stats = module.policy_loss(dirty.requires_grad_(), others[0], signs, mask, args, *others[1:])
        (gradient,) = torch.autograd.grad((losses * weights).sum(), dirty)
        results.append([losses, gradient, *(torch.where(mask, s.double(), 0) for s in stats.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert (results[0][0][~mask] == 0).all() and results[0][1].abs().max() > 1e-3
