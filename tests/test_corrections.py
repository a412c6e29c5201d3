"""docs/corrections.md: its tables by the functions of the scripts, other numbers by the files that have them."""

import math
import re

import pytest
import torch
import yaml
from transformers import TopPLogitsWarper

import dapo
import grpo
import ppo
import reward_model
from as_in_verl import ADVANTAGES, pg_losses
from common.harness.loading import load_reference, load_tokenizer
from common.masked import logprobs_and_entropy
from page_tables import Page, differences, numbers
from testbed import ORACLES, ROOT, b1, embedded, totals_of

PAGE, THEORY = Page("corrections.md"), Page("theory.md")
ONE = torch.ones(1, 1, dtype=torch.bool)


def one_update(rows):
    for (ratio,) in (numbers(row[0]) for row in rows):
        logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        advantage = torch.tensor([[0.5]], dtype=torch.float64)
        losses, _ = grpo.policy_loss(logprob, torch.zeros_like(logprob), advantage, ONE, grpo.Args())
        objective, likelihood = -losses.sum(), (advantage * logprob).sum()
        yield {place: torch.autograd.grad(value, logprob)[0] for place, value in ((1, objective), (2, likelihood))}


def token_losses():
    """Those of GRPO on batch B1 without the KL, and its mask."""
    old, new, _, mask = b1()
    advantages = grpo.compute_advantages(torch.tensor(ORACLES["B1"]["R01"]).double(), grpo.Args(group_size=4))
    return grpo.policy_loss(new, old, advantages, mask, grpo.Args())[0].detach(), mask


def averages(rows):
    (losses, mask), totals = token_losses(), totals_of(token_losses()[1], 4)
    assert ["rows" in row[0] for row in rows] == [True, False]
    for module in (grpo, dapo):
        yield {1: (losses * module.token_weights(mask, totals, module.Args(group_size=4))).sum()}


def micro_batches(rows):
    """The token mean of each micro-batch by the weights of a step that has these rows alone, and the mean of them."""
    losses, mask = token_losses()
    for (size,) in (numbers(row[0]) for row in rows):
        parts = zip(losses.split(int(size)), mask.split(int(size)), strict=True)
        means = [(part * dapo.token_weights(own, totals_of(own, len(own)), dapo.Args())).sum() for part, own in parts]
        yield {1: sum(means) / len(means)}


def truncated(rows):
    logits = torch.tensor([[float(row[0]) for row in rows]]).double().log()
    cut = TopPLogitsWarper(top_p=0.7)(None, logits).softmax(dim=-1)[0]
    for token in range(len(rows)):
        whole, cool = (logprobs_and_entropy(logits, torch.tensor([token]), t)[0].item() for t in (1.0, 0.6))
        gap = whole - cut[token].log().item()
        yield {1: math.exp(cool), 2: whole - cool, 3: cut[token], 4: gap if cut[token] > 0 else []}


def equal_rewards(rows):
    rewards = torch.full((6,), 0.3)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return [{0: rewards.std(), 1: advantages[0], 2: grpo.compute_advantages(rewards, grpo.Args(group_size=6))[0]}]


def clip_metrics(rows):
    old, new, _, mask = b1()
    advantages, args = torch.tensor(ADVANTAGES).double(), ppo.Args(dual_clip=3.0)
    _, clipped, lower = pg_losses(old, new, advantages, args.clip_low, args.clip_high, args.dual_clip)
    _, stats = ppo.policy_loss(new, old, advantages, mask, args)
    theirs = clipped, lower, old - new
    ours = ["clip_fraction_low", "clip_fraction_high"], ["dual_clip"], ["approx_kl"]
    for row, value, names in zip(rows, theirs, ours, strict=True):
        assert re.findall(r"policy/(\w+)", row[2]) == names
        yield {1: value[mask].mean(), 3: torch.stack([stats[name][mask].double().mean() for name in names])}


CHECKS = (one_update, averages, micro_batches, truncated, equal_rewards, clip_metrics)
CHECKS = {function.__name__: function for function in CHECKS}
GIVEN = {"equal_rewards": (), "clip_metrics": (0, 2)}


@pytest.mark.parametrize("name", CHECKS)
def test_the_numbers_of_a_table_are_those_of_the_functions(name):
    rows = PAGE.tables[name]
    assert differences(rows, GIVEN.get(name, (0,)), CHECKS[name](rows)) == []


def test_every_table_of_numbers_has_its_check():
    assert sorted(PAGE.tables) == sorted(CHECKS)


def test_a_number_of_the_text_stands_in_a_table_or_is_a_setting():
    """In the paper's file of settings, in a table of theory.md, or quoted: top-p 0.7 and 0.09 of what one reads, and
    what other repositories sample with."""
    quoted = {0.09, 0.7, 0.6, 0.8, 0.85, 0.9, 0.95, 0.3, 1e-6}
    text = re.sub(r"section\s+\S+", "", PAGE.prose())
    named = set(map(float, re.findall(r"(?<![\d.])\d+\.\d+(?!\.?\d)|\d+e-\d+", text)))
    assert len(named) > 10 and named - PAGE.numbers() - THEORY.numbers() - quoted == set()
    settings = yaml.safe_load((ROOT / "configs" / "dapo-paper.yaml").read_text(encoding="utf-8"))
    length, cache = settings["max_new_tokens"], settings["overlong_cache"]
    assert (length, cache) == (1024 * 20, 1024 * 4) and settings["eval_top_p"] == 0.7
    assert all(f"{number:,}" in PAGE.text for number in (length, cache, length - cache))


def test_what_is_quoted_of_theory_stands_there():
    section = {int(part.split(".")[0]): part for part in THEORY.text.split("\n## ")[1:] if part[0].isdigit()}
    assert "| 1, 0, 0, 0 | 0.250 | 0.5000 | 1.500, -0.500, -0.500, -0.500 | 0.750," in section[8]
    assert section[8].rpartition("<!-- table:")[2].splitlines()[4].startswith("| 10, 0, 0, 0 | 2.500 | 5.0000 | 1.500,")
    assert "| 2 | -0.5 | -0.4 | -0.1 | 0.01 |\n| 3 | -2.0 | -1.5 | -0.5 | 0.05 |" in section[7]
    assert "| 0.9 | 0.72 to 1.08 |" in section[10] and "without the condition on A" in section[5]


def test_a_ratio_leaves_the_clip():
    import unpack  # of lab/, which a fork may lack

    for seed in range(5):
        rows = unpack.runs(unpack.RESULTS / "pages.jsonl")[f"ppo-seed{seed}.jsonl"]
        assert next(row for row in rows if row["step"] == 1)["policy/ratio_max"] > 2


def tensors(module):
    return {name: value for name, value in module.state_dict(keep_vars=True).items()}


def places(module):
    return {value.data_ptr() for value in tensors(module).values()}


def test_the_reference_equals_the_policy_and_shares_no_tensor():
    _, args, _, policy = embedded()
    reference, own = load_reference(policy, args), tensors(policy)
    assert args.kl_coef and not places(policy) & places(reference)
    for name, value in tensors(reference).items():
        assert torch.equal(value, own[name]) and not value.requires_grad
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.add_(1)
    assert not torch.equal(reference.lm.get_input_embeddings().weight, policy.lm.get_input_embeddings().weight)


def test_a_reward_model_starts_from_the_weights_of_the_language_model_and_shares_none():
    _, _, _, policy = embedded()
    args = reward_model.Args()
    model = reward_model.load_reward_model(args, load_tokenizer(args))
    scored, own = tensors(model.lm.base_model), tensors(policy.lm.base_model)
    assert scored.keys() == own.keys() and not places(model) & places(policy)
    assert all(torch.equal(scored[name], own[name]) for name in own) and not model.lm.score.weight.any()


def test_sections_are_counted():
    titles = re.findall(r'^## (\d+)\. "', PAGE.text, re.MULTILINE)
    subjects = PAGE.text.split("By subject: ")[1].split("\n\n")[0]
    assert titles == [str(number) for number in range(1, 25)] == sorted(re.findall(r"\d+", subjects), key=int)
