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
from page_tables import NUMBER, Page, agrees, differences, numbers
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


def four_cases(rows):
    for A, ratio in (numbers(*row[:2]) for row in rows):
        value, gradient = objective(A, ratio)
        yield {2: ratio * A, 3: clipped(ratio) * A, 4: value, 5: gradient}


def dual_clip(rows):
    """Without its condition it would be the larger of the objective and c A for either sign of A."""
    bound = PAGE.heads["dual_clip"][4]
    for A, ratio in (numbers(*row[:2]) for row in rows):
        found = objective(A, ratio) + objective(A, ratio, dual_clip=bound)
        yield dict(zip((2, 3, 4, 5), found, strict=True)) | {6: max(found[0], bound * A)}


def gae(rows):
    values, rewards = (tensor([[float(row[place]) for row in rows]]) for place in (1, 2))
    mask = torch.ones_like(values, dtype=torch.bool)
    found = [ppo.gae(rewards, values, mask, 1.0, lam)[0] for lam in PAGE.heads["gae"][3:6]]
    _, returns = ppo.compute_advantages(rewards, values, mask, ppo.Args())  # lambda 1 is the default
    return [dict(zip((3, 4, 5, 6), column, strict=True)) for column in zip(*found, returns[0], strict=True)]


def n_step(rows):
    """n-step: GAE with lambda 1 of the first n tokens, the last of which is paid what the critic says after it; the
    weights: what the estimate of one n alone adds to GAE."""
    above = PAGE.tables["gae"]
    values, rewards = (tensor([[float(row[place]) for row in above]]) for place in (1, 2))
    ones, lambdas = torch.ones_like(values, dtype=torch.bool), PAGE.heads["n_step"][2:]
    found, last = [], len(above)
    for n in range(1, last + 1):
        paid = rewards[:, :n].clone()
        paid[:, -1] += values[0, n] if n < last else 0
        found.append(ppo.gae(paid, values[:, :n], ones[:, :n], 1.0, 1.0)[0, 0].item())
    weights = [
        [(1 - lam) * lam ** (n - 1) if n < last else lam ** (n - 1) for n in range(1, last + 1)] for lam in lambdas
    ]
    for lam, column in zip(lambdas, weights, strict=True):
        mean = sum(weight * A for weight, A in zip(column, found, strict=True))
        assert mean == pytest.approx(ppo.gae(rewards, values, ones, 1.0, lam)[0, 0].item())
    assert [numbers(row[0])[0] for row in rows] == list(range(1, last + 1))
    return [{1: A, 2: w[0], 3: w[1], 4: w[2]} for A, w in zip(found, zip(*weights, strict=True), strict=True)]


def bias(rows):
    """All completions of eight tokens; the critic says 4, and half of what each token so far has changed."""
    tokens = torch.cartesian_prod(*[tensor([0.0, 1.0])] * 8)  # 1: an a
    changes = 0.5 * (tokens - 0.5)
    values, rewards = 4 + changes.cumsum(dim=1) - changes, torch.zeros_like(tokens)
    rewards[:, -1] = tokens.sum(dim=1)
    for (lam,) in (numbers(row[0]) for row in rows):
        A = ppo.gae(rewards, values, torch.ones_like(tokens, dtype=torch.bool), 1.0, lam)[tokens[:, 0] == 1, 0]
        mean, variance = A.mean(), A.var(correction=0)
        errors = [(variance / n + (mean - 0.5) ** 2).sqrt() for n in (1, 1000)]
        yield {1: mean, 2: mean - 0.5, 3: variance, 4: errors[0], 5: errors[1]}


def horizon(rows):
    lambdas = tensor(PAGE.heads["horizon"][1:])
    longest = int(rows[-1][0])
    rewards = torch.zeros(len(lambdas), longest + 1, dtype=torch.float64)
    rewards[:, -1] = 1
    seen = ppo.gae(rewards, torch.zeros_like(rewards), torch.ones_like(rewards, dtype=torch.bool), 1.0, lambdas)
    return [dict(enumerate(seen[:, longest - int(row[0])], 1)) for row in rows]


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


def deviation(rows):
    """The expected gradient by the logit of `gamble`: all groups that can come, by the script's own advantages."""
    pays = {"safe": (0.5, 1.0, -0.5), "ten": (0.15, 10.0, 0.5), "nothing": (0.35, 0.0, 0.5)}
    chances, rewards, scores = (tensor(column) for column in zip(*pays.values(), strict=True))  # score: of the logit
    for G in (int(row[0]) for row in rows):
        counts = torch.tensor([(a, b, G - a - b) for a in range(G + 1) for b in range(G + 1 - a)])
        orders = torch.lgamma(tensor(G + 1)) - torch.lgamma(counts + tensor(1)).sum(dim=1)  # log of the multinomial
        logs = orders + counts.double() @ chances.log()
        drawn = torch.stack([torch.arange(3).repeat_interleave(count) for count in counts])  # (groups, G)
        found = []
        for args in (grpo.Args(group_size=G, normalize_std=False), grpo.Args(group_size=G)):
            A = grpo.compute_advantages(rewards[drawn].flatten(), args).view(-1, G)
            found.append((logs.exp() * (A * scores[drawn]).mean(dim=1)).sum().item())
        yield {1: found[0], 2: found[0] * G / (G - 1), 3: found[1]}


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


def gspo_rows(rows):
    drawn = [numbers(row[0]) for row in rows]
    mask = masked([len(row) for row in drawn])
    logs = torch.zeros(mask.shape, dtype=torch.float64)
    logs[mask] = 1e-4 * tensor([value for row in drawn for value in row])
    zeros, rewards = torch.zeros_like(logs), tensor([float(row[1]) for row in rows])
    advantages = gspo.compute_advantages(rewards, gspo.Args(group_size=len(rows)))
    _, gradient, stats = gradients(gspo, logs, zeros, advantages, mask)
    assert all(len(set(row[valid].tolist())) == 1 for row, valid in zip(gradient, mask, strict=True))
    band, wide = grpo.Args(clip_low=gspo.Args().clip_low, clip_high=gspo.Args().clip_high), grpo.Args()
    tokens, none = (clipped_tokens(logs, advantages, mask, args) for args in (band, wide))
    assert not none.any()  # by 0.2
    s = 1e4 * (stats["ratio_max"] - 1)
    return [{2: advantages[i], 3: s[i], 4: gradient[i, 0], 5: tokens[i]} for i in range(len(rows))]


def clipped_tokens(logs, advantages, mask, args):
    """How many tokens of each row are clipped one by one."""
    _, stats = grpo.policy_loss(logs, torch.zeros_like(logs), advantages, mask, args)
    return ((stats["clip_fraction_low"] | stats["clip_fraction_high"]) & mask).sum(dim=1)


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


CHECKS = (baseline, importance, four_cases, dual_clip, gae, n_step, bias, horizon, estimators, shaped, group, deviation,
          weights, intervals, gspo_rows, sas, dpo_rows)  # fmt: skip
CHECKS = {function.__name__.removesuffix("_rows"): function for function in CHECKS}
GIVEN = {  # the places of the cells that a check reads; all others it computes
    "baseline": (0, 1, 2), "four_cases": (0, 1), "dual_clip": (0, 1), "gae": (0, 1, 2), "estimators": (0, 1),
    "shaped": (0, 1, 2), "gspo": (0, 1), "sas": (0, 1), "dpo": (0, 1),
}  # fmt: skip


# --- a sentence with numbers: its words, {} for a number that is computed, and those numbers ---


def penalty_coefficients():
    """After KLs on both sides of target / 1.5 and of 1.5 x target, beginning with 1."""
    args = ppo.Args(penalty_target=0.3)
    for kl in (0.19, 0.21, 0.44, 0.46):
        coefficients = ppo.Coefficients(args)
        coefficients.steer_penalty(kl, args)
        yield coefficients.penalty


def length_adaptive(lengths):
    """By what lambda the last but one token sees a reward on the last."""
    mask = masked(lengths)
    last = mask.sum(dim=1, keepdim=True) - 1
    rewards = torch.zeros(mask.shape, dtype=torch.float64).scatter(1, last, 1.0)
    args = ppo.Args(length_adaptive_alpha=0.05)
    seen, _ = ppo.compute_advantages(rewards, torch.zeros_like(rewards), mask, args)
    return seen.gather(1, last - 1)[:, 0].tolist()


def zero_loss():
    """The loss of two completions, right with 2 tokens and wrong with 4, and its gradient by a log-prob of each."""
    mask, zeros = masked([2, 4]), torch.zeros(2, 4, dtype=torch.float64)
    advantages = grpo.compute_advantages(tensor([1.0, 0.0]), grpo.Args(group_size=2))
    loss, gradient, _ = gradients(grpo, zeros, zeros, advantages, mask)
    assert len(set(gradient[1].tolist())) == 1
    return loss, gradient[0, 0].item(), gradient[1, 3].item()


def groups_sampled(chance):
    """For one that is kept: a group with k right answers comes with the binomial probability, and is kept if it has an
    advantage."""
    args = dapo.Args(group_size=16)
    kept = [dapo.compute_advantages(tensor([1.0] * k + [0.0] * (16 - k)), args).any().item() for k in range(17)]
    return 1 / sum(math.comb(16, k) * chance**k * (1 - chance) ** (16 - k) for k in range(17) if kept[k])


def overlong(lengths):
    return dapo.overlong_penalty(tensor(lengths), dapo.Args(max_new_tokens=20480, overlong_cache=4096)).tolist()


def left_after_ten(widths):
    """Of a token's probability, after ten rollouts that push it to its lower bound."""
    bounds = (dcpo.clip_bounds(tensor([[0.0]]), ONE, dcpo.Args(dynamic_clip=False, clip_low=width)) for width in widths)
    return [low.item() ** 10 for low, _ in bounds]


SENTENCES = {
    "{} of its probability is left with 0.2, {} with 0.28 and {} with 0.4": left_after_ten([0.2, 0.28, 0.4]),
    "this is {} up to 20 tokens, {} at 100 and {} at 1000": length_adaptive([20, 100, 1000]),
    "the loss is {}, and its gradient by each log-prob is {} in the right one and {} in the wrong one": zero_loss(),
    "at 0.9 it takes {} groups to keep one, at 0.99 it takes {}": [groups_sampled(0.9), groups_sampled(0.99)],
    "it is {} up to 16384 tokens, {} at 18432 and {} at 20480": overlong([16384, 18432, 20480]),
}


def sentence(words):
    """Where it stands on the page; its groups are the numbers."""
    found = re.search(re.escape(words).replace(r"\{\}", f"({NUMBER.pattern})"), " ".join(PAGE.text.split()))
    assert found, f"not on the page: {words}"
    return found


@pytest.mark.parametrize("words", SENTENCES)
def test_the_numbers_of_a_sentence_are_those_of_the_functions(words):
    for printed, value in zip(sentence(words).groups(), SENTENCES[words], strict=True):
        assert agrees(printed, value), f"{words}: {printed} is {value:.6g}"


def test_rules_in_words():
    assert list(penalty_coefficients()) == [0.5, 1, 1, 2]
    new, old, advantage = columns(math.log(1.3), 0.0, 2.0)
    losses, _ = ppo.policy_loss(new, old, advantage, ONE, ppo.Args(objective="penalty", penalty_coef=0.5))
    losses.sum().backward()
    assert -new.grad.item() == pytest.approx(1.3 * 2 + 0.5)  # r A + the coefficient
    assert length_adaptive([3, 19]) == [0, 0]
    assert groups_sampled(0.5) < 1.0001 and overlong([16384, 20480]) == [0, -1] and overlong([16385])[0] < 0


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
    computed = {value for words in SENTENCES for value in numbers(sentence(words)[0])}
    named = re.findall(r"(?<![\d.])\d+\.\d+(?!\.?\d)|\d+e-\d+", PAGE.prose())
    assert len(named) > 10 and set(map(float, named)) - PAGE.numbers() - {abs(v) for v in computed} - options == set()
    assert (dapo.Args().clip_high, gspo.Args().clip_low, gspo.Args().clip_high) == (0.28, 3e-4, 4e-4)
    assert (dcpo.Args().clip_low, dcpo.Args().clip_high, dcpo.Args().max_ratio) == (0.16, 0.2, 10)


def test_who_takes_a_rollout_once():
    section = PAGE.text.split("\n## 2. ")[1].split("\n## ")[0].split("By default ")[1]
    named = re.findall(r"`(\w+)\.py`", section)
    assert [script(name).Args().num_minibatches for name in named] == [1, 4, 4, 4, 4, 4]
