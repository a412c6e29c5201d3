"""docs/one_step.md: one step of grpo.py in numbers, and what the other algorithms make of the same rows.

tools/refresh.py writes it. `grpo.main` runs as from the command line; what its functions take and return is kept on the
way. So the page shows what was computed, and no function of a script is written here again. On a GPU other completions
are sampled: the page is that of a CPU.
"""

import collections
import contextlib
import copy
import functools
import io
import json
import math
import os
import pathlib
import re
import tempfile
import types
from unittest import mock

import torch

import dapo
import dcpo
import dpo
import dr_grpo
import grpo
import gspo
import ppo
from common.batches import split_rollout
from common.harness.distributed import clip_grad_norm
from common.harness.loading import load_tokenizer
from common.harness.metrics import Metrics
from common.rewards import load_rewards

PAGE = "docs/one_step.md"
OPTIONS = "--prompts_per_step 2 --group_size 4 --max_new_tokens 27 --num_epochs 2 --max_steps 1 --seed 51"
SIZES = dict(prompts_per_step=2, group_size=4, max_new_tokens=27)
KEPT = ("rollout", "compute_rewards", "compute_advantages", "group_statistics", "update", "policy_loss",
        "token_weights", "clip_grad_norm")  # fmt: skip
OWN = {dapo: dict(overlong_cache=7, max_sampling_rounds=1)}  # a quarter of max_new_tokens; one draw
MADE_BY = {  # pieces of lines of grpo.py
    "completions": 'batch["completions"] = pad_sequence',
    "old_logprobs": 'micro["old_logprobs"], _ =',
    "logprobs": "logprobs, entropy = model(micro",
    "ratio": "ratio = log_ratios.exp()",
    "losses": "torch.where(loss_mask, losses, 0)",
}
LINES = re.compile(r"(?<=\.py)#L[-L\d]+")
NUMBER = re.compile(r" *-?\d+\.\d+")  # with the spaces that align it
WRONG, LONG, SHORT, CUT = 0, 1, 2, 5  # rows: wrong; right with 25 tokens; right with 7; cut off
TOKEN = 5  # of row SHORT: the answer


class Step:
    """What the functions of grpo.py took and returned in its run."""

    def __init__(self):
        self.calls, self.models = collections.defaultdict(list), []
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for name in KEPT:
                stack.enter_context(mock.patch.object(grpo, name, self.kept(name)))
            stack.enter_context(mock.patch.object(grpo, "evaluate", lambda *arguments: ({}, None)))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            grpo.main([*OPTIONS.split(), "--output_dir", f"{folder}/run"])
            rows = pathlib.Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.metrics = json.loads(rows[-1])
        self.args = self.arguments("compute_advantages")[1]
        self.prompts = self.arguments("rollout")[1]
        self.accelerator, _, self.reference, _, self.batch = self.arguments("update")[:5]
        self.texts = self.arguments("compute_rewards")[2]

    def kept(self, name):
        function = getattr(grpo, name)

        def call(*arguments):
            if name == "policy_loss":  # with the weights of its update
                self.models.append(copy.deepcopy(self.arguments("update")[1]))
            self.calls[name].append([arguments, None])
            result = self.calls[name][-1][1] = function(*arguments)
            return result

        return call

    def arguments(self, name, which=0):
        return self.calls[name][which][0]

    def result(self, name, which=0):
        return self.calls[name][which][1]


# --- the second update in the other algorithms, each with its own functions ---


def own_batch(step, module, args):
    """The rows of the rollout with rewards and advantages of `module`, and its totals."""
    batch, functions = dict(step.batch), load_rewards(args)
    if module is dapo:  # its sampling decides which groups are trained on; here it draws these two
        sampler = types.SimpleNamespace(rows=step.prompts, draw=lambda count: [0, 1])
        with mock.patch.object(dapo, "rollout", lambda *arguments: dict(step.batch)):
            bound = step.accelerator, step.reference, load_tokenizer(args), functions
            sample = functools.partial(dapo.sample_round, *bound)
            groups, *_ = dapo.dynamic_batch(step.accelerator, sample, sampler, 1, args, Metrics())
        batch = dapo.unpack_groups(groups, step.reference)
    else:
        rewards, _, _ = module.compute_rewards(functions, step.prompts, step.texts, batch["truncated"])
        batch["rewards"] = rewards
    if module is dcpo:
        batch["advantages"], _ = dcpo.compute_advantages(batch["rewards"], args, torch.zeros(2, 5).double())
    elif module is not ppo:
        batch["advantages"] = module.compute_advantages(batch["rewards"], args)
    batch["loss_mask"] = batch["completion_mask"]
    ((micro,),) = split_rollout(step.accelerator, batch, args)
    return micro


def second_update(step, module):
    """Loss and gradient of `module` where grpo.py makes its second update: the same rows, old and new weights."""
    args = module.Args(**SIZES, num_minibatches=1, **OWN.get(module, {}))
    micro, (old, new) = own_batch(step, module, args), step.models
    if module is ppo:
        both = ppo.ActorCritic(old, ppo.load_critic(args, old))
        ppo.assign_advantages(step.accelerator, both, None, [micro], args, Metrics(), ppo.Coefficients(args))
    with torch.no_grad():
        micro["old_logprobs"], _ = old(micro, with_entropy=False)
        if args.kl_coef:
            micro["ref_logprobs"], _ = step.reference(micro, with_entropy=False)
    new.zero_grad()
    mask, (logprobs, entropy) = micro["loss_mask"], new(micro)
    losses, stats = module.policy_loss(
        logprobs, micro["old_logprobs"], micro["advantages"], mask, args, micro.get("ref_logprobs"), entropy
    )
    weights = module.token_weights(mask, micro["totals"], args)
    loss = (losses * weights).sum()
    loss.backward()
    norm = clip_grad_norm(step.accelerator, new.parameters(), 0)
    bounds = (1 - args.clip_low, 1 + args.clip_high)
    if module is dcpo:
        bounds = [bound[SHORT, TOKEN] for bound in dcpo.clip_bounds(micro["old_logprobs"], mask, args)]
    return micro | {"losses": losses.detach(), "ratio": stats["ratio_max"].detach(), "bounds": bounds,
                    "weights": weights, "loss": loss.detach(), "norm": norm}  # fmt: skip


def pair_update(step):
    """The same of dpo.py, with the pair that it makes of these rows, and the old weights as the reference."""
    args, (old, new) = dpo.Args(pair_samples=4, pairs_per_step=1, max_new_tokens=27), step.models
    with mock.patch.object(dpo, "rollout", lambda *arguments: dict(step.batch)):
        pairs, _ = dpo.make_pairs(step.accelerator, old, load_tokenizer(args), load_rewards(args), step.prompts, 1,
                                  args, Metrics())  # fmt: skip
    pairs = dpo.with_reference(step.accelerator, old, pairs, args)
    new.zero_grad()
    losses, stats = dpo.pair_losses(new, dpo.pair_batch(pairs, "cpu"), args)
    losses.sum().div(args.pairs_per_step).backward()
    norm = clip_grad_norm(step.accelerator, new.parameters(), 0)
    return {"margin": stats["rewards/margin"], "loss": losses.detach().sum(), "norm": norm}


# --- the page ---

INTRO = """# One step by hand

One step of `grpo.py` in numbers, small enough to check each formula with a pocket calculator. The step is a real one:

```bash
python grpo.py {options}
```

Two prompts, four completions each, two passes over them (`--num_epochs 2`): in the first update the ratio is 1, in the
second it is not. The seed is chosen for what it shows: a group with right and wrong completions, a group in which all
are wrong, and a completion that is cut off. Each tensor has a link to the line that made it. Numbers are rounded, so
a result by hand may differ by 1 or 2 in the last digit. `.` stands where the mask is false.
`python tools/refresh.py` runs the step and writes the page; a test compares them.

R = 8 rows, P = {P} prompt tokens, T = {T} completion tokens, G = 4 completions of a prompt.
"""
ROLLOUT = """
## 1. Sample

[`rollout`](../grpo.py) samples four completions of each prompt. Both prompts have 8 tokens, so nothing is padded on
the left. `↵` is a line break and `■` the stop token; each other character is a token. Row {cut} has no stop token:
`--max_new_tokens 27` has cut it off, one digit before the right answer.
"""
MASK = """
In `completions` 0 is padding and 1 the stop token; [`completion_mask`](../common/masked.py) is true up to it
([`batch["completion_mask"], batch["truncated"]`](../grpo.py)).
"""
REWARDS = """
## 2. Rewards and advantages

[`compute_rewards`](../grpo.py) compares the answer after `####` with the gold answer, and
[`compute_advantages`](../grpo.py) each reward with its group. The rewards, a tensor (8,), are made by
[`rewards = weighted_sum`](../grpo.py), mean and std (2, 1) by [`mean, _, std, zero =`](../grpo.py) with ddof 1, that is
divided by G - 1 ([`group_statistics`](../common/masked.py)), and the advantages A (8, 1) by
[`advantages / (std + args.std_eps)`](../grpo.py).
"""
ADVANTAGES = """
Row {long} reasons and row {short} guesses; both are right, and they get the same advantage. In the second group all
rewards are equal: it teaches nothing, and its advantages are exactly 0, not 0 / 0.000001
([`advantages.masked_fill(zero, 0)`](../grpo.py)).
"""
FIRST = """
## 3. The first update: the ratio is 1

[`split_rollout`](../common/batches.py) makes one minibatch of all rows, with totals `{totals}`.
[`micro["old_logprobs"], _ =`](../grpo.py) and [`logprobs, entropy = model(micro`](../grpo.py) are then the same
forward of the same weights, and so is that of the reference, `micro["ref_logprobs"]`. So every ratio is exactly 1,
every KL is 0, and [`policy_loss`](../grpo.py) returns minus the advantage at each token.
"""
FIRST_SUM = """
[`token_weights`](../grpo.py) gives each token 1 / |o| / 8 ([`loss_mask.double() / lengths`](../grpo.py)), so that each
row counts one eighth whatever its length: a token of row {short} weighs {heavy:.5f}, one of row {long} {light:.5f}. The
sum [`loss = (losses * weights).sum()`](../grpo.py) is that of minus the advantages, divided by 8:

```
loss = (0.866 - 0.866 - 0.866 + 0.866 + 0 + 0 + 0 + 0) / 8 = {loss:.3f}
```

The loss is 0 and the model learns all the same: its gradient is that of -A log pi, and
[`norm = clip_grad_norm`](../grpo.py) finds its norm to be {norm:.3f}. It is above `--max_grad_norm 1`, so the gradient
is scaled down to norm 1. Then AdamW moves the weights, at a rate of 0.0001 ([`optimizer.step()`](../grpo.py)).
"""
SECOND = """
## 4. The second update: the weights have moved

The same rows once more. `old_logprobs` stays, `logprobs` comes from the new weights. Here is row {short}, token by
token:
"""
BY_HAND = """
Its token {token} by hand, from left to right. The ratio is above 1 + `--clip_high`, and the advantage is positive: the
clipped term is the smaller one, and the policy term has no gradient here any more ([`kl_estimate(`](../grpo.py) does).

```
ratio   = exp(logprob - old)                      = exp({new:.4f} - {old:.4f}) = {ratio:.4f}
clipped = ratio between 1 - 0.2 and 1 + 0.2       = {clipped:.4f}
min     = min(ratio A, clipped A)                 = min({ratio:.4f} x {A:.4f}, {clipped:.4f} x {A:.4f}) = {least:.4f}
d       = ref - logprob                           = {old:.4f} - {new:.4f} = {d:.4f}
kl      = exp(d) - d - 1                          = {kl:.4f}                k3; ref is the old policy, in the first step
loss    = -min + 0.04 kl                          = {losses:.4f}
weight  = 1 / |o| / rows                          = 1 / 7 / 8 = {weight:.5f}
```

Token 0 moved the other way: with `#` the model decides not to reason. Its ratio is {first:.3f}, below 1, although the
row is right, because rows 0 and 3 begin with the same `#` and are wrong: two advantages of -0.866 against one of
0.866, at equal weights. Row {long}, which does not begin with it, pulls it down too.

All rows:
"""
SUM = """
Row by row, with the mean over the tokens of a row:
"""
LAST = """
```
loss = the sum of the last column = {loss:.4f}
```

The gradient norm is {norm:.3f}. The row that this run writes into `metrics.jsonl` has the means of both updates:
`optim/loss` ({first_loss:.4f} + {loss:.4f}) / 2 = {mean_loss:.4f} and `optim/grad_norm` ({first_norm:.3f} +
{norm:.3f}) / 2 = {mean_norm:.3f}. `policy/clip_fraction_high` {clip_high:.4f} is 2 of 192 tokens: row {long},
token 0, and row {short}, token {token}.
"""
OTHERS = """
## 5. The same rows in the other algorithms

What each script makes of the second update, with its own functions and defaults: the same completions, the same old
and new weights. Only the sizes are those of this step; `--overlong_cache` of `dapo.py` is 7, a quarter of 27. Rows:
{wrong} wrong, {long} right with 25 tokens, {short} right with 7, {cut} cut off. The token is again number {token} of
row {short}, with {ratio:.4f} as the ratio of its two probabilities.
"""
WHY = """
From top to bottom, what differs and why:

- **Rewards.** `dapo.py` has 1 and -1 ([`2 * parts[name] - 1`](../dapo.py)) and takes up to 1 from the last 7 tokens
  before the limit: row {long} ends at 25 of 27 and loses 5/7 ([`overlong_penalty`](../dapo.py)). `dcpo.py` gives -1
  where there is no answer to judge, as in the row that was cut off.
- **Advantages.** `dr_grpo.py` does not divide by the standard deviation 0.577. In `dapo.py` the punished row {long} is
  worth less than row {short}, and the second group is not in the batch at all ([`dynamic_batch`](../dapo.py)). In
  `dcpo.py` the standard deviation has ddof 0, and the -1 of row {cut} makes the second group differ: it trains.
  `ppo.py` has no groups: its new critic says 0 for every state, so an advantage is the reward, whitened over the 96
  tokens ([`assign_advantages`](../ppo.py)), and the second group is pushed down too.
- **Ratio and clip.** `gspo.py` has one ratio for the row, exp of the mean log-ratio over its 7 tokens: here the token
  that rose and the one that fell cancel. It lies below its band, but the advantage is positive, so the row keeps its
  gradient. `dapo.py` clips at 1.28, so that the token keeps its gradient. `dcpo.py` computes the bounds from the
  token's old probability, {old_prob:.3f} ([`clip_bounds`](../dcpo.py)).
- **Loss of the token.** -min(ratio A, clipped ratio A) everywhere; only `grpo.py` has a KL by default, and adds 0.04
  kl.
- **Weights.** A token of row {long} weighs 7/25 of one of row {short} in `grpo.py`, `gspo.py` (1 / |o| / 8) and
  `dcpo.py` (1 / |o| / 2 prompts). All tokens weigh the same in `dr_grpo.py` (1 / 27 / 8, by `--max_new_tokens`),
  `dapo.py` (1 / 46, the tokens of its four rows) and `ppo.py` (1 / 96).
- **DPO** sees one pair: row {long} was chosen, as the first of the right ones, and row {wrong} rejected
  ([`make_pairs`](../dpo.py)). Its margin beta h is {margin:.4f}, and its loss -log sigmoid({margin:.4f}) =
  {pair_loss:.4f}; before the first update it was ln 2 = 0.6931.

Neither the sums nor the norms say which algorithm learns faster. A part of the difference is a constant factor, such as
the number of completions of a prompt in `dcpo.py`. AdamW would remove such a factor, because it divides a gradient by
its own size, but `--max_grad_norm 1` comes first: it cuts the norm of `dcpo.py`, {dcpo_norm:.3f}, to 1, and leaves
that of `grpo.py`, {grpo_norm:.3f}. What remains is which rows and tokens count more than others.
"""


def tensor(name, values, mask, digits=3):
    """A tensor (R, T) of the page: name, shape, type, the line that made it, and a line for each row."""
    size = f"({', '.join(map(str, values.shape))}) {str(values.dtype).removeprefix('torch.')}"
    lines_of = []
    for row, counts in zip(values.tolist(), mask.tolist(), strict=True):
        cells = [show(x, digits) if c else "." for x, c in zip(row, counts, strict=True)]
        lines_of.append(" ".join(cell.rjust(digits + 3 if digits else 2) for cell in cells).rstrip())
    return f"`{name}` {size}, made by [`{MADE_BY[name]}`](../grpo.py):\n\n```\n" + "\n".join(lines_of) + "\n```\n"


def show(value, digits):
    """A number without a sign where it is rounded to 0."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def table(columns, rows):
    cells = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in cells)


def fold(title, *blocks):
    return f"\n<details><summary>{title}</summary>\n\n" + "\n".join(blocks) + "\n</details>\n"


def text_of(step, row):
    ended = "" if step.batch["truncated"][row] else "■"
    return f"`{step.texts[row]}{ended}`".replace("\n", "↵")


def update_of(step, which):
    """The tensors of the first or the second update."""
    new, old, *_ = step.arguments("policy_loss", which)
    losses, stats = step.result("policy_loss", which)
    losses, weights = losses.detach(), step.result("token_weights", which)
    return types.SimpleNamespace(
        new=new.detach(), old=old, ratio=stats["ratio_max"].detach(), kl=stats["kl_ref"].detach(), losses=losses,
        weights=weights, terms=losses * weights, loss=float((losses * weights).sum()),
        norm=float(step.result("clip_grad_norm", which)), totals=step.arguments("token_weights", which)[1],
    )  # fmt: skip


def sampled(step):
    batch, mask = step.batch, step.batch["completion_mask"]
    page = INTRO.format(options=OPTIONS, P=batch["prompts"].shape[1], T=mask.shape[1]) + ROLLOUT.format(cut=CUT) + "\n"
    page += table(
        ["row", "prompt", "completion", "tokens", "truncated"],
        [[row, f"`{step.prompts[row // 4].prompt}`", text_of(step, row), int(mask[row].sum()),
          bool(batch["truncated"][row])] for row in range(8)],
    )  # fmt: skip
    page += fold(
        "the ids of these rows",
        tensor("completions", batch["completions"], torch.ones_like(mask), 0),
    )
    return page + MASK


def rewarded(step):
    mean, _, std, _ = step.result("group_statistics")
    advantages, rewards = step.result("compute_advantages")[:, 0].tolist(), step.batch["rewards"].tolist()
    columns = ["row", "reward R", "mean of the group", "std", "A = (R - mean) / (std + 0.000001)"]
    rows = [[row, f"{rewards[row]:.1f}", f"{float(mean[row // 4]):.3f}", f"{float(std[row // 4]):.4f}",
             show(advantages[row], 4)] for row in range(8)]  # fmt: skip
    return REWARDS + "\n" + table(columns, rows) + ADVANTAGES.format(long=LONG, short=SHORT)


def first_update(step, first):
    totals = {name: first.totals[name] for name in ("tokens", "rows", "prompts")}
    heavy, light = (float(first.weights[row, 0]) for row in (SHORT, LONG))
    sums = dict(loss=abs(first.loss), norm=first.norm, short=SHORT, long=LONG, heavy=heavy, light=light)
    return FIRST.format(totals=totals) + FIRST_SUM.format(**sums)


def one_row(step, second):
    """The second update of row SHORT, and one of its tokens by hand."""
    columns = ["token", "", "old", "logprob", "ratio", "kl", "loss", "weight", "loss x weight"]
    rows = []
    for t, character in enumerate(f"{step.texts[SHORT]}■"):
        cells = [show(float(getattr(second, name)[SHORT, t]), 4) for name in ("old", "new", "ratio", "kl", "losses")]
        weight, term = float(second.weights[SHORT, t]), float(second.terms[SHORT, t])
        rows.append([t, f"`{character}`", *cells, show(weight, 5), show(term, 5)])
    at = {name: float(getattr(second, name)[SHORT, TOKEN]) for name in ("old", "new", "ratio", "kl", "losses")}
    A, clipped = float(step.result("compute_advantages")[SHORT]), min(max(at["ratio"], 0.8), 1.2)
    by_hand = BY_HAND.format(
        **at, token=TOKEN, A=A, clipped=clipped, least=min(at["ratio"] * A, clipped * A), d=at["old"] - at["new"],
        weight=1 / 7 / 8, first=float(second.ratio[SHORT, 0]), long=LONG,
    )  # fmt: skip
    return SECOND.format(short=SHORT) + "\n" + table(columns, rows) + by_hand


def all_rows(step, first, second):
    """The second update of all rows, their sum, and what the run logs."""
    mask, advantages = step.batch["completion_mask"], step.result("compute_advantages")[:, 0].tolist()
    names = {"old_logprobs": second.old, "logprobs": second.new, "ratio": second.ratio}
    page = fold(
        "old log-probs, log-probs, ratio, and losses",
        *(tensor(name, values, mask) for name, values in (names | {"losses": second.losses}).items()),
    )
    rows = []
    for row, tokens in enumerate(mask.sum(dim=1).tolist()):
        total = float(second.losses[row].sum())
        means = show(total, 4), show(total / tokens, 4), show(float(second.terms[row].sum()), 5)
        rows.append([row, show(advantages[row], 4), tokens, *means])
    page += SUM + "\n" + table(["row", "A", "tokens", "sum of the losses", "mean", "mean / 8"], rows)
    return page + LAST.format(
        loss=second.loss, norm=second.norm, first_loss=abs(first.loss), first_norm=first.norm, long=LONG, short=SHORT,
        token=TOKEN, mean_loss=step.metrics["optim/loss"], mean_norm=step.metrics["optim/grad_norm"],
        clip_high=step.metrics["policy/clip_fraction_high"],
    )  # fmt: skip


def others(step, second):
    """The table of all algorithms."""
    modules = (grpo, dr_grpo, dapo, gspo, dcpo, ppo)
    found, pair = [second_update(step, module) for module in modules], pair_update(step)

    def column(values, row, digits=3):
        return [show(float(x[row].reshape(-1)[0]), digits) if row < len(x) else "not in it" for x in values]

    names = ("rewards", "advantages", "ratio", "bounds", "losses", "weights", "loss", "norm")
    part = {name: [each[name] for each in found] for name in names}
    ratios = [x[SHORT, TOKEN if x.shape[1] > 1 else 0] for x in part["ratio"]]
    body = [[f"R of row {row}", *column(part["rewards"], row), ""] for row in (WRONG, LONG, SHORT, CUT)]
    body += [[f"A of row {row}", *column(part["advantages"], row), ""] for row in (WRONG, LONG, SHORT, CUT)]
    body += [
        ["ratio", *(show(float(x), 4) for x in ratios), ""],
        ["clipped to", *(" to ".join(f"{float(x):.4f}" for x in bounds) for bounds in part["bounds"]), ""],
        ["loss of the token", *(show(float(x[SHORT, TOKEN]), 4) for x in part["losses"]), ""],
        ["its weight", *(f"{float(x[SHORT, TOKEN]):.5f}" for x in part["weights"]), ""],
        [f"weight of a token of row {LONG}", *(f"{float(x[LONG, 0]):.5f}" for x in part["weights"]), ""],
        ["rows in the loss", *(len(x) for x in part["losses"]), "a pair"],
        ["**the sum**", *(show(float(x), 5) for x in part["loss"]), show(float(pair["loss"]), 5)],
        ["**gradient norm**", *(f"{float(x):.3f}" for x in part["norm"]), f"{float(pair['norm']):.3f}"],
    ]
    heads = [f"[{module.__name__}](../{module.__name__}.py)" for module in (*modules, dpo)]
    rows, old, ratio = dict(wrong=WRONG, long=LONG, short=SHORT, cut=CUT), second.old, second.ratio
    page = OTHERS.format(**rows, token=TOKEN, ratio=float(ratio[SHORT, TOKEN])) + "\n" + table(["", *heads], body)
    margin, loss = float(pair["margin"]), float(pair["loss"])
    norms = {f"{module.__name__}_norm": float(x) for module, x in zip(modules, part["norm"], strict=True)}
    return page + WHY.format(**rows, **norms, margin=margin, pair_loss=loss, old_prob=math.exp(old[SHORT, TOKEN]))


def written(step):
    """The page, its links without line numbers."""
    first, second = update_of(step, 0), update_of(step, 1)
    page = sampled(step) + rewarded(step) + first_update(step, first) + one_row(step, second)
    return page + all_rows(step, first, second) + others(step, second)


def differences(page, fresh):
    """What of the page is not what was computed: other text, or a number that differs by more than 1 in its last digit.

    Another processor may round differently in the last bits of float32, and so in the last digit that is shown.
    """
    if NUMBER.sub("#", page) != NUMBER.sub("#", fresh):
        return ["the text"]
    pairs = zip(NUMBER.findall(page), NUMBER.findall(fresh), strict=True)
    return [f"{old}: {new}" for old, new in pairs
            if abs(float(old) - float(new)) > 1.01 * 10.0 ** -len(new.split(".")[1])]  # fmt: skip


@functools.cache
def computed():
    return written(Step())


def refresh(tree):
    os.environ["ACCELERATE_USE_CPU"] = "true"  # the page is that of a CPU
    if differences(LINES.sub("", tree.read(PAGE)), computed()):
        tree.write(PAGE, computed())
    return []
