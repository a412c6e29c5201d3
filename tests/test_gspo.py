"""The functions of gspo.py against the worked example, literal loops, and the errors of other implementations."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator

import gspo
from common.harness.metrics import Metrics
from testbed import ORACLES, embedded, fill, gradients, hand_made_batch, largest_difference, ragged, totals_of

EXAMPLE = ORACLES["gspo"]
LEVELS = ["sequence", "token"]


def args_of(**options):
    return gspo.Args(**{"group_size": 4, **options})


def example(dtype=torch.float64):
    """old and new (requires grad) log-probs, mask and advantages of the worked example."""
    old, mask = ragged(EXAMPLE["old"], dtype)
    new = (old + ragged(EXAMPLE["diff"], dtype)[0]).requires_grad_()
    return old, new, mask, torch.tensor(EXAMPLE["adv"], dtype=dtype)[:, None]


def loss_of(args, advantages=None, dtype=torch.float64):
    old, new, mask, own = example(dtype)
    losses, stats = gspo.policy_loss(new, old, own if advantages is None else advantages, mask, args)
    loss = (losses * gspo.token_weights(mask, totals_of(mask, 4), args)).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    return loss, gradient, stats, mask


# The example's effects are 1e-4: in float32 its value is compared to 1e-7, a hundredth of what 1e-6 would allow.
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-7), (torch.float64, 1e-12)])
def test_oracle(level, dtype, tolerance):
    loss, gradient, stats, _ = loss_of(args_of(ratio_level=level), dtype=dtype)
    assert float(loss.detach()) == pytest.approx(EXAMPLE["loss"], abs=tolerance)
    atol = 1e-6 if dtype == torch.float32 else 1e-9
    assert torch.allclose(gradient, ragged(EXAMPLE["grad"], dtype)[0], atol=atol)
    clipped = (stats["clip_fraction_low"] | stats["clip_fraction_high"])[:, 0]
    assert clipped.tolist() == EXAMPLE["clipped"]
    assert (int(stats["clip_fraction_low"].sum()), int(stats["clip_fraction_high"].sum())) == (1, 1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_oracle_of_advantages_of_single_tokens(dtype, tolerance):
    advantages = ragged(EXAMPLE["token"]["adv"], dtype)[0]
    loss, gradient, stats, mask = loss_of(args_of(ratio_level="token"), advantages, dtype)
    assert float(loss.detach()) == pytest.approx(EXAMPLE["token"]["loss"], abs=tolerance)
    assert torch.allclose(gradient, ragged(EXAMPLE["token"]["grad"], dtype)[0], atol=tolerance)
    assert stats["clip_fraction_low"].shape == mask.shape  # counted over tokens then


def test_advantages_of_single_tokens_need_the_token_level():
    # At the sequence level each token would silently train on the row's mean advantage.
    with pytest.raises(ValueError, match="ratio_level token"):
        loss_of(args_of(), ragged(EXAMPLE["token"]["adv"], torch.float64)[0])


def literal_loss(old, new, lengths, advantages, low, high):
    """Eq. 5 and 7, row by row."""
    total = 0.0
    for row, length in enumerate(lengths):
        s = math.exp(sum(float(new[row, t] - old[row, t]) for t in range(length)) / length)
        a = float(advantages[row, 0])
        total += min(s * a, min(max(s, 1 - low), 1 + high) * a)
    return -total / len(lengths)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(5))
def test_a_literal_loop_over_rows_of_unequal_lengths(seed, level):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    old, noise = (torch.randn(12, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    new, advantages = old + 0.3 * noise, torch.randn(12, 1, generator=generator, dtype=torch.float64)
    args = args_of(clip_low=0.05, clip_high=0.1, ratio_level=level)
    losses, _ = gspo.policy_loss(new, old, advantages, mask, args)
    loss = (losses * gspo.token_weights(mask, totals_of(mask, 4), args)).sum()
    assert float(loss) == pytest.approx(literal_loss(old, new, lengths, advantages, 0.05, 0.1), abs=1e-12)


def test_each_row_has_its_own_ratio():
    # The official DCPO code takes the mean without an axis: one ratio for the whole micro-batch, and a loss of 0.
    _, _, stats, mask = loss_of(args_of())
    old, new, _, advantages = example()
    assert torch.allclose(stats["ratio_max"][:, 0].detach(), torch.tensor(EXAMPLE["s"], dtype=torch.float64), atol=1e-9)
    for row in range(4):
        alone, _ = gspo.policy_loss(new[[row]], old[[row]], advantages[[row]], mask[[row]], args_of())
        together, _ = gspo.policy_loss(new, old, advantages, mask, args_of())
        assert torch.equal(alone[0], together[row])


def test_metrics_of_the_example():
    old, new, mask, _ = example()
    _, _, stats, _ = loss_of(args_of())
    assert torch.allclose(
        stats["log_s_quantiles"][:, 0].exp(), torch.tensor([max(s, 1 / s) for s in EXAMPLE["s"]]).double(), atol=1e-9
    )
    difference = (new - old).detach()
    expected = torch.where(mask, difference.exp() - 1 - difference, 0)  # per token, of the token's own ratio
    assert torch.allclose(stats["approx_kl"], expected, atol=1e-15)


def test_the_ratio_is_the_mean_and_not_the_sum_of_logs():
    # The importance ratio of a sequence, without the 1/|o|, leaves the band with the length.
    old, mask = torch.zeros(1, 100, dtype=torch.float64), torch.ones(1, 100, dtype=torch.bool)
    _, stats = gspo.policy_loss(old + 1e-4, old, torch.ones(1, 1), mask, args_of())
    assert float(stats["ratio_max"]) == pytest.approx(math.exp(1e-4)) and not stats["clip_fraction_high"].any()


@pytest.mark.parametrize("level", LEVELS)
def test_the_ratio_has_a_gradient(level):
    # A detached s, or GSPO-token without its straight-through term, trains nothing. d loss / d l = -s A / |o|.
    old, new, mask, _ = example()
    losses, stats = gspo.policy_loss(new, old, torch.ones(4, 1), mask, args_of(clip_high=1.0, ratio_level=level))
    weights = gspo.token_weights(mask, totals_of(mask, 4), args_of())
    (gradient,) = torch.autograd.grad((losses * weights).sum(), new)
    lengths = mask.sum(dim=1, keepdim=True)
    assert torch.allclose(gradient, torch.where(mask, -stats["ratio_max"].detach() / lengths / 4, 0), atol=1e-12)


LOW, HIGH, DUAL = 0.2, 0.28, 3.0
CASES = [  # advantage, s, loss, gradient of the row's summed loss / s
    (1.0, 0.5, -0.5, -0.5, 0, 0),
    (1.0, 1.1, -1.1, -1.1, 0, 0),
    (1.0, 1.5, -1.28, 0.0, 0, 1),
    (-1.0, 0.5, 0.8, 0.0, 1, 0),
    (-1.0, 0.9, 0.9, 0.9, 0, 0),
    (-1.0, 1.5, 1.5, 1.5, 0, 0),
    (-1.0, 5.0, 3.0, 0.0, 0, 0),  # the dual clip compares s
    (1.0, 5.0, -1.28, 0.0, 0, 1),
    (0.0, 5.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("advantage, s, loss, gradient, low, high", CASES)
def test_clip_table(advantage, s, loss, gradient, low, high, level):
    # Two tokens, one far above and one far below s: the row decides, not its tokens.
    new = torch.tensor([[math.log(s) + 4, math.log(s) - 4]], dtype=torch.float64, requires_grad=True)
    args = args_of(clip_low=LOW, clip_high=HIGH, dual_clip=DUAL, ratio_level=level)
    mask, advantages = torch.tensor([[True, True]]), torch.tensor([[advantage]], dtype=torch.float64)
    losses, stats = gspo.policy_loss(new, torch.zeros(1, 2, dtype=torch.float64), advantages, mask, args)
    (losses.sum() / 2).backward()  # the weights of a row of two tokens
    assert losses[0].tolist() == pytest.approx([loss, loss], abs=1e-12)
    assert new.grad[0].tolist() == pytest.approx([gradient / 2, gradient / 2], abs=1e-12)
    assert (int(stats["clip_fraction_low"]), int(stats["clip_fraction_high"])) == (low, high)
    assert int(stats["dual_clip"]) == (advantage < 0 and gradient == 0 and not low)


@pytest.mark.parametrize("level", LEVELS)
def test_the_mean_is_clamped_and_not_its_tokens(level):
    # verl clamps log s at 10 and not from below. A token of log-ratio -60 beside one of +30 counts in full.
    old, mask = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool)
    new = torch.tensor([[30.0, -60.0], [300.0, 300.0], [-300.0, -300.0]], requires_grad=True)
    losses, stats = gspo.policy_loss(new, old, -torch.ones(3, 1), mask, args_of(ratio_level=level))
    losses.sum().backward()
    assert stats["ratio_max"][:, 0].tolist() == pytest.approx([math.exp(-15), math.exp(20), math.exp(-20)], rel=1e-5)
    assert torch.isfinite(losses).all() and torch.isfinite(new.grad).all()
    assert stats["clamped"][:, 0].tolist() == [False, True, True]
    assert (new.grad[1:] == 0).all()  # beyond the clamp there is no gradient


def test_with_one_update_it_is_grpo():
    # The documented identity: gradients of whole updates, every s_i being 1.
    results = []
    for name in ("grpo", "gspo"):
        options = dict(group_size=4, prompts_per_step=8, num_minibatches=1, kl_coef=0.0)
        module, args, tokenizer, policy = embedded(name, **options)
        batch, rewards = hand_made_batch(policy, tokenizer, args)
        batch = fill(module, batch, rewards, args)
        (step,), metrics = gradients(module, args, policy, batch)
        results.append(step)
        assert (
            metrics["policy/clip_fraction_low"]
            == metrics["policy/clip_fraction_high"]
            == metrics["policy/approx_kl"]
            == 0
        )
    assert largest_difference(*results) < 1e-6 and max(float(g.abs().max()) for g in results[0]) > 1e-3
    assert metrics["policy/log_s_p99"] == 0


@pytest.mark.parametrize("level", LEVELS)
def test_garbage_under_the_mask_changes_nothing(level):
    args = args_of(kl_coef=0.04, entropy_coef=0.01, ratio_level=level)
    old, new, mask, advantages = example()
    weights, results = gspo.token_weights(mask, totals_of(mask, 4), args), []
    for garbage in (0.0, 1e4, math.nan, math.inf):
        dirty = torch.where(mask, new.detach(), garbage).requires_grad_()
        others = [torch.where(mask, x, garbage) for x in (old, old + 0.1, old**2)]
        losses, stats = gspo.policy_loss(dirty, others[0], advantages, mask, args, others[1], others[2])
        (gradient,) = torch.autograd.grad((losses * weights).sum(), dirty)
        results.append([losses, gradient, *(torch.where(mask, s.double(), 0) for s in stats.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert (results[0][0][~mask] == 0).all()


def test_an_empty_row_is_finite_and_contributes_nothing():
    old, new, mask, advantages = example()
    mask = mask & torch.tensor([[True], [True], [False], [True]])
    losses, stats = gspo.policy_loss(new, old, advantages, mask, args_of())
    (gradient,) = torch.autograd.grad((losses * gspo.token_weights(mask, totals_of(mask, 4), args_of())).sum(), new)
    assert torch.isfinite(gradient).all() and (gradient[2] == 0).all() and (gradient[3, :5] != 0).all()
    metrics = Metrics()
    metrics.add_stats("policy", {name: stats[name] for name in ("clip_fraction_low", "clip_fraction_high")}, mask)
    assert metrics.reduce(Accelerator(cpu=True))["policy/clip_fraction_low"] == pytest.approx(
        1 / 3
    )  # of rows with tokens


@pytest.mark.parametrize(
    "change",
    [
        dict(clip_low=0.5),
        dict(clip_high=0.5),
        dict(dual_clip=1.0005),
        dict(kl_coef=0.1),
        dict(kl_coef=0.04, kl_estimator="k2"),
        dict(entropy_coef=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_every_option_of_the_loss_changes_it(change, level):
    old, mask = torch.zeros(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.bool)
    new = old + torch.tensor([[0.1], [-0.1], [0.2], [-0.2]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64)

    def loss(**options):
        args = args_of(ratio_level=level, **options)
        ref = old - 0.5 if args.kl_coef else None
        return float(gspo.policy_loss(new, old, advantages, mask, args, ref, torch.ones(4, 3))[0].sum())

    base = dict(kl_coef=0.04) if "kl_estimator" in change else {}
    assert abs(loss(**base) - loss(**change)) > 1e-3


def test_ratio_level_changes_the_gradient_only_with_advantages_of_single_tokens():
    sequence, token = (loss_of(args_of(ratio_level=level)) for level in LEVELS)
    assert torch.allclose(sequence[1], token[1], atol=1e-12)
    advantages = ragged(EXAMPLE["token"]["adv"], torch.float64)[0]
    assert not torch.allclose(loss_of(args_of(ratio_level="token"), advantages)[1], token[1], atol=1e-3)


def test_the_defaults_are_the_papers_and_not_grpos():
    # At 0.2 a sequence is never clipped: it would be another algorithm under this name.
    args = gspo.Args()
    assert (args.clip_low, args.clip_high, args.num_minibatches, args.kl_coef) == (3e-4, 4e-4, 4, 0.0)
    _, gradient, stats, mask = loss_of(args_of(clip_low=0.2, clip_high=0.2))
    assert not (stats["clip_fraction_low"] | stats["clip_fraction_high"]).any() and (gradient[mask] != 0).all()


def test_quantiles_are_those_of_all_rows_with_tokens_in_every_micro_batch():
    values = torch.rand(37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.rand(37, 1, generator=torch.Generator().manual_seed(1)) > 0.2
    for size in (37, 10, 1):
        metrics = Metrics()
        for part in range(0, 37, size):
            rows = slice(part, part + size)
            metrics.add_stats("policy", {"log_s_quantiles": values[rows, None]}, mask[rows].expand(-1, 5))
        result = metrics.reduce(Accelerator(cpu=True))
        expected = {f"policy/log_s_p{p}": np.percentile(values[mask[:, 0]], p) for p in (50, 90, 99)}
        assert result == pytest.approx(expected, abs=1e-15)
    metrics = Metrics()
    metrics.add_stats("policy", {"log_s_quantiles": values[:2, None]}, torch.zeros(2, 5, dtype=torch.bool))
    assert metrics.reduce(Accelerator(cpu=True)) == {}  # nothing to count: left out
