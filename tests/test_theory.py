"""docs/theory.md: every number of its tables, from the row it stands in, by the functions of the scripts."""

import math
import re

import pytest
import torch

import dapo
import dcpo
import dpo
import dr_grpo
import grpo
import gspo
import ppo
import reward_model
from common.masked import group_statistics, kl_estimate, log_ratio
from page_tables import Page, differences, numbers
from testbed import script, totals_of

PAGE = Page("theory.md")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def columns(*values):
    """Numbers as tensors (1, 1) in float64, the first of which asks for its gradient."""
    first, *rest = (tensor([[value]]) for value in values)
    return first.requires_grad_(), *rest


ONE = torch.ones(1, 1, dtype=torch.bool)


def objective(A, ratio, **options):
    """Objective and gradient of a token, by the function of ppo.py; grpo.py's has the same values."""
    values = []
    for module in (ppo, grpo):
        new, old, advantage = columns(math.log(ratio), 0.0, A)
        losses, _ = module.policy_loss(new, old, advantage, ONE, module.Args(**options))
        losses.sum().backward()
        values.append((-losses.item(), -new.grad.item()))
    assert values[0] == values[1]
    return values[0]


def clipped(ratio):
    args = ppo.Args()
    return min(max(ratio, 1 - args.clip_low), 1 + args.clip_high)


def gradients(module, logprobs, old_logprobs, advantages, mask, **options):
    """The loss of rows that are one optimizer step and one group, and its gradient (R, T) by the log-probs."""
    args, logprobs = module.Args(group_size=len(mask), **options), logprobs.clone().requires_grad_()
    losses, stats = module.policy_loss(logprobs, old_logprobs, advantages, mask, args)
    loss = (losses * module.token_weights(mask, totals_of(mask, len(mask)), args)).sum()
    loss.backward()
    return loss.item(), logprobs.grad, stats


def masked(lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


# --- a table is its rows, lists of cells; its check gives for each row {place of a cell: its number or numbers} ---


def baseline(rows):
    found = []
    for i, (p, reward) in enumerate(numbers(*row[1:3]) for row in rows[:2]):
        assert p == 0.5
        logits = tensor([0.0, 0.0]).requires_grad_()
        logprob = logits.log_softmax(dim=0)[i].view(1, 1)
        advantages = tensor([[reward, reward - PAGE.heads["baseline"][4]]])  # two tokens, the same one
        losses, _ = grpo.policy_loss(logprob, logprob.detach(), advantages, ONE, grpo.Args())
        found.append([-torch.autograd.grad(loss, logits, retain_graph=True)[0][0] for loss in losses[0]])
    found = tensor(found)
    found = [*found, found.mean(dim=0), found.var(dim=0, correction=0)]
    return [{3: without, 4: with_baseline} for without, with_baseline in found]


def importance(rows):
    for (p,) in (numbers(row[0]) for row in rows):
        new, old = tensor([[p, 1 - p]]), tensor([[0.5, 0.5]])
        weights = log_ratio(new.log(), old.log(), torch.ones(1, 2, dtype=torch.bool)).exp()
        mean, second = (old * weights).sum(), (old * weights.square()).sum()
        variance = second - mean**2
        yield {1: weights[0, 0], 2: weights[0, 1], 3: mean, 4: variance, 5: second**100 - mean**200}


def penalty(rows):
    for kl, before in (numbers(*row[:2]) for row in rows):
        args = ppo.Args(penalty_target=0.01, penalty_coef=before)
        coefficients = ppo.Coefficients(args)
        coefficients.steer_penalty(kl, args)
        yield {2: coefficients.penalty}


def four_cases(rows):
    for A, ratio in (numbers(*row[:2]) for row in rows):
        value, gradient = objective(A, ratio)
        yield {2: ratio * A, 3: clipped(ratio) * A, 4: value, 5: gradient}


def dual_clip(rows):
    for A, ratio in (numbers(*row[:2]) for row in rows):
        without, bounded = objective(A, ratio), objective(A, ratio, dual_clip=PAGE.heads["dual_clip"][5])
        yield {2: clipped(ratio) * A} | dict(zip((3, 4, 5, 6), without + bounded, strict=True))


def without_condition(rows):
    for A, ratio in (numbers(*row[:2]) for row in rows):
        value = objective(A, ratio, dual_clip=3)[0]
        yield {2: value, 3: max(objective(A, ratio)[0], 3 * A)}


def gae(rows):
    values, rewards = (tensor([[float(row[place]) for row in rows]]) for place in (1, 2))
    mask = torch.ones_like(values, dtype=torch.bool)
    found = [ppo.gae(rewards, values, mask, 1.0, lam)[0] for lam in PAGE.heads["gae"][3:6]]
    _, returns = ppo.compute_advantages(rewards, values, mask, ppo.Args())  # lambda 1 is the default
    return [dict(zip((3, 4, 5, 6), column, strict=True)) for column in zip(*found, returns[0], strict=True)]


def horizon(rows):
    lambdas = tensor(PAGE.heads["horizon"][1:])
    longest = int(rows[-1][0])
    rewards = torch.zeros(5, longest + 1, dtype=torch.float64)
    rewards[:, -1] = 1
    seen = ppo.gae(rewards, torch.zeros_like(rewards), torch.ones_like(rewards, dtype=torch.bool), 1.0, lambdas)
    return [dict(enumerate(seen[:, longest - int(row[0])], 1)) for row in rows]


def length_adaptive(rows):
    mask = masked(PAGE.heads["length_adaptive"][1:])
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    last = mask.sum(dim=1) - 1
    rewards[torch.arange(len(mask)), last] = 1
    args = ppo.Args(length_adaptive_alpha=0.05)
    seen, _ = ppo.compute_advantages(rewards, torch.zeros_like(rewards), mask, args)
    return [dict(enumerate(seen[torch.arange(len(mask)), last - 1], 1))]  # the last but one token sees it by lambda


def value_loss(rows):
    for old, target, value in (numbers(*row[:3]) for row in rows):
        new, old, target = columns(value, old, target)
        losses, _ = ppo.value_loss(new, old, target, ONE, ppo.Args())
        losses.sum().backward()
        yield {3: new.detach().clamp(old - 0.2, old + 0.2), 4: losses, 5: new.grad}


def estimators(rows):
    for pi, ref in (numbers(*row[:2]) for row in rows):
        pair = tensor([[pi]]).log(), tensor([[ref]]).log()
        yield {place: kl_estimate(*pair, ONE, f"k{place - 1}") for place in (2, 3, 4)}


def shaped(rows):
    old, ref = (tensor([[float(row[place]) for row in rows]]) for place in (1, 2))
    mask = torch.ones_like(old, dtype=torch.bool)
    kl = kl_estimate(old, ref, mask, "k1")
    rewards = ppo.shape_rewards(tensor([1.0]), torch.tensor([False]), kl, mask, ppo.Args(), 0.1)
    return [{3: k1, 4: reward} for k1, reward in zip(kl[0], rewards[0], strict=True)]


def group(rows):
    for row in rows:
        rewards = tensor(numbers(row[0]))
        mean, _, std, _ = group_statistics(rewards[None], 1)
        of = {place: module.compute_advantages(rewards, module.Args(group_size=4))
              for place, module in ((3, grpo), (4, dr_grpo))}  # fmt: skip
        yield {1: mean, 2: std} | of


def zero_loss(rows):
    mask, zeros = masked([2, 4]), torch.zeros(2, 4, dtype=torch.float64)
    for row, module, options in zip(rows, (grpo, dr_grpo, dapo), ({}, {"max_new_tokens": 4}, {}), strict=True):
        assert row[0].startswith(f"{module.__name__}.py")
        advantages = module.compute_advantages(tensor([1.0, 0.0]), module.Args(group_size=2))
        loss, gradient, _ = gradients(module, zeros, zeros, advantages, mask, **options)
        yield {1: loss, 2: gradient[0, 0], 3: gradient[1, 3]}


def weights(rows):
    mask = masked([10, 100])
    for row in rows:
        found = []
        for name in re.findall(r"(\w+)\.py", row[0]):
            module = script(name)
            found.append(module.token_weights(mask, totals_of(mask, 2), module.Args(group_size=2, max_new_tokens=100)))
        assert all(torch.equal(found[0], other) for other in found)
        yield {1: found[0][0, 0], 2: found[0][1, 0], 3: found[0][0].sum(), 4: found[0][1].sum()}


def intervals(rows):
    for (p,) in (numbers(row[0]) for row in rows):
        fixed = (dcpo.Args(dynamic_clip=False, clip_low=module.Args().clip_low, clip_high=module.Args().clip_high)
                 for module in (grpo, dapo))  # fmt: skip
        bounds = (dcpo.clip_bounds(tensor([[p]]).log(), ONE, args) for args in (*fixed, dcpo.Args()))
        yield {place: p * torch.cat(pair) for place, pair in enumerate(bounds, 1)}


def keep(rows):
    """A group with k right answers comes with the binomial probability, and is kept if it has an advantage."""
    args = dapo.Args(group_size=16)
    kept = [dapo.compute_advantages(tensor([1.0] * k + [0.0] * (16 - k)), args).any().item() for k in range(17)]
    shares = [sum(math.comb(16, k) * p**k * (1 - p) ** (16 - k) for k in range(17) if kept[k])
              for p in PAGE.heads["keep"][1:]]  # fmt: skip
    return [dict(enumerate(shares, 1)), dict(enumerate((1 / share for share in shares), 1))]


def overlong(rows):
    lengths = tensor(PAGE.heads["overlong"][1:])
    penalties = dapo.overlong_penalty(lengths, dapo.Args(max_new_tokens=20480, overlong_cache=4096))
    return [dict(enumerate(penalties, 1))]


def gspo_rows(rows):
    drawn = [numbers(row[0]) for row in rows]
    mask = masked([len(row) for row in drawn])
    logs = torch.zeros(mask.shape, dtype=torch.float64)
    logs[mask] = 1e-4 * tensor([value for row in drawn for value in row])
    rewards = tensor([1.0, 0.0, 0.0, 1.0])
    advantages = gspo.compute_advantages(rewards, gspo.Args(group_size=4))
    _, gradient, stats = gradients(gspo, logs, torch.zeros_like(logs), advantages, mask)
    assert all(len(set(row[valid].tolist())) == 1 for row, valid in zip(gradient, mask, strict=True))
    counts = []
    for low, high in ((3e-4, 4e-4), (0.2, 0.2)):
        args = grpo.Args(clip_low=low, clip_high=high)
        _, tokens = grpo.policy_loss(logs, torch.zeros_like(logs), advantages, mask, args)
        counts.append(((tokens["clip_fraction_low"] | tokens["clip_fraction_high"]) & mask).sum(dim=1))
    s = 1e4 * (stats["ratio_max"] - 1)
    return [{1: advantages[i], 2: s[i], 3: gradient[i, 0], 4: counts[0][i], 5: counts[1][i]} for i in range(len(rows))]


def sas(rows):
    args, history = dcpo.Args(group_size=4), torch.zeros(1, 5, dtype=torch.float64)
    for row in rows:
        rewards = tensor(numbers(row[1]))
        alone = dcpo.compute_advantages(rewards, dcpo.Args(group_size=4, smooth_advantage=False), history)
        advantages, history = dcpo.compute_advantages(rewards, args, history)
        assert history[0, 0] == int(row[0])
        yield {2: history[0, 1], 3: history[0, 2].sqrt(), 4: alone[0], 5: advantages}


def dpo_rows(rows):
    args, none = dpo.Args(), tensor([1.0])
    ref_chosen, ref_rejected = (tensor([value]) for value in numbers(*rows[0][:2]))
    for row in rows:
        chosen, rejected = (tensor([value]).requires_grad_() for value in numbers(*row[:2]))
        losses = dpo.preference_loss(chosen, rejected, ref_chosen, ref_rejected, none, none, args)
        losses.sum().backward()
        scores = args.beta * (chosen - ref_chosen), args.beta * (rejected - ref_rejected)
        torch.testing.assert_close(losses, reward_model.reward_loss(*scores, reward_model.Args()))
        assert chosen.grad == -rejected.grad
        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        yield {2: h, 3: losses, 4: -chosen.grad / args.beta, 5: (chosen - ref_chosen).exp()}


CHECKS = (baseline, importance, penalty, four_cases, dual_clip, without_condition, gae, horizon, length_adaptive,
          value_loss, estimators, shaped, group, zero_loss, weights, intervals, keep, overlong, gspo_rows, sas,
          dpo_rows)  # fmt: skip
CHECKS = {function.__name__.removesuffix("_rows"): function for function in CHECKS}
GIVEN = {  # the places of the cells that a check reads; all others it computes
    "baseline": (0, 1, 2), "four_cases": (0, 1), "dual_clip": (0, 1), "without_condition": (0, 1), "penalty": (0, 1),
    "gae": (0, 1, 2), "value_loss": (0, 1, 2), "estimators": (0, 1), "shaped": (0, 1, 2), "sas": (0, 1), "dpo": (0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_the_numbers_of_a_table_are_those_of_the_functions(name):
    rows = PAGE.tables[name]
    assert differences(rows, GIVEN.get(name, (0,)), CHECKS[name](rows)) == []


def test_every_table_of_numbers_has_its_check():
    assert sorted(PAGE.tables) == sorted(CHECKS)
    others = [line for line in PAGE.prose().splitlines() if line.startswith("| ")]
    assert not any(re.search(r"\d\.\d", line) for line in others), "a table of numbers without a name"


def test_a_number_of_the_text_stands_in_a_table():
    options = {1.5, 0.28, 3e-4, 4e-4, 1e-4}  # what steers the penalty, DAPO's and GSPO's bands, and a unit
    named = re.findall(r"(?<![\d.])\d+\.\d+(?!\.?\d)|\d+e-\d+", PAGE.prose())
    assert len(named) > 10 and set(map(float, named)) - PAGE.numbers() - options == set()
    assert (dapo.Args().clip_high, gspo.Args().clip_low, gspo.Args().clip_high) == (0.28, 3e-4, 4e-4)


def test_who_takes_a_rollout_once():
    section = PAGE.text.split("\n## 11. ")[1].split("\n## ")[0].split("By default ")[1]
    named = re.findall(r"`(\w+)\.py`", section)
    assert [script(name).Args().num_minibatches for name in named] == [1, 4, 4, 4, 4, 4]


def test_the_sections_that_the_questions_name():
    sections = set(re.findall(r"^## (\d+)\. ", PAGE.text, re.MULTILINE))
    named = re.findall(r"^\| .*\? \| ([\d, ]+) \|$", PAGE.text, re.MULTILINE)
    assert len(named) == 10 and set(re.findall(r"\d+", " ".join(named))) <= sections
