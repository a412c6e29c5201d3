"""ppo.py: rewards of tokens, advantages by their definition, the critic and its loss, controllers and reward models."""

import math
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoTokenizer

import ppo
from common.batches import split_rollout
from harness.data import EMBEDDED
from harness.errors import InputError
from common.masked import moments
from harness.metrics import Metrics
from small_models import random_batch, random_policy, save_reward_model
from testbed import (
    b1,
    embedded,
    gradients,
    hand_made_batch,
    largest_difference,
    metric_rows,
    ragged,
    trainable,
)


def args_of(**options):
    return ppo.Args(**options)


def row(values):
    return torch.tensor([values], dtype=torch.float64)


# --- rewards of tokens ---


def test_the_reward_stands_on_the_last_token():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    kl = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.5]], dtype=torch.float64)
    rewards = torch.tensor([1.0, 2.0], dtype=torch.float64)
    shaped = ppo.shape_rewards(rewards, kl, mask, args_of(), 1.0)
    assert torch.allclose(shaped, torch.tensor([[-0.1, 0.8, 0.0], [-0.3, 0.0, 1.5]], dtype=torch.float64))
    shaped = ppo.shape_rewards(rewards, kl, mask, args_of(kl_in="loss"), 1.0)
    assert shaped.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]


# --- GAE ---


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


def test_moments_of_equal_values_and_of_none():
    _, variance = moments(torch.full((5,), 0.1), 1, lambda x: x)
    assert variance < 1e-30
    assert [float(x) for x in moments(torch.zeros(0), 1, lambda x: x)] == [0, 0]


# --- the losses ---


def test_the_penalty_is_k1_of_old_against_new():
    old, new, _, mask = b1()
    signs, args = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]]).double(), args_of(objective="penalty", penalty_coef=0.7)
    for coefficient, given in ((0.7, None), (0.2, 0.2)):  # the controller's value counts
        losses, stats = ppo.policy_loss(new, old, signs, mask, args, penalty_coef=given)
        expected = -(new - old).exp() * signs + coefficient * (old - new)
        torch.testing.assert_close(losses, torch.where(mask, expected, 0))
    assert not {"clip_fraction_low", "clip_fraction_high", "dual_clip"} & stats.keys()


def test_a_clipped_value_is_counted_where_its_error_is_the_larger_one():
    values, old, returns = torch.tensor([[[0.9, 0.15, -0.3, 0.5]], [[0.5, 0.1, 0.2, 0.5]], [[1, 0, 0.4, 0.8]]])
    _, stats = ppo.value_loss(values, old, returns, torch.ones(1, 4, dtype=torch.bool), args_of(value_clip=0.2))
    assert stats["clip"].tolist() == [[True, False, False, False]]  # the third has moved too far, away from its return


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


def parts(model, steps):
    """The gradients of the first optimizer step, those of the policy and those of the critic apart."""
    names = [name for name, _ in model.named_parameters()]
    split = {"policy": [], "critic": []}
    for name, gradient in zip(names, steps[0], strict=True):
        split[name.split(".")[0]].append(gradient)
    return split["policy"], split["critic"]


def test_a_shared_model_has_one_gradient_clip():
    module, args, policy, batch = filled(max_grad_norm=0.01, critic="shared")
    steps, metrics = gradients(module, args, policy, batch)
    norm = torch.stack([gradient.norm() for gradient in steps[0]]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3) and "optim/critic_grad_norm" not in metrics


def test_a_shared_critic_trains_the_joint_loss():
    """The policy's gradient and value_coef times the critic's, which is all that the critic's head gets."""
    module, args, policy, batch = filled(critic="shared", max_grad_norm=0.0)
    model, *_ = trainable(module, args, policy)
    found = []
    for args.value_coef in (1.0, 2.0, 3.0):
        found.append(parts(model, gradients(module, args, policy, batch)[0]))
    (one, head), (two, head_of_two), (three, _) = found
    assert largest_difference(two, [(a + c) / 2 for a, c in zip(one, three, strict=True)]) < 1e-6
    assert largest_difference(one, two) > 1e-4 and largest_difference(head_of_two, [2 * g for g in head]) < 1e-6


def test_advantages_are_centred_and_divided_over_the_tokens_of_the_whole_rollout():
    """The returns come from those before that."""
    module, args, policy, batch = filled(gae_lambda=0.9, micro_batch_size=5)
    model, _, (coefficients,) = trainable(module, args, policy)
    accelerator = Accelerator(cpu=True)
    (micro_batches,) = split_rollout(accelerator, batch | {"loss_mask": batch["completion_mask"]}, args)
    module.add_fixed_logprobs(accelerator, model, None, micro_batches)
    module.assign_advantages(accelerator, micro_batches, args, Metrics(), coefficients.kl)
    found = torch.cat([micro["advantages"][micro["loss_mask"]] for micro in micro_batches])
    raw = torch.cat([(micro["returns"] - micro["old_values"])[micro["loss_mask"]] for micro in micro_batches])
    scale = (raw.var(correction=1) + 1e-8).sqrt()
    torch.testing.assert_close(found, (raw - raw.mean()) / scale, atol=1e-5, rtol=1e-5)


def test_controllers_follow_what_was_logged_and_survive_a_resume(tmp_path):
    options = "--prompts_per_step 8 --group_size 2 --eval_prompts 4 --eval_samples 4 --eval_every 0 --save_every 2"
    options += " --objective penalty --penalty_target 1e-5 --kl_coef 0.1 --kl_target 0.001 --kl_horizon 100"
    options += " --max_new_tokens 24 --critic_warmup_steps 1 --learning_rate 1e-3 --lr_scheduler linear --max_steps 4"
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
    with torch.no_grad():
        states = model.critic.states(batch)
        model.critic.states = lambda batch: states
        expected = model.critic(batch, states)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # mixed precision
            assert torch.equal(model.critic(batch, states), expected)


def test_warm_up_trains_the_critic_alone(tmp_path):
    options = "--critic_warmup_steps 1 --weight_decay 0.1 --max_steps 1 --prompts_per_step 8 --eval_every 0"
    options += f" --eval_prompts 4 --eval_samples 4 --output_dir {tmp_path}"
    ppo.main(options.split())
    initial, after = embedded("ppo")[3].lm.state_dict(), load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(after[name], initial[name]) for name in after)
    row = metric_rows(tmp_path)[1]
    assert row["optim/lr"] == 0 and row["optim/critic_lr"] > 0 and row["optim/critic_grad_norm"] > 0
    assert row["value/mean"] != 0  # in the later minibatches


# --- with a reward model ---


def test_a_run_with_a_reward_model(tmp_path):
    """Which is the critic's beginning too: with one update a rollout, the values are still its own."""
    save_reward_model(tmp_path / "rm", embedded("ppo")[2])
    options = "--max_steps 1 --prompts_per_step 4 --num_minibatches 1 --eval_prompts 4 --eval_samples 4 --eval_every 0"
    options += f" --reward rm:{tmp_path}/rm --critic_path {tmp_path}/rm --output_dir"
    ppo.main([*options.split(), str(tmp_path / "run")])
    first, row = metric_rows(tmp_path / "run")
    assert first.keys() >= {"eval/pass@1", "eval/reward"}  # gold answers still count for the evaluation
    assert row["value/mean"] != 0 and 0 <= row["reward/accuracy"] <= 1
    assert row["reward/mean"] == row["reward_terms/rm"] == pytest.approx(row["reward/shaped"])


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
    assert policy.shares_prompts and actor_critic.critic.fast is None  # nothing has looked at that model


def test_a_separate_critic_has_the_backbone_of_the_policy_to_the_bit():
    # Rotary frequencies stay in float32 where the weights are in bfloat16.
    _, args, _, policy = embedded("ppo", dtype="bfloat16")
    critic, batch = ppo.load_critic(args, policy), random_batch(vocabulary=16)
    assert torch.equal(critic.token_states(batch)[2], policy.token_states(batch)[2])
    assert critic.head.weight.dtype == torch.bfloat16


def test_a_separate_critic_needs_a_backbone_without_head():
    with pytest.raises(InputError, match="--critic separate"):
        ppo.load_critic(ppo.Args(), random_policy("llama4_text"))


def test_a_critic_must_have_the_token_ids_of_the_policy(tmp_path):

    _, args, tokenizer, policy = embedded("ppo")
    save_reward_model(tmp_path, tokenizer)
    path = tmp_path / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"7": 10', '"7": 11').replace('"8": 11', '"8": 10'), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    assert AutoTokenizer.from_pretrained(tmp_path)("7").input_ids == [11]
    args.critic_path = str(tmp_path)
    with pytest.raises(InputError, match=f"--critic_path {tmp_path}: it has other token ids"):
        ppo.load_critic(args, policy)
    args.critic_path = str(EMBEDDED["embedded"])
    with pytest.raises(InputError, match="score.weight"):
        ppo.load_critic(args, policy)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--kl_target 0.1", "kl_target 0.1"),
        ("--critic shared --critic_warmup_steps 3", "critic_warmup_steps"),
        ("--critic shared --critic_path x", "critic_path"),
        ("--critic_path /no/such", "/no/such"),
        ("--gae_lambda 1.5", "gae_lambda 1.5"),
        ("--gamma -0.1", "gamma"),
        ("--critic_learning_rate 0", "critic_learning_rate"),
        ("--value_clip -1", "value_clip"),
        ("--critic both", "both"),
        ("--reward rm:/no/such", "/no/such"),
    ],
)
def test_bad_input_of_its_own(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        ppo.main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)
