"""ppo.py: the critic and its loss, unscored rows, and reward models.

Vectors and test_whole_updates.py ask for the rewards of tokens, GAE and the whitening.
"""

import copy
import dataclasses
import math

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import ppo
from common.masked import moments
from common.load import EMBEDDED
from common.run import Exit
from small_models import random_lm, save_reward_model
from testbed import embedded, gradients, hand_made_batch, largest_difference, metric_rows, problem, trainable


def test_moments_of_equal_or_no_values():
    _, variance = moments(torch.full((5,), 0.1), 1, lambda x: x)
    assert variance < 1e-30
    assert [float(x) for x in moments(torch.zeros(0), 1, lambda x: x)] == [0, 0]


# --- the losses ---


def test_value_clip_takes_the_larger_error():
    values, old, returns = torch.tensor([[[0.9, 0.15, -0.3, 0.5]], [[0.5, 0.1, 0.2, 0.5]], [[1, 0, 0.4, 0.8]]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, stats = ppo.value_loss(values, old, returns, mask, ppo.Args(value_clip=0.2))
    assert stats["clip"].tolist() == [[True, False, False, False]]  # the third has moved too far, away from its return
    old, returns = torch.rand(2, 50, 40, generator=torch.Generator().manual_seed(0))
    _, stats = ppo.value_loss(old + 0.09, old, returns, mask[:, :1].expand(50, 40), ppo.Args(value_clip=0.2))
    assert not stats["clip"].any()  # within the clip, whatever rounding says


def test_clipped_values_have_no_gradient():
    values = torch.tensor([[0.9, 0.1, math.nan]], requires_grad=True)
    old, returns = torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, math.nan]])
    losses, _ = ppo.value_loss(values, old, returns, torch.tensor([[True, True, False]]), ppo.Args(value_clip=0.2))
    losses.sum().backward()
    # The first moved up by 0.4 towards the return, further than 0.2: no more pull.
    assert values.grad.tolist() == [[0, pytest.approx(-0.9), 0]] and losses[0, 2] == 0


# --- the critic ---


def filled(**options):
    module, args, lm, _, batch = problem("ppo", **options)
    return module, args, lm, batch


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_values_do_not_see_their_token(critic):
    # Off by one, the critic would be told the action: changing token t may change values after t only.
    _, args, lm, batch = filled(critic=critic)
    model, _ = trainable(ppo, args, lm)
    lengths = batch["completion_mask"].sum(dim=1)
    i, t = int(lengths.argmax()), 3
    with torch.no_grad():
        _, _, before = ppo.completion_logprobs(model, batch, args)
        batch["completions"] = batch["completions"].clone()
        batch["completions"][i, t] = (batch["completions"][i, t] + 1) % 10 + 4
        _, _, after = ppo.completion_logprobs(model, batch, args)
    changed = (before[i] - after[i]).abs() > 1e-6
    assert not changed[: t + 1].any() and changed[t + 1 : lengths[i]].any()
    assert (before[~batch["completion_mask"]] == 0).all()


def split(model, steps):
    """Return the gradients of the first optimizer step, those of the policy and those of the critic."""
    names = [name for name, _ in model.named_parameters()]
    split = {"policy": [], "critic": []}
    for name, gradient in zip(names, steps[0], strict=True):
        split["policy" if name.startswith("lm.") else "critic"].append(gradient)
    return split["policy"], split["critic"]


def test_policy_and_critic_have_own_norms():
    """With a shared backbone; test_whole_updates.py has separate ones."""
    module, args, lm, batch = filled(max_grad_norm=0.01, critic="shared")
    steps, metrics = gradients(module, args, lm, batch)
    both = split(trainable(module, args, lm)[0], steps)
    norms = [float(torch.stack([gradient.norm() for gradient in part]).norm()) for part in both]
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
    assert metrics["optim/grad_norm"] > 0.02 and metrics["optim/critic_grad_norm"] > 0.02  # before the clip
    assert metrics["optim/grad_norm"] != metrics["optim/critic_grad_norm"]


def test_shared_critic_trains_the_joint_loss():
    """The policy's gradient and value_coef times the critic's, which is all that the critic's head gets."""
    module, args, lm, batch = filled(critic="shared", max_grad_norm=0.0)
    model, _ = trainable(module, args, lm)
    found = []
    for args.value_coef in (1.0, 2.0, 3.0):
        found.append(split(model, gradients(module, args, lm, batch)[0]))
    (one, head), (two, head_of_two), (three, _) = found
    assert largest_difference(two, [(a + c) / 2 for a, c in zip(one, three, strict=True)]) < 1e-6
    assert largest_difference(one, two) > 1e-4 and largest_difference(head_of_two, [2 * g for g in head]) < 1e-6


def test_critic_computes_in_float32():
    _, args, lm, batch = filled()
    model, _ = trainable(ppo, args, lm)
    model.head.to(torch.bfloat16)  # as FSDP2 gathers it
    *_, values = ppo.completion_logprobs(model, batch, args)
    values.sum().backward()
    assert values.dtype == torch.float32 and model.head.weight.grad.abs().max() > 0
    assert values[batch["completion_mask"]].bfloat16().float().ne(values[batch["completion_mask"]]).any()


def test_unscored_rows_have_no_gradient(tmp_path, monkeypatch):
    """Half of the completions have no reward; the critic must not learn 0 for them."""
    (tmp_path / "mine.py").write_text(
        "def mine(completions, **_):\n    return [None if i % 2 else len(c) / 9 for i, c in enumerate(completions)]\n",
        encoding="utf-8",
    )
    update, batches = ppo.update, []

    def spy(*arguments):
        batches.append({name: column.clone() for name, column in arguments[4].items()})
        return update(*arguments)

    monkeypatch.setattr(ppo, "update", spy)
    options = "--max_steps 1 --prompts_per_step 8 --num_minibatches 1 --eval_prompts 2 --eval_samples 4"
    options += f" --max_new_tokens 16 --eval_every 0 --reward {tmp_path}/mine.py:mine --output_dir {tmp_path}/run"
    ppo.main(options.split())
    (batch,) = batches
    assert not batch["loss_mask"][1::2].any() and torch.equal(batch["loss_mask"][::2], batch["completion_mask"][::2])
    row = metric_rows(tmp_path / "run")[1]
    assert row["reward/unscored"] == 0.5
    mean = pytest.approx(float(batch["rewards"][::2].mean()))
    assert row["reward/mean"] == mean and row["reward/shaped"] == mean


# --- with a reward model ---


def test_run_with_a_reward_model(tmp_path):
    """The critic starts as the reward model: with one update per rollout the values are still its scores."""
    save_reward_model(tmp_path / "rm", embedded("ppo")[2])
    options = "--max_steps 1 --prompts_per_step 4 --num_minibatches 1 --eval_prompts 4 --eval_samples 4 --eval_every 0"
    options += f" --reward rm:{tmp_path}/rm --critic_path {tmp_path}/rm --output_dir"
    ppo.main([*options.split(), str(tmp_path / "run")])
    first, row = metric_rows(tmp_path / "run")
    assert first.keys() >= {"eval/pass@1", "eval/reward"}  # gold answers still count for the evaluation
    assert row["value/mean"] != 0 and 0 <= row["reward/accuracy"] <= 1
    assert row["reward/mean"] == row["reward_terms/rm"] == pytest.approx(row["reward/shaped"])


def test_values_of_reward_model_are_scores(tmp_path):
    # A reward model of another size, with a token more: a value is the score of the text before the token.
    _, args, tokenizer, lm = embedded("ppo")
    batch, _ = hand_made_batch(tokenizer, args, groups=2)
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<more>"])
    rewards = save_reward_model(tmp_path, larger, hidden_size=32, num_hidden_layers=1, vocab_size=21)
    args.critic_path = str(tmp_path)
    actor_critic = ppo.ActorCritic(lm, *ppo.load_critic(args, lm, tokenizer))
    with torch.no_grad():
        _, _, values = ppo.completion_logprobs(actor_critic, batch, args)
        for i, length in enumerate(batch["completion_mask"].sum(dim=1).tolist()):
            prompt = batch["prompts"][i][batch["prompt_mask"][i]]
            for t in range(length):
                text = torch.cat([prompt, batch["completions"][i, :t]])
                assert float(values[i, t]) == pytest.approx(float(rewards(text[None]).logits), abs=1e-5)
    assert (values[~batch["completion_mask"]] == 0).all() and float(values.std()) > 0.05


def test_separate_critic_copies_the_backbone():
    # Rotary frequencies stay in float32 where the weights are in bfloat16.
    _, args, tokenizer, lm = embedded("ppo", dtype="bfloat16")
    backbone, head = ppo.load_critic(args, lm, tokenizer)
    ids = torch.arange(12)[None]
    assert torch.equal(backbone(ids).last_hidden_state, lm.base_model(ids).last_hidden_state)
    assert head.weight.dtype == torch.bfloat16


@pytest.mark.needs("peft")
def test_lora_critic_has_its_own_adapters():
    _, args, tokenizer, lm = embedded("ppo", lora_rank=4, dtype="bfloat16")
    backbone, head = ppo.load_critic(args, lm, tokenizer)
    _, shared = ppo.load_critic(dataclasses.replace(args, critic="shared"), lm, tokenizer)
    assert head.weight.dtype == shared.weight.dtype == torch.float32  # small updates of bfloat16 vanish
    trained = {name: weight for name, weight in backbone.named_parameters() if weight.requires_grad}
    assert trained and all("lora_" in name and weight.dtype == torch.float32 for name, weight in trained.items())
    assert not {id(weight) for weight in trained.values()} & {id(weight) for weight in lm.parameters()}


def test_critic_needs_a_backbone_without_head():
    with pytest.raises(Exit, match="--critic separate"):
        ppo.load_critic(ppo.Args(), random_lm("llama4_text"), None)


def test_critic_needs_the_token_ids(tmp_path):
    _, args, tokenizer, lm = embedded("ppo")
    save_reward_model(tmp_path, tokenizer)
    path = tmp_path / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"7": 10', '"7": 11').replace('"8": 11', '"8": 10'), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    assert AutoTokenizer.from_pretrained(tmp_path)("7").input_ids == [11]
    args.critic_path = str(tmp_path)
    with pytest.raises(Exit, match=f"--critic_path {tmp_path}: its token ids are not the policy's"):
        ppo.load_critic(args, lm, tokenizer)
    args.critic_path = str(EMBEDDED["embedded"])
    with pytest.raises(Exit, match="score.weight"):
        ppo.load_critic(args, lm, tokenizer)


def test_critic_needs_a_linear_score(tmp_path):
    _, args, tokenizer, lm = embedded("ppo")
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1)
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    args.critic_path = str(tmp_path)
    with pytest.raises(Exit, match="no linear head `score`"):
        ppo.load_critic(args, lm, tokenizer)


def test_reward_is_at_the_last_token():
    """Also of a completion with a hole, as a tool's text leaves one."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]).bool()
    kl, args = torch.zeros(2, 6), ppo.Args()
    found = ppo.shape_rewards(torch.tensor([3.0, 5.0]), kl, mask, args)
    assert found.tolist() == [[0, 0, 0, 0, 0, 3], [0, 5, 0, 0, 0, 0]]


@pytest.mark.parametrize("given, rate", [([], 1e-5), (["--critic_learning_rate", "3e-6"], 3e-6)])
def test_critic_rate_follows_the_learning_rate(given, rate, tmp_path, monkeypatch):
    words = ["--learning_rate", "1e-6", "--max_steps", "1", "--prompts_per_step", "4", "--eval_prompts", "4"]
    rates = []
    monkeypatch.setattr(ppo, "update", lambda *inputs: rates.append([group["lr"] for group in inputs[3].param_groups]))
    ppo.main([*words, *given, "--output_dir", str(tmp_path / "run")])
    assert rates == [[1e-6, pytest.approx(rate)]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--dual_clip 0.5", "dual_clip 0.5"),
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
def test_bad_input_of_ppo(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exit) as error:
        ppo.main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)
