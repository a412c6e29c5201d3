"""The loss of a token depends only on its row and its optimizer step, also where ratios differ from 1.

A fork breaks this first, with a number that it takes over the rows of a forward, over the width of a tensor, or on one
process alone. In the first update of a rollout every ratio is exactly 1 and nothing is clipped, which hides much of
this. So these tests train on a rollout twice, move all weights by a fixed noise between the two updates, and set the
clip so that it acts on 5 to 20 % of the tokens on each side. Both updates must have the same gradients, however the
rollout is split, padded, ordered, packed and spread over processes.
"""

import copy
import dataclasses
import functools

import pytest
import torch
from accelerate import Accelerator

import attention
from common.load import load_data, load_policy, load_tokenizer
from common.masked import Means
from common.pairs import pair_batches, read_pairs
from testbed import (
    PAIRS,
    SCRIPTS,
    SHIPPED,
    GradientRecorder,
    embedded_pairs,
    largest_difference,
    problem,
    script,
    trainable,
)
from threads import Processes

MOVE = 0.2  # standard deviation of the factor on each weight, between the two updates
COMPANY = "the loss of a {0} depends on which {1} share its micro-batch: a number is taken over one forward"
PROCESS = "the loss of a {0} depends on which process has its {1}: a number is taken by each process alone"
PADDING = "the loss of a {0} depends on the padding: a number is taken over the width of a tensor"
ORDER = "the loss of a {0} depends on where its {1} stands in the batch"
PASSES = "the loss of a {0} depends on the passes that its log-probs are computed in"
TOKENS, COMPLETIONS = ("token", "rows"), ("pair", "pairs")


class MovingRecorder(GradientRecorder):
    """Record the gradients of each update, and after the first one move all weights by the same noise."""

    def step(self):
        super().step()
        if len(self.steps) == 1:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1 + MOVE * torch.randn(parameter.shape, generator=generator))


def same(found, expected, why):
    """Fail, and say what the script does, unless both have the same gradients in each update, and the same metrics."""
    (steps, metrics), (expected_steps, expected_metrics) = found, expected
    assert len(steps) == len(expected_steps)
    for number, (step, other) in enumerate(zip(steps, expected_steps, strict=True), 1):
        apart = largest_difference(step, other) / max(float(gradient.abs().max()) for gradient in other)
        assert apart < 1e-5, f"{why} (the gradients of update {number} are {apart:.1g} apart)"
    for name, value in metrics.items():
        assert value == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-6), f"{name}: {why}"


# --- scripts that sample ---

SIZES = dict(num_epochs=2, micro_batch_size=16, temperature=4.0)  # a flat policy: most tokens can move
SIZES |= dict(kl_coef=0.04, entropy_coef=0.01, max_grad_norm=0.0)  # clipped gradients have one size


def prepared(name, **options):
    """Return (module, args, lm, reference, batch) of a rollout of 16 completions, in one micro-batch."""
    module, args, *rest = problem(name, groups=4, **SIZES)
    args.clip_low, args.clip_high, _ = bounds(name)
    for option, value in options.items():
        setattr(args, option, value)
    return module, args, *rest


def updated(module, args, lm, reference, batch, accelerator=None):
    """The gradients of both updates, by the script's own `update`, and its metrics."""
    accelerator = accelerator or Accelerator(cpu=True)
    model, groups = trainable(module, args, lm)
    recorder, metrics = MovingRecorder(model, groups), Means()
    module.update(accelerator, model, reference, recorder, batch, args, metrics)
    return recorder.steps, metrics.reduce(accelerator)


@functools.cache
def bounds(name):
    """Return --clip_low and --clip_high that clip a tenth of the tokens on each side if any do, and both shares."""
    module, args, *rest = problem(name, groups=4, **SIZES)
    calls, policy_loss = [], module.policy_loss

    def spy(*inputs, **named):
        calls.append((inputs, named))
        return policy_loss(*inputs, **named)

    module.policy_loss = spy
    try:
        updated(module, args, *rest)
    finally:
        module.policy_loss = policy_loss
    tried = []
    for bound in (2.0, 1.0, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001):
        args.clip_low = args.clip_high = bound
        tried.append((bound, clipped(policy_loss, args, *calls[-1])))
    low = min(tried, key=lambda pair: abs(pair[1][0] - 0.1))
    high = min(tried, key=lambda pair: abs(pair[1][1] - 0.1))
    return low[0], high[0], (low[1][0], high[1][1])


def clipped(policy_loss, args, inputs, named):
    """Return the shares of tokens in the loss that have no gradient, with advantages below 0 and above 0."""
    plain = copy.copy(args)
    plain.kl_coef = plain.entropy_coef = 0.0  # which would have a gradient of their own
    logprobs, old_logprobs, advantages, loss_mask, _, *rest = inputs
    logprobs = logprobs.detach().requires_grad_()
    losses, _ = policy_loss(logprobs, old_logprobs, advantages, loss_mask, plain, *rest, **named)
    losses.sum().backward()
    still = loss_mask & (logprobs.grad == 0)
    return [float((still & side).sum() / loss_mask.sum()) for side in (advantages < 0, advantages > 0)]


@functools.cache
def expected(name):
    return updated(*prepared(name))


def shuffled(batch, order):
    return {column: values[order] for column, values in batch.items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_clip_acts_in_these_tests(name):
    steps, metrics = expected(name)
    shares = bounds(name)[2]
    acts = all(0.05 <= share <= 0.2 for share in shares)
    if name not in SHIPPED and not acts:  # as of CISPO, whose clipped ratio is a weight
        pytest.skip(f"no --clip_low and --clip_high stop 5 to 20 % of the tokens on each side, the best {shares}")
    assert acts, bounds(name)
    assert len(steps) == 2 and metrics["optim/grad_norm"] > 0


def padded(batch):
    """Return the batch with columns of other tokens on both sides."""
    width = batch["completions"].shape[1]
    wide = {}
    for column, values in batch.items():
        is_wide = values.dim() == 2 and values.shape[1] == width
        sides = (2, 0) if column in ("prompts", "prompt_mask") else (0, 5 * is_wide)
        wide[column] = torch.nn.functional.pad(values, sides, value=3 if column in ("prompts", "completions") else 0)
    return wide


def in_other_order(batch):
    return shuffled(batch, torch.arange(16).view(4, 4)[[3, 0, 2, 1]].flatten())


CHANGES = {  # options of the second update, its batch, and what a script does that has another gradient
    "padding": ({}, padded, PADDING.format("token")),
    "order of groups": (dict(micro_batch_size=5), in_other_order, ORDER.format("token", "group")),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("size", [1, 5])
def test_gradient_is_invariant_to_micro_batches(name, size):
    same(updated(*prepared(name, micro_batch_size=size)), expected(name), COMPANY.format(*TOKENS))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("options, change, why", CHANGES.values(), ids=CHANGES)
def test_gradient_is_invariant(name, options, change, why):
    *rest, batch = prepared(name, **options)
    same(updated(*rest, change(batch)), expected(name), why)


@pytest.fixture(params=["shared prompts", "packed"])
def speed_up(request, monkeypatch):
    """`speed_up` of fast/; packed attention is a loop here."""
    shortcuts = pytest.importorskip("fast.shortcuts")
    if request.param == "packed":
        packing = pytest.importorskip("fast.packing")
        monkeypatch.setattr(packing, "varlen_attn", attention.varlen_attn)
        packing.register_packed_sdpa()
        find = shortcuts.find_shortcuts
        monkeypatch.setattr(shortcuts, "find_shortcuts", lambda *inputs: dataclasses.replace(find(*inputs), packs=True))
    return shortcuts.speed_up


@pytest.mark.parametrize("name", SCRIPTS)
def test_gradient_is_invariant_to_fast(name, speed_up):
    module, args, lm, reference, batch = prepared(name, micro_batch_size=5, fast=True)
    for model in (lm, reference):
        speed_up(model, Accelerator(cpu=True))
    same(updated(module, args, lm, reference, batch), expected(name), PASSES.format("token"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_gradient_is_invariant_to_processes(name):
    """One of the two processes has the longer completions."""

    def one_process(accelerator):
        *rest, batch = prepared(name, micro_batch_size=5)
        lengths = batch["completion_mask"].view(4, -1).sum(dim=1)
        rows = torch.arange(16).view(4, 4)[lengths.sort().indices].view(2, 8)[accelerator.process_index]
        return updated(*rest, shuffled(batch, rows), accelerator)

    expected(name)
    same(joined(Processes(2).run(one_process)), expected(name), PROCESS.format(*TOKENS))


def joined(results):
    """The gradients, averaged as DDP does, and the metrics, which both have; the norms are of gradients before that."""
    (first, metrics), (second, others) = results
    assert metrics == others
    metrics = {metric: value for metric, value in metrics.items() if not metric.endswith("grad_norm")}
    steps = [[(a + b) / 2 for a, b in zip(*both, strict=True)] for both in zip(first, second, strict=True)]
    return steps, metrics


# --- scripts on pairs ---

FAR = 4  # a margin from which the sigmoid's slope has less than a fiftieth of its largest size


def prepared_pairs(name, **options):
    """Return (module, args, model, pairs) of 20 pairs in one micro-batch, a few with large margins of either sign."""
    module, (args, model, pairs) = script(name), copy.deepcopy(prepared_pairs_once(name))
    for option, value in options.items():
        setattr(args, option, value)
    return module, args, model, pairs


@functools.cache
def prepared_pairs_once(name):
    module = script(name)
    args = module.Args(pairs_per_step=20, max_grad_norm=0.0, micro_batch_size=64)
    accelerator, tokenizer = Accelerator(cpu=True), load_tokenizer(args.model_name_or_path)
    pairs = load_data(read_pairs, embedded_pairs(module), tokenizer)[0][:20]
    if hasattr(args, "beta"):
        _, model = load_policy(args, accelerator)
        pairs = module.add_ref_logprobs(accelerator, model, pairs, args)
        shifts = [(-60, -5, 10, 5, 60, -10, 2)[i % 7] for i in range(20)]
        pairs = [pair._replace(ref_chosen=pair.ref_chosen + x) for pair, x in zip(pairs, shifts, strict=True)]
    else:
        model = module.load_reward_model(args.model_name_or_path, args, new_head=True).train()
        torch.nn.init.normal_(model.lm.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        swapped = [pair._replace(chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]
        pairs = [(pair, other)[i % 2] for i, (pair, other) in enumerate(zip(pairs, swapped, strict=True))]
    return args, model, pairs


def updated_pairs(module, args, model, pairs, accelerator=None):
    """The gradient of one optimizer step, by the script's own `update`, and its metrics."""
    accelerator = accelerator or Accelerator(cpu=True)
    recorder, metrics = GradientRecorder(model, model.parameters()), Means()
    module.update(accelerator, model, recorder, pairs, args, metrics)
    return recorder.steps, metrics.reduce(accelerator)


@functools.cache
def expected_pairs(name):
    return updated_pairs(*prepared_pairs(name))


@pytest.mark.parametrize("name", PAIRS)
def test_some_margins_are_large(name):
    module, args, model, pairs = prepared_pairs(name)
    (batch,) = pair_batches(pairs, args, torch.device("cpu"))
    _, stats = module.pair_losses(model, batch, args)
    margins = stats["rewards/margin"]
    shares = [float(far.double().mean()) for far in (margins < -FAR, margins > FAR)]
    assert all(0.05 <= share <= 0.2 for share in shares), shares


CHANGES_OF_PAIRS = {
    "micro-batches of 6": (dict(micro_batch_size=6), dict, COMPANY.format(*COMPLETIONS)),
    "micro-batches of 10": (dict(micro_batch_size=10), dict, COMPANY.format(*COMPLETIONS)),
    "order": (dict(micro_batch_size=10), None, ORDER.format("pair", "row")),
    "padding": ({}, padded, PADDING.format("pair")),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options, change, why", CHANGES_OF_PAIRS.values(), ids=CHANGES_OF_PAIRS)
def test_pair_gradient_is_invariant(name, options, change, why, monkeypatch):
    whole, (module, args, model, pairs) = expected_pairs(name), prepared_pairs(name, **options)
    if change is None:
        pairs, change = pairs[::-1], dict
    losses = module.pair_losses
    monkeypatch.setattr(module, "pair_losses", lambda model, batch, args: losses(model, change(batch), args))
    same(updated_pairs(module, args, model, pairs), whole, why)


@pytest.mark.parametrize("name", PAIRS)
def test_pair_gradient_is_invariant_to_fast(name, speed_up):
    module, args, model, pairs = prepared_pairs(name, fast=True)
    if not hasattr(module, "completion_logprobs"):
        pytest.skip("a model of scores has no shortcuts")
    speed_up(model, Accelerator(cpu=True))
    same(updated_pairs(module, args, model, pairs), expected_pairs(name), PASSES.format("pair"))


@pytest.mark.parametrize("name", PAIRS)
def test_pair_gradient_is_invariant_to_processes(name):
    def one_process(accelerator):
        *rest, pairs = prepared_pairs(name, micro_batch_size=6)
        return updated_pairs(*rest, pairs[accelerator.process_index :: 2], accelerator)

    expected_pairs(name)
    same(joined(Processes(2).run(one_process)), expected_pairs(name), PROCESS.format(*COMPLETIONS))
