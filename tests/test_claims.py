"""What lab measures exactly: the KL estimators in a loss, and the share of GRPO's gradient by difficulty."""

import dataclasses
import pathlib

import pytest
import torch

import gradient_share
import grpo
import kl_estimators
from common.harness.command_line import parse_args
from common.harness.data import load_prompts
from common.harness.loading import load_policy, load_tokenizer

ROOT = pathlib.Path(__file__).parent.parent


def near(values):
    return pytest.approx(values.tolist(), abs=1e-12)


# --- KL estimators ---


@pytest.mark.parametrize("distance", [0.2, 1.5, -3.0])
def test_what_the_estimators_do_in_a_loss(distance):
    """Against the gradients on paper: pi (log(pi / ref) - KL) of KL(pi, ref), and pi - ref of KL(ref, pi)."""
    pi, ref = (x.detach().exp() for x in kl_estimators.policies(distance)[1:])
    kl = (pi * (pi / ref).log()).sum()
    k1, k2, k3 = (kl_estimators.measure(name, distance) for name in ("k1", "k2", "k3"))
    assert k1["gradient"].tolist() == near(torch.zeros(8)) and k1["noise"] > 0.5
    assert k2["gradient"].tolist() == near(pi * ((pi / ref).log() - kl))
    assert k3["gradient"].tolist() == near(pi - ref)
    for found in (k1, k2, k3):
        assert found["of_pi_ref"].tolist() == near(pi * ((pi / ref).log() - kl))
        assert found["of_ref_pi"].tolist() == near(pi - ref)
    assert (k1["mean"], k3["mean"]) == pytest.approx((kl.item(), kl.item()), abs=1e-12)
    assert abs(k2["bias"]) > 1e-5 and k2["mean"] == pytest.approx((pi * (pi / ref).log().square()).sum().item() / 2)
    assert k3["std"] < k1["std"]


# --- the scale of the reward ---


def test_advantages_do_not_depend_on_the_scale_of_the_reward_but_for_the_epsilon():
    rewards = torch.tensor([0.0, 1, 1, 0, 0.2, 0.9, 0.9, 0.4], dtype=torch.float64)
    advantages = grpo.compute_advantages(rewards, grpo.Args(group_size=4))
    for scale in (10, 0.1):
        smaller = grpo.Args(group_size=4, std_eps=grpo.Args().std_eps * scale)
        assert grpo.compute_advantages(scale * rewards, smaller).flatten().tolist() == near(advantages.flatten())
        scaled = grpo.compute_advantages(scale * rewards, grpo.Args(group_size=4))
        least = rewards.view(-1, 4).std(dim=1).min()
        off = float(abs(1 / scale - 1) * 1e-6 / least)
        assert (scaled / advantages - 1).abs().max() == pytest.approx(off, rel=1e-3)


# --- share of the gradient ---


def test_the_expected_weight_of_a_question():
    """Without the deviation 2 p (1 - p) (G - 1) / G; with it, for G = 2, each mixed group has |A| = 1 / sqrt(2)."""
    args = grpo.Args(normalize_std=False)
    for p in (0.1, 0.5, 0.8):
        assert gradient_share.expected_size(p, args) == pytest.approx(2 * p * (1 - p) * 7 / 8)
        assert gradient_share.per_reward(p, args) == pytest.approx(1)
    pairs = grpo.Args(group_size=2, std_eps=0)
    assert gradient_share.expected_size(0.1, pairs) == pytest.approx(0.18 / 2**0.5)
    one_of_eight, half = ((8 * 7 / (k * (8 - k))) ** 0.5 for k in (1, 4))  # 1 / std
    assert 1 < gradient_share.per_reward(0.1, grpo.Args()) < one_of_eight / half
    assert gradient_share.per_reward(1e-9, grpo.Args()) == pytest.approx(
        one_of_eight / gradient_share.expected_size(0.5, grpo.Args()) * 7 / 16, rel=1e-5
    )


def test_the_shares_of_a_table_made_by_hand():
    """Three questions, one of each class, with 1, 2 and 0 right answers of 4."""
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    weight, norm2 = torch.tensor([0.75, 1.0, 0.0]), torch.tensor([3.0, 1.0, 0.0])
    row = gradient_share.shares(rewards, weight, norm2, ["easy", "medium", "hard"], grpo.Args(group_size=4))
    assert row["share/weight_easy"] == row["share/weight_1_right"] == pytest.approx(0.75 / 1.75)
    assert row["share/norm2_medium"] == row["share/norm2_2_right"] == 0.25
    assert row["share/weight_hard"] == row["share/norm2_0_right"] == 0 and row["share/weight_4_right"] == 0
    assert row["share/questions_hard"] == row["share/questions_0_right"] == pytest.approx(1 / 3)
    # The rewards deviate by 0.375 and 0.5 on average, so these weights are 2 per unit of both.
    assert row["share/per_reward_easy"] == row["share/per_reward_medium"] == 1


def test_the_deviation_scales_a_groups_weight_and_gradient():
    """The same answers with and without it: all of a group's gradient is divided by its standard deviation."""
    args = parse_args(grpo.Args, [*gradient_share.TASK, "--group_size", "4", "--seed", "1"])
    tokenizer = load_tokenizer(args)
    prompts, policy = load_prompts(args, tokenizer, True)[0][:8], load_policy(args, tokenizer)
    rewards, weight, norm2 = gradient_share.sample(policy, tokenizer, prompts, args)
    plain = dataclasses.replace(args, normalize_std=False)
    same_rewards, plain_weight, plain_norm2 = gradient_share.sample(policy, tokenizer, prompts, plain)
    assert rewards.equal(same_rewards)
    std = rewards.view(-1, 4).std(dim=1)
    mixed = std > 0
    assert 2 < mixed.sum() < 8 and not weight[~mixed].any() and not norm2[~mixed].any()
    deviation = (rewards.view(-1, 4) - rewards.view(-1, 4).mean(dim=1, keepdim=True)).abs().mean(dim=1)
    assert plain_weight.tolist() == pytest.approx(deviation.tolist(), abs=1e-6)
    assert (weight / plain_weight)[mixed].tolist() == pytest.approx((1 / std)[mixed].tolist(), rel=1e-4)
    assert (norm2 / plain_norm2)[mixed].tolist() == pytest.approx((1 / std)[mixed].square().tolist(), rel=1e-3)
