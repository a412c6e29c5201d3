"""The functions of grpo.py against the worked examples, literal loops, hand-made tables and exact gradients."""

import contextlib
import math

import pytest
import torch
from accelerate import Accelerator

import grpo
from common.harness.metrics import Metrics
from testbed import ORACLES, SCRIPTS, b1, embedded, fill, hand_made_batch, ragged, script, totals_of

GRPO = ORACLES["grpo"]


def args_of(**options):
    return grpo.Args(**{"group_size": 4, **options})


def loss_of(args, dtype=torch.float64, advantages=None, with_ref=True):
    old, new, ref, mask = b1(dtype)
    if advantages is None:
        advantages = grpo.compute_advantages(torch.tensor(ORACLES["B1"]["R01"], dtype=dtype), args).to(dtype)
    losses, stats = grpo.policy_loss(new, old, advantages, mask, args, ref if with_ref and args.kl_coef else None)
    return (losses * grpo.token_weights(mask, totals_of(mask, 4), args)).sum(), losses, stats, new, mask


# --- advantages ---


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("rewards", [(1, 0, 0, 1), (1, 0, 0, 0), (0.3, -0.7, 2.0, 0.1)])
def test_advantages_equal_their_definition(rewards, ddof, eps):
    mean = sum(rewards) / 4
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (4 - ddof))
    advantages = grpo.compute_advantages(
        torch.tensor(rewards, dtype=torch.float64), args_of(std_ddof=ddof, std_eps=eps)
    )
    assert advantages.shape == (4, 1)
    assert advantages[:, 0].tolist() == pytest.approx([(r - mean) / (std + eps) for r in rewards], abs=1e-12)


def test_advantages_of_the_oracle():
    advantages = grpo.compute_advantages(torch.tensor([1.0, 0, 0, 1], dtype=torch.float64), args_of())
    assert advantages[:, 0].tolist() == pytest.approx(GRPO["adv"], abs=1e-9)


def test_advantages_of_whole_numbers_are_fractions():
    # They were cut to 0, 0, 0 and 1.
    advantages = grpo.compute_advantages(torch.tensor([1, 0, 0, 2]), args_of(normalize_std=False))
    assert advantages[:, 0].tolist() == [0.25, -0.75, -0.75, 1.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.3, 1e6 + 0.1])
def test_a_group_that_agrees_has_advantage_exactly_zero(value, dtype):
    # The float32 standard deviation of six rewards of 0.3 is 3.3e-8: verl then gives 0.029, others 0.9.
    rewards = torch.tensor([value] * 6 + [0.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=dtype)
    advantages = grpo.compute_advantages(rewards, args_of(group_size=6))
    assert (advantages[:6] == 0).all() and (advantages[6:] != 0).all()


def test_rewards_that_differ_by_rounding_agree():
    # Weighted parts: 0.1 + 0.2 beside 0.3. With std_eps 0 the advantages were -1.2.
    rewards = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3, 0.3, 0.3001, 0.3, 0.3], dtype=torch.float64)
    advantages = grpo.compute_advantages(rewards, args_of(std_eps=0.0))
    assert (advantages[:4] == 0).all() and (advantages[4:] != 0).all()
    metrics = Metrics()
    metrics.add_rewards(rewards, 4)
    assert metrics.reduce(Accelerator(cpu=True))["advantage/zero_groups"] == 0.5


def test_advantages_are_invariant_to_scale_and_shift():
    rewards = torch.tensor([0.1, 0.4, 0.2, 0.9], dtype=torch.float64)
    args = args_of(std_eps=0.0)
    shifted = grpo.compute_advantages(3 * rewards - 7, args)
    assert torch.allclose(shifted, grpo.compute_advantages(rewards, args), atol=1e-12)


def test_each_group_has_its_own_mean_and_deviation():
    # Batch statistics give every group the others' mean: groups that agree hide it, these do not.
    groups = [(1.0, 0.0, 0.0, 1.0), (3.0, 5.0, 4.0, 9.0)]
    advantages = grpo.compute_advantages(torch.tensor(groups, dtype=torch.float64).flatten(), args_of())
    for group, found in zip(groups, advantages.view(2, 4).tolist(), strict=True):
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        assert found == pytest.approx([(r - mean) / (std + 1e-6) for r in group], abs=1e-12)


def test_groups_are_adjacent_rows():
    # nanoGRPO, R-1V#67: rewards grouped across prompts. Group 0 is rows 0-3: constant inside, different between.
    rewards = torch.tensor([0.0] * 4 + [1.0] * 4)
    assert (grpo.compute_advantages(rewards, args_of()) == 0).all()


def test_without_std_the_advantage_is_the_centred_reward():
    advantages = grpo.compute_advantages(
        torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), args_of(normalize_std=False)
    )
    assert advantages[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]


# --- the loss ---


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_oracle_values(dtype, tolerance):
    args = args_of()
    loss, *_ = loss_of(args, dtype)
    assert float(loss) == pytest.approx(GRPO["total_beta004"], abs=tolerance)
    loss, losses, _, _, mask = loss_of(args_of(kl_coef=0.0), dtype)
    assert float(loss) == pytest.approx(GRPO["pg"], abs=tolerance)
    expected, _ = ragged(GRPO["token_loss"], dtype)
    assert torch.allclose(losses, expected, atol=tolerance, rtol=tolerance)
    old, new, ref, mask = b1(dtype)
    k3 = grpo.policy_loss(new, old, torch.zeros(4, 1, dtype=dtype), mask, args, ref)[1]["kl_ref"]
    assert torch.allclose(k3, ragged(GRPO["k3"], dtype)[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_oracle_gradients(dtype, tolerance):
    loss, _, _, new, _ = loss_of(args_of(kl_coef=0.0), dtype)
    loss.backward()
    assert torch.allclose(new.grad, ragged(GRPO["grad_pg"], dtype)[0], atol=tolerance)
    loss, _, _, new, _ = loss_of(args_of(kl_coef=1.0), dtype, torch.zeros(4, 1, dtype=dtype))
    loss.backward()
    assert torch.allclose(new.grad, ragged(GRPO["grad_kl_only"], dtype)[0], atol=tolerance)


@pytest.mark.parametrize("estimator, mean", [("k1", 0.180875), ("k2", 0.124651), ("k3", 0.105441996)])
def test_kl_estimator_in_the_loss(estimator, mean):
    loss, *_ = loss_of(args_of(kl_coef=1.0, kl_estimator=estimator), advantages=torch.zeros(4, 1, dtype=torch.float64))
    assert float(loss) == pytest.approx(mean, abs=1e-6)


def test_the_diagnostics_of_batch_b1():
    old, new, _, mask = b1()
    _, _, stats, _, _ = loss_of(args_of(kl_coef=0.0))
    d = torch.where(mask, new.detach() - old, 0)
    assert torch.allclose(stats["approx_kl"], d.exp() - 1 - d, atol=1e-12)  # k3 of KL(old || new), not k1 nor k2
    assert torch.allclose(stats["ratio_max"], d.exp(), atol=1e-12)


LOW, HIGH, DUAL = 0.2, 0.28, 3.0
CASES = [  # advantage, ratio, loss, gradient with respect to the log-prob, clip_low, clip_high
    (1.0, 0.5, -0.5, -0.5, 0, 0),  # good and already less likely: pull up, never clipped
    (1.0, 1.1, -1.1, -1.1, 0, 0),
    (1.0, 1.5, -1.28, 0.0, 0, 1),  # good and up enough
    (-1.0, 0.5, 0.8, 0.0, 1, 0),  # bad and down enough
    (-1.0, 0.9, 0.9, 0.9, 0, 0),
    (-1.0, 1.5, 1.5, 1.5, 0, 0),  # bad and more likely: push down with full force (inverted in six published scripts)
    (-1.0, 5.0, 3.0, 0.0, 0, 0),  # ... until the dual clip
    (1.0, 5.0, -1.28, 0.0, 0, 1),  # which must not touch a positive advantage
    (0.0, 5.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize("advantage, ratio, loss, gradient, low, high", CASES)
def test_clip_table(advantage, ratio, loss, gradient, low, high):
    # trl#3032, RL2#21, reasoning-from-scratch: clip inverted for A < 0, clip fraction by |r - 1| alone.
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    args = args_of(clip_low=LOW, clip_high=HIGH, dual_clip=DUAL, kl_coef=0.0)
    mask, advantages = torch.tensor([[True]]), torch.tensor([[advantage]], dtype=torch.float64)
    losses, stats = grpo.policy_loss(new, torch.zeros(1, 1, dtype=torch.float64), advantages, mask, args)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=1e-12)
    assert new.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert (int(stats["clip_fraction_low"]), int(stats["clip_fraction_high"])) == (low, high)
    assert int(stats["dual_clip"]) == (advantage < 0 and gradient == 0 and not low)  # the only other way to have none


def test_without_dual_clip_the_ratio_is_uncapped_for_negative_advantages():
    new = torch.tensor([[math.log(5.0)]], dtype=torch.float64)
    zeros, mask = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[True]])
    losses, stats = grpo.policy_loss(new, zeros, zeros - 1, mask, args_of(kl_coef=0.0))
    assert losses.item() == pytest.approx(5.0) and not stats["dual_clip"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_tokens_beyond_the_clamp_are_counted(name):
    # Of gspo the ratio of the row. One row of two is beyond it, and of the reference one token of four.
    old, mask = torch.zeros(2, 3), torch.tensor([[True, True, False]] * 2)
    new = torch.tensor([[25.0, 25.0, 0.0], [15.0, 15.0, math.nan]])
    ref = new + torch.tensor([[0.0, 0.0, 99.0], [-21.0, 15.0, 99.0]])
    module, metrics = script(name), Metrics()
    _, stats = module.policy_loss(new, old, torch.zeros(2, 1), mask, module.Args(), ref)
    metrics.add_stats("policy", stats, mask)
    result = metrics.reduce(Accelerator(cpu=True))
    assert (result["policy/clamped"], result["policy/clamped_ref"]) == (0.5, 0.25)


def test_a_huge_ratio_stays_finite():
    new = torch.tensor([[300.0]], requires_grad=True)
    losses, _ = grpo.policy_loss(
        new, torch.zeros(1, 1), -torch.ones(1, 1), torch.tensor([[True]]), args_of(kl_coef=0.0)
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(new.grad).all()


def test_one_update_has_the_gradient_of_reinforce():
    # The form without ratio and clip, -A log pi, has the same gradient when old log-probs are those of the update.
    args = args_of(kl_coef=0.0, normalize_std=False)
    _, new, _, mask = b1()
    advantages = grpo.compute_advantages(torch.tensor([1.0, 0, 0, 1], dtype=torch.float64), args)
    weights = grpo.token_weights(mask, totals_of(mask, 4), args)
    losses, stats = grpo.policy_loss(new, new.detach(), advantages, mask, args)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), new)
    (reinforce,) = torch.autograd.grad((-advantages * new * weights).sum(), new)
    assert torch.allclose(gradient, reinforce, atol=1e-12) and gradient.abs().max() > 0.01
    assert float((losses * weights).sum()) == pytest.approx(0.0, abs=1e-12)  # advantages of a group sum to 0
    assert (
        stats["approx_kl"].abs().max() == 0
        and not stats["clip_fraction_low"].any()
        and not stats["clip_fraction_high"].any()
    )


def test_entropy_bonus_lowers_the_loss_by_its_weighted_mean():
    old, new, _, mask = b1()
    entropy = torch.rand(mask.shape, dtype=torch.float64)
    args, zeros = args_of(kl_coef=0.0, entropy_coef=0.1), torch.zeros(4, 1, dtype=torch.float64)
    losses, _ = grpo.policy_loss(new, old, zeros, mask, args, None, entropy)
    assert torch.allclose(losses, torch.where(mask, -0.1 * entropy, 0))


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_garbage_under_the_mask_changes_nothing(kl_coef):
    # Padding leaks: loss, gradient and every diagnostic with NaN, inf or 1e4 under the mask.
    args = args_of(kl_coef=kl_coef, entropy_coef=0.01)
    old, new, ref, mask = b1()
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64)
    weights = grpo.token_weights(mask, totals_of(mask, 4), args)
    results = []
    for garbage in (0.0, 1e4, math.nan, math.inf):
        dirty = torch.where(mask, new.detach(), garbage).requires_grad_()
        others = [torch.where(mask, x, garbage) for x in (old, ref if kl_coef else old, new.detach() ** 2)]
        losses, stats = grpo.policy_loss(
            dirty, others[0], advantages, mask, args, others[1] if kl_coef else None, others[2]
        )
        (gradient,) = torch.autograd.grad((losses * weights).sum(), dirty)
        results.append([losses, gradient, *(torch.where(mask, s.double(), 0) for s in stats.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert (results[0][0][~mask] == 0).all()


@pytest.mark.parametrize(
    "change, with_ref",
    [
        (dict(clip_low=0.5), False),
        (dict(clip_high=0.5), False),
        (dict(dual_clip=2.0), False),
        (dict(kl_coef=0.1), True),
        (dict(kl_coef=0.04, kl_estimator="k2"), True),
        (dict(kl_coef=0.04, kl_estimator="k1"), True),
        (dict(entropy_coef=0.1), False),
    ],
)
def test_every_option_of_the_loss_changes_it(change, with_ref):
    # verl's `clip_ratio` is dead; NeMo-RL#3792: a configured term that contributes exactly zero.
    old, new, ref, mask = b1()
    advantages, entropy = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=torch.float64), torch.rand(mask.shape)

    def loss(**options):
        args = args_of(**options)
        return grpo.policy_loss(new, old, advantages, mask, args, ref if with_ref else None, entropy)[0].sum()

    base = dict(kl_coef=0.04) if with_ref else dict(kl_coef=0.0)
    assert abs(float(loss(**base)) - float(loss(**(base | change)))) > 1e-3


# --- the weights ---


def test_weights_are_the_mean_over_rows_of_the_mean_over_tokens():
    _, _, _, mask = b1()
    losses = torch.rand(mask.shape, dtype=torch.float64)
    expected = 0.0
    for row, lengths in enumerate(mask.sum(dim=1).tolist()):
        expected += sum(float(losses[row, t]) for t in range(lengths)) / lengths / 4
    weights = grpo.token_weights(mask, totals_of(mask, 4), args_of())
    assert float((losses * weights).sum()) == pytest.approx(expected, abs=1e-12)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_an_empty_row_has_weight_zero_and_still_counts():
    # verl left it out of B before its denominators were global, TRL counts it: it must not re-weight the others.
    mask = torch.tensor([[True, True], [False, False]])
    weights = grpo.token_weights(mask, totals_of(mask, 2), args_of(group_size=2))
    assert weights.tolist() == [[0.25, 0.25], [0.0, 0.0]]


# --- the update ---


def test_the_old_log_probs_are_kept_over_epochs_of_one_minibatch():
    options = dict(group_size=4, prompts_per_step=8, num_minibatches=1, num_epochs=2, kl_coef=0.0)
    module, args, tokenizer, policy = embedded("grpo", **options)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    batch = fill(module, batch, rewards, args)
    optimizer, metrics, accelerator = torch.optim.SGD(policy.parameters(), lr=0.5), Metrics(), Accelerator(cpu=True)
    module.update(accelerator, policy, None, optimizer, batch, 1, args, metrics)
    assert metrics.reduce(accelerator)["policy/ratio_max"] > 1.01


# --- the evaluation ---


class SecondOfTwo:
    """In the place of an Accelerator; the first process has nothing to add."""

    process_index, num_processes, device = 1, 2, torch.device("cpu")

    def autocast(self):
        return contextlib.nullcontext()

    def reduce(self, tensor, how):
        return tensor


def test_an_evaluation_by_hand(monkeypatch):
    # Seven prompts on two processes: the second one has 1, 3, 5 and a filler; of 3 no answer is known.
    correct = torch.tensor([[1, 0, 0, 1], [math.nan] * 4, [0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    rewards, lengths = torch.arange(16, dtype=torch.float64), torch.arange(1, 17)[:, None]
    seen = []

    def rollout(model, prompts, n, temperature, top_p, seed, args):
        seen.append((prompts, n, temperature, top_p, seed))
        return {"completion_mask": torch.arange(16) < lengths, "truncated": torch.zeros(16, dtype=torch.bool)}

    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "completion_texts", lambda tokenizer, batch: [*"abcdefghijklmnop"])
    monkeypatch.setattr(grpo, "compute_rewards", lambda *arguments: (rewards, correct.flatten(), {"accuracy": rewards}))
    args = grpo.Args(seed=3, temperature=1.3, eval_samples=4, eval_k=2, eval_temperature=0.7, eval_top_p=0.5)
    result, shown = grpo.evaluate(SecondOfTwo(), None, None, [], [0, 1, 2, 3, 4, 5, 6], args)
    assert seen == [([1, 3, 5, 0], 4, 0.7, 0.5, (3, 1, 0, 0))]
    assert result == pytest.approx({
        "eval/pass@1": (1 / 2 + 1 / 4) / 2,
        "eval/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(wrong, 2) / C(4, 2)
        "eval/reward": sum(range(12)) / 12,
        "eval/length": sum(range(1, 13)) / 12,
    })  # fmt: skip
    assert shown == ([1, 3, 5, 0], [*"abcdefghijklmnop"], rewards, {"accuracy": rewards})


def test_an_evaluation_shows_four_of_its_prompts(monkeypatch):
    # Not the texts and token ids of all: they would stay in memory until the next evaluation.
    batch = {"completion_mask": torch.ones(12, 3, dtype=torch.bool), "truncated": torch.zeros(12, dtype=torch.bool)}
    monkeypatch.setattr(grpo, "rollout", lambda *arguments: batch)
    monkeypatch.setattr(grpo, "completion_texts", lambda tokenizer, batch: [*"abcdefghijkl"])
    monkeypatch.setattr(grpo, "compute_rewards", lambda *arguments: (torch.zeros(12), None, {}))
    _, shown = grpo.evaluate(SecondOfTwo(), None, None, [], range(12), grpo.Args(eval_samples=2, eval_k=1))
    assert shown[:2] == ([1, 3, 5, 7], [*"abcdefgh"])
