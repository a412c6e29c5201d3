"""The functions of ppo.py against the worked examples, their definitions, hand-made tables and exact gradients."""

import json
import math
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoTokenizer

import ppo
import reward_model
from common.errors import InputError
from common.harness.embedded import EMBEDDED
from common.harness.metrics import Metrics
from common.masked import moments
from small_models import LLAMA4, random_batch, random_policy, save_reward_model
from testbed import (
    ORACLES,
    b1,
    embedded,
    gradients,
    hand_made_batch,
    largest_difference,
    metric_rows,
    ragged,
    totals_of,
    trainable,
)

GAE, POLICY, VALUE = ORACLES["gae"], ORACLES["ppo_policy"], ORACLES["value_loss"]


def args_of(**options):
    return ppo.Args(**options)


def row(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


# --- rewards of tokens ---


def test_shaped_rewards_of_the_oracle():
    mask = torch.ones(1, 4, dtype=torch.bool)
    kl = row(GAE["old"]) - row(GAE["ref"])
    shaped = ppo.shape_rewards(row(GAE["score"])[0:1].view(1), torch.tensor([False]), kl, mask, args_of(), GAE["beta"])
    assert shaped[0].tolist() == pytest.approx(GAE["rewards"], abs=1e-12)  # the KL of the last token is not lost


def test_the_reward_stands_on_the_stop_token_and_truncation_costs():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    kl = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.5]], dtype=torch.float64)
    rewards, truncated = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([False, True])
    shaped = ppo.shape_rewards(rewards, truncated, kl, mask, args_of(missing_eos_penalty=0.5), 1.0)
    assert torch.allclose(shaped, torch.tensor([[-0.1, 0.8, 0.0], [-0.3, 0.0, 1.0]], dtype=torch.float64))
    shaped = ppo.shape_rewards(rewards, truncated, kl, mask, args_of(kl_in="loss"), 1.0)
    assert shaped.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]


# --- GAE ---


def test_gae_of_the_oracle():
    mask = torch.ones(1, 4, dtype=torch.bool)
    rewards, values = row(GAE["rewards"]), row(GAE["values"])
    advantages, returns = ppo.compute_advantages(rewards, values, mask, args_of(gae_lambda=GAE["lam"]))
    assert advantages[0].tolist() == pytest.approx(GAE["adv"], abs=1e-12)
    assert returns[0].tolist() == pytest.approx(GAE["returns"], abs=1e-12)
    advantages, _ = ppo.compute_advantages(rewards, values, mask, args_of())
    assert advantages[0].tolist() == pytest.approx(GAE["adv_lam1"], abs=1e-12)
    advantages, _ = ppo.compute_advantages(rewards, values, mask, args_of(gae_lambda=0.0))
    assert advantages[0].tolist() == pytest.approx([-0.12, 0.31, 0.15, 0.5], abs=1e-12)


def by_definition(rewards, values, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over one row without padding, in O(T^2)."""
    values = [*values, 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.97, 0.0)])
def test_gae_equals_its_definition_on_ragged_rows(gamma, lam):
    generator = torch.Generator().manual_seed(3)
    lengths = [7, 1, 4, 6]
    rewards = [torch.randn(n, generator=generator, dtype=torch.float64).tolist() for n in lengths]
    values = [torch.randn(n, generator=generator, dtype=torch.float64).tolist() for n in lengths]
    padded_rewards, mask = ragged(rewards, fill=math.nan)
    padded_values, _ = ragged(values, fill=math.nan)  # what stands beside the mask is not looked at
    options = args_of(gamma=gamma, gae_lambda=lam)
    advantages, returns = ppo.compute_advantages(padded_rewards, padded_values, mask, options)
    for i, n in enumerate(lengths):
        expected = by_definition(rewards[i], values[i], gamma, lam)
        assert advantages[i, :n].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[i, :n].tolist() == pytest.approx([a + v for a, v in zip(expected, values[i], strict=True)])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_with_gamma_and_lambda_one_it_is_the_return_less_the_value():
    rewards, values = row([0.0, 0.0, 1.0]), row([0.3, 0.6, 0.9])
    advantages, returns = ppo.compute_advantages(rewards, values, torch.ones(1, 3, dtype=torch.bool), args_of())
    assert torch.allclose(advantages, 1 - values) and torch.allclose(returns, torch.ones(1, 3, dtype=torch.float64))


def test_the_critic_may_have_a_lambda_of_its_own():
    rewards, values = row(GAE["rewards"]), row(GAE["values"])
    mask = torch.ones(1, 4, dtype=torch.bool)
    both = args_of(gae_lambda=0.95, gae_lambda_critic=1.0)
    advantages, returns = ppo.compute_advantages(rewards, values, mask, both)
    assert advantages[0].tolist() == pytest.approx(GAE["adv"])
    assert returns[0].tolist() == pytest.approx([a + v for a, v in zip(GAE["adv_lam1"], GAE["values"], strict=True)])


def test_the_lambda_of_the_critic_may_be_0():
    rewards, values = row(GAE["rewards"]), row(GAE["values"])
    options = args_of(gae_lambda=0.95, gae_lambda_critic=0.0)
    advantages, returns = ppo.compute_advantages(rewards, values, torch.ones(1, 4, dtype=torch.bool), options)
    assert advantages[0].tolist() == pytest.approx(GAE["adv"])
    assert (returns - values)[0].tolist() == pytest.approx([-0.12, 0.31, 0.15, 0.5])


@pytest.mark.parametrize("length", [1, 10, 20, 21, 40])
def test_length_adaptive_lambda_is_clamped(length):
    # 1 - 1 / (0.05 l) is negative up to l = 20.
    generator = torch.Generator().manual_seed(length)
    rewards, values = (torch.randn(1, length, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(1, length, dtype=torch.bool)
    advantages, returns = ppo.compute_advantages(rewards, values, mask, args_of(length_adaptive_alpha=0.05))
    lam = max(0.0, 1 - 1 / (0.05 * length))
    expected = by_definition(rewards[0].tolist(), values[0].tolist(), 1.0, lam)
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-9)
    expected = by_definition(rewards[0].tolist(), values[0].tolist(), 1.0, 1.0)  # the critic keeps its own
    assert (returns - values)[0].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ddof", [0, 1])
def test_moments_whiten_the_oracle(ddof):
    values = torch.tensor(GAE["adv"], dtype=torch.float64)
    mean, variance = moments(values, ddof, lambda x: x)
    whitened = (values - mean) / (variance + 1e-8).sqrt()
    assert whitened.tolist() == pytest.approx(GAE[f"whiten_ddof{ddof}"], abs=1e-8)
    mean, variance = moments(torch.full((5,), 0.1), 1, lambda x: x)
    assert variance < 1e-30
    assert [float(x) for x in moments(torch.zeros(0), 1, lambda x: x)] == [0, 0]


# --- the policy's loss ---


def loss_of(args, dtype=torch.float64, ref=False, **coefficients):
    old, new, ref_logprobs, mask = b1(dtype)
    advantages, _ = ragged(POLICY["adv"], dtype)
    losses, stats = ppo.policy_loss(
        new, old, advantages, mask, args, ref_logprobs if ref else None, torch.ones_like(old), **coefficients
    )
    return (losses * ppo.token_weights(mask, totals_of(mask, 1), args)).sum(), losses, stats, new, mask


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_oracle_values_and_gradients(dtype, tolerance):
    loss, losses, stats, new, mask = loss_of(args_of(dual_clip=POLICY["c"]), dtype)
    assert float(loss) == pytest.approx(POLICY["loss_token_mean"], abs=tolerance)
    assert torch.allclose(losses, ragged(POLICY["token_loss"], dtype)[0], atol=tolerance)
    loss.backward()
    assert torch.allclose(new.grad, ragged(POLICY["grad"], dtype)[0], atol=tolerance)
    assert (int(stats["clip_fraction_high"].sum()), int(stats["clip_fraction_low"].sum())) == (1, 2)
    advantages, _ = ragged(POLICY["adv"], dtype)
    no_gradient = mask & (new.grad == 0) & (advantages < 0) & ~stats["clip_fraction_low"]
    assert torch.equal(stats["dual_clip"] & mask, no_gradient) and no_gradient.any()
    assert "dual_clip" not in loss_of(args_of(objective="penalty"), dtype)[2]
    assert float(loss_of(args_of(), dtype)[0]) == pytest.approx(POLICY["loss_no_dual"], abs=tolerance)
    assert float(stats["approx_kl"][mask].mean()) == pytest.approx(0.183496, abs=1e-6)


def test_the_penalty_is_k1_of_old_against_new():
    old, new, _, mask = b1()
    advantages, _ = ragged(POLICY["adv"])
    loss, _, _, new, _ = loss_of(args_of(objective="penalty", penalty_coef=0.7))
    expected = sum(
        float(-(new[i, t] - old[i, t]).exp() * advantages[i, t] + 0.7 * (old[i, t] - new[i, t]))
        for i, t in mask.nonzero().tolist()
    )
    assert float(loss) == pytest.approx(expected / 14, abs=1e-12)
    other, _, _, _, _ = loss_of(args_of(objective="penalty", penalty_coef=0.7), penalty_coef=0.2)
    mean_k1 = float((old - new)[mask].mean())
    assert float(loss - other) == pytest.approx(0.5 * mean_k1, abs=1e-12)  # the controller's value counts


def test_the_penalty_has_the_gradient_of_the_kl_between_old_and_new():
    # By enumeration over three actions: sum_a old(a) grad of (log old(a) - log new(a)) = grad KL(old || new).
    theta = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.5, -0.4], dtype=torch.float64).log_softmax(0)
    mask, zero = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.float64)
    losses, _ = ppo.policy_loss(theta.log_softmax(0)[None], old[None], zero, mask, args_of(objective="penalty"))
    (gradient,) = torch.autograd.grad((losses[0] * old.exp()).sum(), theta, retain_graph=True)
    (expected,) = torch.autograd.grad((old.exp() * (old - theta.log_softmax(0))).sum(), theta)
    assert torch.allclose(gradient, expected, atol=1e-12) and expected.abs().max() > 0.1


def test_the_kl_in_the_loss():
    with_kl, *_ = loss_of(args_of(kl_coef=0.3), ref=True)
    without, *_ = loss_of(args_of())
    assert float(with_kl - without) == pytest.approx(0.3 * ORACLES_K3, abs=1e-6)
    moved, *_ = loss_of(args_of(kl_coef=0.3), ref=True, kl_coef=0.1)
    assert float(moved - without) == pytest.approx(0.1 * ORACLES_K3, abs=1e-6)


def token_mean_k3():
    _, new, ref, mask = b1()
    d = (ref - new.detach())[mask]
    return float((d.exp() - d - 1).mean())


ORACLES_K3 = token_mean_k3()


@pytest.mark.parametrize(
    "change",
    [
        dict(clip_low=0.1),
        dict(clip_high=0.1),
        dict(dual_clip=2.0),
        dict(entropy_coef=0.01),
        dict(objective="penalty"),
        dict(kl_coef=0.1, kl_estimator="k1"),
        dict(kl_coef=0.1, kl_estimator="k2"),
        dict(kl_coef=0.1),
    ],
    ids=str,
)
def test_every_option_of_the_loss_changes_it(change):
    base = {"kl_coef": 0.05} if "kl_coef" in change else {}
    before = loss_of(args_of(**base), ref=bool(base))[0]
    after = loss_of(args_of(**{**base, **change}), ref=bool(base))[0]
    assert abs(float(before - after)) > 1e-4


# --- the critic's loss ---


def test_value_loss_of_the_oracle():
    new, old, returns = (row(VALUE[name]) for name in ("values", "old_values", "returns"))
    mask = torch.ones(1, 4, dtype=torch.bool)
    losses, stats = ppo.value_loss(new.requires_grad_(), old, returns, mask, args_of(value_clip=VALUE["clip"]))
    assert (2 * losses)[0].tolist() == pytest.approx(VALUE["terms"], abs=1e-9)
    assert float(losses.mean()) == pytest.approx(VALUE["loss"], abs=1e-9)
    assert stats["clip"][0].tolist() == [True, False, False, False]  # the third is clipped and its own error is larger
    losses.mean().backward()
    assert new.grad[0].tolist() == pytest.approx(VALUE["grad"], abs=1e-9)
    losses, _ = ppo.value_loss(new, old, returns, mask, args_of(value_clip=0.0))
    assert float(losses.mean()) == pytest.approx(VALUE["loss_unclipped"], abs=1e-9)


def test_a_value_inside_the_clip_is_not_counted_whatever_rounding_says():
    generator = torch.Generator().manual_seed(0)
    old, returns = (torch.rand(50, 40, generator=generator) for _ in range(2))
    values = old + 0.1 * torch.rand(50, 40, generator=generator)
    _, stats = ppo.value_loss(values, old, returns, torch.ones(50, 40, dtype=torch.bool), args_of(value_clip=0.2))
    assert not stats["clip"].any()


def test_a_clipped_value_has_no_gradient_and_padding_none():
    values = torch.tensor([[0.9, 0.1, math.nan]], requires_grad=True)
    old, returns = torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    losses, _ = ppo.value_loss(values, old, returns, mask, args_of(value_clip=0.2))
    losses.sum().backward()
    assert values.grad[0, 0] == 0  # it moved up by 0.4 towards the return, further than 0.2: no more pull
    assert values.grad[0, 1] == pytest.approx(-0.9)
    assert values.grad[0, 2] == 0 and losses[0, 2] == 0


# --- controllers ---


@pytest.mark.parametrize("case", [0, 1])
def test_adaptive_kl_of_the_oracle(case):
    example = ORACLES["adaptive_kl"]
    args = args_of(kl_coef=example["beta"], kl_target=example["target"], kl_horizon=example["horizon"])
    coefficients = ppo.Coefficients(args)
    coefficients.steer_kl(example["kl"][case], example["n"], args)
    assert coefficients.kl == pytest.approx(example["beta_after"][case], abs=1e-9)


@pytest.mark.parametrize("kl, coefficient", [(0.0, 0.025), (0.098, 0.04), (9.0, 0.1)])
def test_one_rollout_halves_or_doubles_the_kl_coefficient_at_most(kl, coefficient):
    # verl has no bound: here -0.052 for a KL of 0, which pays for divergence.
    args = args_of(kl_coef=0.05, kl_target=0.1, kl_horizon=100.0)
    coefficients = ppo.Coefficients(args)
    coefficients.steer_kl(kl, 1024 if kl != 0.098 else 1000, args)
    assert coefficients.kl == pytest.approx(coefficient)


@pytest.mark.parametrize("kl, factor", [(0.006, 0.5), (0.007, 1), (0.01, 1), (0.0149, 1), (0.0151, 2)])
def test_the_penalty_is_halved_and_doubled(kl, factor):
    args = args_of(penalty_coef=3.0, penalty_target=0.01)
    coefficients = ppo.Coefficients(args)
    coefficients.steer_penalty(kl, args)
    assert coefficients.penalty == 3 * factor
    other = ppo.Coefficients(args)
    other.load_state_dict(coefficients.state_dict())
    assert other.penalty == coefficients.penalty


# --- the critic ---


def filled(**options):
    options = {"group_size": 4, "prompts_per_step": 8, "num_minibatches": 1, **options}
    module, args, tokenizer, policy = embedded("ppo", **options)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    return module, args, policy, batch | {"rewards": rewards}


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_value_does_not_see_its_own_token(critic):
    # Off by one, the critic would be told the action: changing token t may change values after t only.
    _, args, policy, batch = filled(critic=critic)
    model, *_ = trainable(ppo, args, policy)
    del batch["prompt_index"]
    lengths = batch["completion_mask"].sum(dim=1)
    i, t = int(lengths.argmax()), 3
    with torch.no_grad():
        _, _, before = model(batch)
        batch["completions"] = batch["completions"].clone()
        batch["completions"][i, t] = (batch["completions"][i, t] + 1) % 10 + 4
        _, _, after = model(batch)
    changed = (before[i] - after[i]).abs() > 1e-6
    assert not changed[: t + 1].any() and changed[t + 1 : lengths[i]].any()
    assert (before[~batch["completion_mask"]] == 0).all()


def test_the_first_values_are_zero_and_so_the_critic_starts_neutral():
    from ppo import ActorCritic, load_critic

    _, args, policy, batch = filled()
    with torch.no_grad():
        _, _, values = ActorCritic(policy, load_critic(args, policy))(batch)
    assert (values == 0).all()


def parts(model, steps):
    """The gradients of the first optimizer step, those of the policy and those of the critic apart."""
    names = [name for name, _ in model.named_parameters()]
    split = {"policy": [], "critic": []}
    for name, gradient in zip(names, steps[0], strict=True):
        split[name.split(".")[0]].append(gradient)
    return split["policy"], split["critic"]


def test_a_separate_critic_leaves_the_policy_alone():
    module, args, policy, batch = filled(max_grad_norm=0.0)
    model, *_ = trainable(module, args, policy)
    policy_part, critic_part = parts(model, gradients(module, args, policy, batch)[0])
    args.value_coef = 2.0
    other_policy, other_critic = parts(model, gradients(module, args, policy, batch)[0])
    assert largest_difference(policy_part, other_policy) == 0
    assert largest_difference([2 * g for g in critic_part], other_critic) < 1e-6
    assert max(float(g.abs().max()) for g in critic_part[:-2]) > 1e-4  # its backbone is trained, too


def norm(gradients):
    return float(torch.stack([g.norm() for g in gradients]).norm())


def test_each_has_its_own_gradient_clip_and_a_shared_model_one():
    module, args, policy, batch = filled(max_grad_norm=0.01)
    model, *_ = trainable(module, args, policy)
    both = parts(model, gradients(module, args, policy, batch)[0])
    assert [norm(part) for part in both] == pytest.approx([0.01, 0.01], rel=1e-3)
    module, args, policy, batch = filled(max_grad_norm=0.01, critic="shared")
    steps, metrics = gradients(module, args, policy, batch)
    assert norm(steps[0]) == pytest.approx(0.01, rel=1e-3) and "optim/critic_grad_norm" not in metrics


def test_a_shared_critic_trains_the_joint_loss():
    module, args, policy, batch = filled(critic="shared", max_grad_norm=0.0)
    model, *_ = trainable(module, args, policy)
    one, _ = parts(model, gradients(module, args, policy, batch)[0])
    args.value_coef = 2.0
    two, _ = parts(model, gradients(module, args, policy, batch)[0])
    assert largest_difference(one, two) > 1e-4


def test_advantages_are_whitened_over_the_tokens_of_the_whole_rollout(monkeypatch):
    # not per minibatch, not with padding; returns from the advantages before that
    module, args, policy, batch = filled(num_minibatches=4, gae_lambda=0.9)
    seen = []
    original = module.policy_loss

    def spy(logprobs, old, advantages, mask, *rest):
        seen.append(advantages[mask])
        return original(logprobs, old, advantages, mask, *rest)

    monkeypatch.setattr(module, "policy_loss", spy)
    returns = []
    original_value = module.value_loss

    def value_spy(values, old_values, targets, mask, args):
        returns.append((targets, old_values, mask))
        return original_value(values, old_values, targets, mask, args)

    monkeypatch.setattr(module, "value_loss", value_spy)
    gradients(module, args, policy, batch)
    advantages = torch.cat(seen).double()
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6) and float(advantages.std()) == pytest.approx(1)
    assert max(abs(float(x.double().mean())) for x in seen) > 1e-3
    by_hand = [
        by_definition([0.0] * (n - 1) + [float(reward)], values[:n].tolist(), 1.0, 0.9)
        for (_, old_values, mask), rewards in zip(returns, batch["rewards"].view(4, 8).tolist(), strict=True)
        for n, values, reward in zip(mask.sum(dim=1).tolist(), old_values, rewards, strict=True)
    ]
    found = [
        (row_targets - values)[:n].tolist()
        for targets, old_values, mask in returns
        for row_targets, values, n in zip(targets, old_values, mask.sum(dim=1).tolist(), strict=True)
    ]
    for a, b in zip(found, by_hand, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_without_the_deviation_advantages_are_still_centred():
    module, args, policy, batch = filled(normalize_std=False, max_grad_norm=0.0)
    steps, _ = gradients(module, args, policy, batch)
    args.normalize_std = True
    others, _ = gradients(module, args, policy, batch)
    assert largest_difference(steps[0], others[0]) > 1e-4


def test_explained_variance_by_hand():
    module, args, policy, batch = filled(micro_batch_size=5)
    _, metrics = gradients(module, args, policy, batch)
    model, *_ = trainable(module, args, policy)
    with torch.no_grad():
        _, _, values = model(batch)
    mask = batch["completion_mask"]
    returns = batch["rewards"].double()[:, None].expand_as(values)[mask]  # lambda 1: the reward at every token
    values = values.double()[mask]
    expected = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert metrics["value/explained_variance"] == pytest.approx(float(expected), abs=1e-5)


def rollout_by_hand(batch, old, values, ref, args, kl_coef):
    """Shaped rewards and returns of each row, by loops."""
    shaped, returns = [], []
    for i, n in enumerate(batch["completion_mask"].sum(dim=1).tolist()):
        rewards = [-kl_coef * float(old[i, t] - ref[i, t]) for t in range(n)]
        rewards[-1] += float(batch["rewards"][i])
        shaped.append(sum(rewards))
        advantages = by_definition(rewards, values[i, :n].tolist(), args.gamma, args.gae_lambda)
        returns.append([a + float(v) for a, v in zip(advantages, values[i, :n], strict=True)])
    return shaped, returns


@pytest.mark.parametrize("ddof, eps", [(1, 1e-8), (0, 0.5)])
def test_the_kl_to_the_reference_reaches_the_returns(ddof, eps):

    options = dict(kl_coef=0.1, gae_lambda=0.9, std_ddof=ddof, std_eps=eps, micro_batch_size=5)
    module, args, policy, batch = filled(**options)
    model, _, (coefficients,) = trainable(module, args, policy)
    reference = embedded("ppo", **options)[3]
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.05)
        (old, _, values), (ref, _) = model(batch), reference(batch)
    coefficients.kl = 0.3  # a controller has moved it
    metrics, accelerator = Metrics(), Accelerator(cpu=True)
    from common.batches import split_rollout

    (micro_batches,) = split_rollout(accelerator, batch, args)
    module.assign_advantages(accelerator, model, reference, micro_batches, args, metrics, coefficients)
    result = metrics.reduce(accelerator)
    shaped, returns = rollout_by_hand(batch, old, values, ref, args, 0.3)
    mask = batch["completion_mask"]
    found = torch.cat([micro["returns"][micro["loss_mask"]] for micro in micro_batches])
    assert found.tolist() == pytest.approx([x for row in returns for x in row], abs=1e-4)
    assert result["reward/shaped"] == pytest.approx(sum(shaped) / 32, abs=1e-5)
    kl = [float((old - ref)[i][mask[i]].mean()) for i in range(32)]
    assert result["policy/kl_old_ref"] == pytest.approx(sum(kl) / 32, abs=1e-6) and abs(sum(kl)) > 1e-2
    raw = [
        r - float(v)
        for row, row_values in zip(returns, values, strict=True)
        for r, v in zip(row, row_values, strict=False)
    ]
    mean = sum(raw) / len(raw)
    deviation = (sum((a - mean) ** 2 for a in raw) / (len(raw) - ddof) + eps) ** 0.5
    whitened = torch.cat([micro["advantages"][micro["loss_mask"]] for micro in micro_batches])
    assert whitened.tolist() == pytest.approx([(a - mean) / deviation for a in raw], abs=1e-3)


def test_the_kl_is_in_the_reward_or_in_the_loss():
    results = {}
    for kl_in in ("reward", "loss"):
        module, args, policy, batch = filled(kl_coef=0.5, kl_in=kl_in, max_grad_norm=0.0, num_minibatches=2)
        reference = embedded("ppo")[3]
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.05)
        results[kl_in] = gradients(module, args, policy, batch, reference)
    assert "policy/kl_ref" not in results["reward"][1] and results["loss"][1]["policy/kl_ref"] > 0
    raw = float(batch["rewards"].mean())
    assert results["loss"][1]["reward/shaped"] == pytest.approx(raw, abs=1e-6)
    assert abs(results["reward"][1]["reward/shaped"] - raw) > 1e-2
    module, args, policy, batch = filled(max_grad_norm=0.0, num_minibatches=2)
    without = gradients(module, args, policy, batch)[0][0]
    model, *_ = trainable(module, args, policy)
    differences = [largest_difference(parts(model, results[x][0])[0], parts(model, [without])[0]) for x in results]
    assert min(differences) > 1e-4


def test_controllers_follow_what_was_logged_and_survive_a_resume(tmp_path):
    options = "--prompts_per_step 8 --group_size 2 --eval_prompts 4 --eval_samples 4 --eval_every 0 --save_every 2"
    options += " --objective penalty --penalty_target 1e-5 --kl_coef 0.1 --kl_target 0.001 --kl_horizon 100"
    options += " --critic_warmup_steps 1 --learning_rate 1e-3 --lr_scheduler linear --max_steps 4"
    ppo.main([*options.split(), "--output_dir", str(tmp_path / "a")])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000004")
    shutil.rmtree(tmp_path / "b" / "model")
    ppo.main([*options.split(), "--output_dir", str(tmp_path / "b"), "--resume"])
    rows = metric_rows(tmp_path / "a")
    assert rows == metric_rows(tmp_path / "b")
    kl, penalty = 0.1, 1.0
    for step, row in enumerate(rows[1:], 1):
        assert row["policy/kl_coef"] == pytest.approx(kl) and row["policy/penalty_coef"] == pytest.approx(penalty)
        if step > 1:  # the warm-up moves nothing
            kl *= 1 + min(max(row["policy/kl_old_ref"] / 0.001 - 1, -0.2), 0.2) * 16 / 100
            off = row["policy/kl_old_new"] / 1e-5
            penalty *= 0.5 if off < 1 / 1.5 else 2 if off > 1.5 else 1
        schedule = 1 - (step - 1) / 4
        assert row["optim/lr"] == pytest.approx(0 if step == 1 else 1e-3 * schedule)
        assert row["optim/critic_lr"] == pytest.approx(1e-3 * schedule)
    assert kl != 0.1 and penalty != 1
    # AdamW has counted the policy's own steps only: three rollouts of four minibatches.
    state = torch.load(tmp_path / "a" / "checkpoints" / "step-00000004" / "optimizer.bin", weights_only=False)["state"]
    assert {int(x["step"]) for x in state.values()} == {12, 16}


def test_the_critic_computes_in_float32_whatever_its_weights_are_held_in():
    _, args, policy, batch = filled()
    model, *_ = trainable(ppo, args, policy)
    model.critic.head.to(torch.bfloat16)  # as FSDP2 gathers them
    *_, values = model(batch)
    values.sum().backward()
    assert values.dtype == torch.float32 and model.critic.head.weight.grad.abs().max() > 0
    hidden = torch.rand(5, model.critic.head.in_features)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # mixed precision
        values = model.critic.head(hidden)
    assert values.dtype == torch.float32 and torch.equal(values, model.critic.head(hidden))


def test_warm_up_trains_the_critic_alone(tmp_path):
    quick = "--prompts_per_step 8 --eval_prompts 4 --eval_samples 4 --eval_every 0".split()
    options = ["--critic_warmup_steps", "2", "--weight_decay", "0.1", "--output_dir"]
    ppo.main([*quick, *options, str(tmp_path / "a"), "--max_steps", "2", "--save_every", "2"])
    initial = embedded("ppo")[3].lm.state_dict()

    after = load_file(tmp_path / "a" / "model" / "model.safetensors")
    assert all(torch.equal(after[name], initial[name]) for name in after)
    rows = metric_rows(tmp_path / "a")
    assert rows[1]["optim/lr"] == 0 and rows[1]["optim/critic_lr"] > 0 and rows[1]["optim/critic_grad_norm"] > 0
    assert rows[2]["value/mean"] != 0
    ppo.main([*quick, *options, str(tmp_path / "a"), "--max_steps", "3", "--save_every", "2", "--resume"])
    after = load_file(tmp_path / "a" / "model" / "model.safetensors")
    assert any(not torch.equal(after[name], initial[name]) for name in after)


def test_target_kl_stops_the_updates_of_a_rollout():

    module, args, policy, batch = filled(num_minibatches=4, num_epochs=2, learning_rate=1e-3)

    def steps_taken(target_kl):
        torch.manual_seed(0)
        _, _, _, policy = embedded("ppo")
        model, groups, (coefficients,) = trainable(module, args, policy)
        optimizer, metrics, accelerator = torch.optim.SGD(groups, lr=0.5), Metrics(), Accelerator(cpu=True)
        args.target_kl, steps = target_kl, []
        optimizer.register_step_post_hook(lambda *arguments: steps.append(1))
        module.update(accelerator, model, None, optimizer, dict(batch), 1, args, metrics, coefficients)
        return metrics.reduce(accelerator), policy, len(steps)

    free, _, steps = steps_taken(0.0)
    assert free["optim/skipped_steps"] == 0 and free["policy/approx_kl"] > 1e-4 and steps == 8
    stopped, policy, steps = steps_taken(1e-9)  # the first minibatch has KL 0 exactly, the second is over it
    assert stopped["optim/skipped_steps"] == 7 / 8 and steps == 1
    assert all(parameter.grad is None or (parameter.grad == 0).all() for parameter in policy.parameters())


def test_target_kl_counts_the_tokens_of_all_processes():
    """Decided by each process alone, one would stop, and the others would wait for it in the next minibatch."""

    class OneOfTwo(Accelerator):
        """The KL of the other process is large, also where this one has none yet."""

        def reduce(self, tensor, reduction="mean"):
            return tensor + 1e9 if tensor.dim() == 0 and tensor.dtype == torch.float32 else tensor

    module, args, policy, batch = filled(num_minibatches=4, num_epochs=1, target_kl=1.0)
    model, groups, (coefficients,) = trainable(module, args, policy)
    optimizer, metrics, steps = torch.optim.SGD(groups, lr=1e-6), Metrics(), []
    optimizer.register_step_post_hook(lambda *arguments: steps.append(1))
    module.update(OneOfTwo(cpu=True), model, None, optimizer, batch, 1, args, metrics, coefficients)
    assert steps == []


# --- with a reward model ---


def test_a_run_with_a_reward_model(tmp_path):
    """Which is the critic's beginning too: with one update a rollout, the values are still its own."""

    quick = "--max_steps 2 --pairs_per_step 8 --eval_every 0".split()
    reward_model.main([*quick, "--output_dir", str(tmp_path / "rm")])
    quick = "--max_steps 1 --prompts_per_step 4 --num_minibatches 1 --eval_prompts 4 --eval_samples 4 --eval_every 0"
    model = str(tmp_path / "rm" / "model")
    ppo.main(
        [*quick.split(), "--reward_model_path", model, "--critic_path", model, "--output_dir", str(tmp_path / "ppo")]
    )
    row = metric_rows(tmp_path / "ppo")[1]
    assert row["value/mean"] != 0
    assert row["reward/mean"] == row["reward_part/reward_model"] == pytest.approx(row["reward/shaped"])
    assert 0 <= row["reward/accuracy"] <= 1 and "eval/pass@1" in row  # gold answers still count for the evaluation
    alone = "--max_steps 0 --eval_prompts 4 --eval_samples 4".split()  # no training prompts are read
    ppo.main([*alone, "--reward_model_path", model, "--output_dir", str(tmp_path / "alone")])
    assert metric_rows(tmp_path / "alone")[0].keys() >= {"eval/pass@1", "eval/reward"}


def test_the_first_values_of_a_critic_from_a_reward_model_are_its_scores(tmp_path):
    # A reward model of another size, with a token more: a value is the score of the text before the token.
    _, args, tokenizer, policy = embedded("ppo")
    tokenizer.add_tokens(["<more>"])
    rewards = save_reward_model(tmp_path, tokenizer, hidden_size=32, num_hidden_layers=1, vocab_size=21)
    args.critic_path = str(tmp_path)
    batch, _ = hand_made_batch(policy, tokenizer, args, groups=2)
    actor_critic = ppo.ActorCritic(policy, ppo.load_critic(args, policy))
    with torch.no_grad():
        _, _, values = actor_critic(batch)
        for i, length in enumerate(batch["completion_mask"].sum(dim=1).tolist()):
            prompt = batch["prompts"][i][batch["prompt_mask"][i]]
            for t in range(length):
                text = torch.cat([prompt, batch["completions"][i, :t]])
                assert float(values[i, t]) == pytest.approx(float(rewards(text[None]).logits), abs=1e-5)
    assert (values[~batch["completion_mask"]] == 0).all() and float(values.std()) > 0.05
    assert actor_critic._no_split_modules == {"LlamaDecoderLayer"}
    assert policy.shares_prompts and not actor_critic.critic.backbone.shares_prompts  # nothing has looked at that model


def test_a_critic_gets_a_pad_token_where_its_tokenizer_has_none(tmp_path):
    """Without one, a batch of two rows ends in a ValueError of transformers."""
    _, args, tokenizer, policy = embedded("ppo")
    rewards = save_reward_model(tmp_path, tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None}), encoding="utf-8")
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id is None
    args.critic_path = str(tmp_path)
    critic = ppo.load_critic(args, policy)
    assert torch.equal(critic.head.weight, rewards.score.weight)


def test_a_separate_critic_has_the_backbone_of_the_policy_to_the_bit():
    # Rotary frequencies stay in float32 where the weights are in bfloat16.
    _, args, _, policy = embedded("ppo", dtype="bfloat16")
    critic, batch = ppo.load_critic(args, policy), random_batch(vocabulary=16)
    assert torch.equal(critic.backbone.states(batch)[2], policy.states(batch)[2])
    assert critic.head.weight.dtype == torch.bfloat16


def test_a_separate_critic_needs_a_backbone_without_head():
    with pytest.raises(InputError, match="--critic separate: the base model of a Llama4ForCausalLM contains the head"):
        ppo.load_critic(ppo.Args(), random_policy("llama4_text", **LLAMA4))


def test_a_critic_must_have_the_token_ids_of_the_policy(tmp_path):

    _, args, tokenizer, policy = embedded("ppo")
    save_reward_model(tmp_path, tokenizer)
    path = tmp_path / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"7": 10', '"7": 11').replace('"8": 11', '"8": 10'), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    assert AutoTokenizer.from_pretrained(tmp_path)("7").input_ids == [11]
    args.critic_path = str(tmp_path)
    with pytest.raises(InputError, match=f"--critic_path {tmp_path}: its tokenizer has other ids .* for '7', '8'"):
        ppo.load_critic(args, policy)
    args.critic_path = str(EMBEDDED)
    with pytest.raises(InputError, match="weights are not those of a LlamaForSequenceClassification: score.weight"):
        ppo.load_critic(args, policy)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--kl_target 0.1", "kl_target 0.1 steers --kl_coef, which is 0"),
        ("--critic shared --critic_warmup_steps 3", "critic_warmup_steps 3"),
        ("--critic shared --critic_path x", "critic_path x: --critic shared has no backbone of its own"),
        ("--critic_path /no/such", "--critic_path /no/such: no such folder"),
        ("--objective penalty --dual_clip 3", "dual_clip"),
        ("--reward_model_path x --reward format", "replaces --reward"),
        ("--gae_lambda 1.5", "gae_lambda 1.5"),
        ("--gamma -0.1", "gamma"),
        ("--critic_learning_rate 0", "critic_learning_rate"),
        ("--value_clip -1", "value_clip"),
        ("--critic both", "both"),
        ("--reward_model_path /no/such", "/no/such"),
        ("--missing_eos_penalty -1", "missing_eos_penalty"),
        ("--std_eps 0", "std_eps"),
    ],
)
def test_bad_input_of_its_own(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        ppo.main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)
