"""Answer the cases of vectors/cases/ with the functions of a script.

    PYTHONPATH=.:tests/helpers python tests/helpers/script_answers.py grpo > answers.json
    python vectors/check.py answers.json

A step goes through the script's whole `update`: its micro-batches, denominators and backward passes. A table of
log-probs replaces the model's logits, and its gradient is the answer. A thread replaces each process.
"""

import contextlib
import inspect
import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

import common.masked
from common.masked import Means
from common.pairs import Pair
from testbed import ALL, UPDATE, advantages_of, args_of, can_be_called, knows_advantages, ragged, script, totals_of
from threads import Processes
from vectors.check import load_cases

TIMEOUT = 20  # seconds that a process waits for the others
NO_DUAL_CLIP = 1e9


class NotOffered(Exception):
    """The script has no such function, or no option for it."""


def refuse_unless(condition, reason):
    if not condition:
        raise NotOffered(reason)


def has(module, function, *names):
    """Return whether the script has this function with these arguments, and defaults for any others."""
    return hasattr(module, function) and can_be_called(getattr(module, function), *names)


def offers(module, *options):
    return all(option in module.Args.__dataclass_fields__ for option in options)


def takes_steps(module):
    """Return whether the script has a known loss of tokens, and an `update` that can be called."""
    names = ("logprobs", "old_logprobs", "advantages", "loss_mask", "args")
    if not has(module, "policy_loss", *names) or not has(module, "update", *UPDATE):
        return False
    if hasattr(module, "AdaptiveKL"):  # the recipe's `update` reads a KL that these cases do not have
        return False
    if not hasattr(module, "logprobs_and_entropy"):  # a table of numbers replaces it
        return False
    return hasattr(module, "Penalty") or hasattr(module, "clip_bounds") or is_clipped(module)


def is_clipped(module):
    """Return whether the script clips a ratio, of tokens or of rows. A fork may have any other loss."""
    plain = dict(clip_low=0.2, clip_high=0.3, dual_clip=NO_DUAL_CLIP, kl_coef=0.0, entropy_coef=0.0)
    up = torch.tensor([1.8, -1.5, 2.7], dtype=torch.float64)
    log_ratios = torch.stack([up, -up, up, -up])  # beyond the clip on both sides, tokens and the means of rows
    mask = torch.tensor([[True, True, True], [True, True, False]] * 2)
    old = torch.full_like(log_ratios, -1.0)
    advantages = torch.tensor([[1.0], [1.0], [-2.0], [-2.0]], dtype=torch.float64)
    inputs = [old + log_ratios, old, advantages, mask, args_of(module, **plain)]
    if "ref_logprobs" in inspect.signature(module.policy_loss).parameters:
        inputs.append(old - 1)  # not part of the loss if its coefficient is 0
    losses, _ = module.policy_loss(*inputs)
    of_rows = torch.where(mask, log_ratios, 0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    for ratio in (log_ratios.exp(), of_rows.exp()):
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
        if torch.allclose(losses, torch.where(mask, -objective, 0)):
            return True
    return False


# --- stand-ins for models and optimizers ---


class Tables(nn.Module):
    """A policy, and for ppo.py a critic, whose "logits" are a log-prob and an entropy of a table.

    Without gradients, before the updates, they are the old policy's. A prompt consists of its row's number.
    """

    def __init__(self, tables, with_values):
        super().__init__()
        self.logprobs = nn.Parameter(tables["new_logprobs"].clone())
        self.entropies = nn.Parameter(tables["entropies"].clone())
        self.values = nn.Parameter(tables["values"].clone())
        self.old = tables["old_logprobs"]
        self.old_values = tables["old_values"]
        self.with_values = with_values
        self.cuts = []  # the rows of each forward of an update

    def forward(self, input_ids, logits_to_keep, **inputs):
        rows = input_ids[:, 0]
        logprobs, values = self.old, self.old_values
        if torch.is_grad_enabled():
            self.cuts.append(rows.tolist())
            logprobs, values = self.logprobs, self.values
        tables = [table[rows, : logits_to_keep - 1] for table in (logprobs, self.entropies, values)]
        output = logits_of(*tables[:2])
        return (output.logits, nn.functional.pad(tables[2], (0, 1))) if self.with_values else output


class Reference(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, input_ids, logits_to_keep, **inputs):
        return logits_of(self.table[input_ids[:, 0], : logits_to_keep - 1])


def logits_of(logprobs, entropies=None):
    """Return log-probs and entropies (R, T) in the place of a model's output with logits (R, T + 1, V)."""
    numbers = torch.stack([logprobs, logprobs if entropies is None else entropies], dim=-1)
    return SimpleNamespace(logits=nn.functional.pad(numbers, (0, 0, 0, 1)))  # the last position predicts nothing


def numbers_of_tables(logits, tokens, temperature, with_entropy=True, entropy_grad=False):
    """Replace `logprobs_and_entropy`."""
    logprobs, entropies = logits.unbind(dim=-1)
    return logprobs, entropies if entropy_grad else entropies.detach()


@contextlib.contextmanager
def default_dtype(dtype):
    """Set the dtype of new tensors, such as the zeros that log-probs are written into."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Gradients:
    """A stand-in for an optimizer that keeps the gradients of the first step, {name: tensor}."""

    def __init__(self, model, has_critic=False):
        self.model, self.first = model, None
        self.param_groups = [{"params": list(model.parameters()), "lr": 1.0}]
        if has_critic:
            self.param_groups.append({"params": [], "lr": 1.0})

    def step(self):
        if self.first is None:
            self.first = {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def zero_grad(self):
        self.model.zero_grad(set_to_none=True)


def pieces_of(inputs, rows):
    """Return how a step is split. If the case leaves it open, a prompt's rows are adjacent, as in a rollout."""
    if "pieces" in inputs:
        return inputs["pieces"]
    order = list(range(rows))
    if "groups" in inputs:
        order.sort(key=inputs["groups"].__getitem__)
    return [[order]]


# --- one optimizer step of a policy ---


def step_batch(inputs, table, dtype):
    """Return the batch of a rollout whose rows have the lengths of those of `table`."""
    values, tokens = ragged(table, dtype)
    rows, width = values.shape
    mask = ragged(inputs["mask"])[0].bool() if "mask" in inputs else tokens
    refuse_unless(all(inputs.get("scored") or [1]), "a row without a reward gets the mean of its group")
    sampled = {name: ragged(inputs[name], dtype)[0] for name in ("sampler_logprobs",) if name in inputs}
    return sampled | {
        "prompts": torch.arange(rows)[:, None].expand(rows, width + 1),
        # With its completion each row has `width + 1` tokens, so that sorting by length keeps the order.
        "prompt_mask": torch.cat([tokens, torch.zeros(rows, 1).bool()], dim=1).logical_not().sort().values,
        "completions": torch.zeros(rows, width).long(),
        "completion_mask": tokens,
        "loss_mask": mask,
        "rewards": torch.zeros(rows),
        "truncated": torch.zeros(rows).bool(),
        "advantages": advantages_of_rows(inputs, values, dtype),
    }


def advantages_of_rows(inputs, values, dtype):
    advantages = inputs.get("advantages")
    if advantages is None:
        return torch.zeros_like(values)
    if isinstance(advantages[0], list):
        return ragged(advantages, dtype)[0]
    return torch.tensor(advantages, dtype=dtype)[:, None]


def tables_of(inputs, batch, dtype):
    """Return {name: table} of the numbers of a model, with zeros for what the case does not give."""
    zeros = torch.zeros(batch["completions"].shape, dtype=dtype)
    given = {
        "new_logprobs": "logprobs",
        "old_logprobs": "old_logprobs",
        "ref_logprobs": "ref_logprobs",
        "entropies": "entropies",
        "values": "values",
        "old_values": "old_values",
        "returns": "returns",
    }
    return {column: ragged(inputs[name], dtype)[0] if name in inputs else zeros for column, name in given.items()}


def step_args(module, options, rows, groups):
    """Return the script's options for those of a case."""
    group_size = rows // len(set(groups))
    args = {"group_size": group_size, "num_minibatches": 1, "num_epochs": 2, "max_grad_norm": 0.0}
    args |= {option: options[option] for option in ("clip_low", "clip_high", "dual_clip") if option in options}
    if offers(module, "dual_clip"):
        args.setdefault("dual_clip", NO_DUAL_CLIP)
    objective = options.get("objective", "clip")
    option = {"clip": "clip_low", "penalty": "penalty_coef"}.get(objective)
    refuse_unless(option and offers(module, option), f"no objective {objective}")
    if objective == "penalty":
        args["penalty_coef"] = options["penalty_coef"]
    args |= mean_args(module, options)
    ratio = options.get("ratio", "token")
    refuse_unless(offers(module, "ratio_level") == (ratio != "token"), f"no ratio of the kind {ratio}")
    if offers(module, "ratio_level"):
        args["ratio_level"] = "token" if ratio == "sequence_token" else "sequence"
    refuse_unless(offers(module, "max_ratio") == ("max_ratio" in options), "other bounds of the ratio")
    args |= {option: options[option] for option in ("max_ratio",) if option in options}
    refuse_unless("sampler_cap" not in options, "no importance sampling against another sampler")
    refuse_unless(options.get("empty_rows_count", True), "rows whose tokens are all masked are still rows")
    args["kl_coef"] = options["kl"]["coef"] if "kl" in options else 0.0
    if "kl" in options:
        args["kl_estimator"] = options["kl"]["estimator"]
        args |= {"kl_in": "loss"} if offers(module, "kl_in") else {}
    args["entropy_coef"] = options.get("entropy_coef", 0.0)
    for option in [option for option in args if not offers(module, option)]:
        refuse_unless(not args.pop(option), f"no option {option}")
    return with_penalty(module, module.Args(**args))


def with_penalty(module, args):
    """Return args with the controller that `main` of the recipe ppo_penalty puts there."""
    if hasattr(module, "Penalty"):
        args.penalty = module.Penalty(args)
    return args


MEANS = [{}, {"token_mean": "step"}, {"token_mean": "group"}]


def mean_args(module, options):
    """Return the script's options for the case's mean over tokens, found by its weights of a small table."""
    wanted = "constant" if options["mean"] == "sums" else options["mean"]
    found = [option for option in MEANS if offers(module, *option) and mean_of(module, option) == wanted]
    refuse_unless(found, f"no mean of the kind {options['mean']}")
    if wanted != "constant":
        return found[0]
    return found[0] | {"max_new_tokens": 1 if options["mean"] == "sums" else options["constant"]}


def mean_of(module, options):
    """Return what the script's `token_weights` average over, or None if it is unknown."""
    refuse_unless(has(module, "token_weights", "loss_mask", "totals", "args"), "no weights of tokens")
    args = module.Args(max_new_tokens=7, **options)
    mask = torch.arange(5) < torch.tensor([[1], [3], [5], [4]])
    lengths = mask.sum(dim=1, keepdim=True)
    group_tokens = lengths.view(2, 2).sum(dim=1).repeat_interleave(2)[:, None]  # for the recipe token_mean
    totals = totals_of(mask, 2) | {"group_tokens": group_tokens}
    divisors = {
        "rows": lengths * 4,
        "prompts": lengths * 2,
        "tokens": torch.tensor(13),
        "groups": group_tokens * 2,
        "constant": torch.tensor(7 * 4),
    }
    weights = module.token_weights(mask, totals, args).double()
    same = [mean for mean, divisor in divisors.items() if torch.allclose(weights, mask / divisor.double())]
    return same[0] if same else None


def updated(module, inputs, table, args, dtype):
    """Return the loss of a step by the script's `update`, and the gradients by its tables."""
    batch = step_batch(inputs, table, dtype)
    tables = tables_of(inputs, batch, dtype)
    pieces = pieces_of(inputs, len(table))
    refuse_unless(len({sum(map(len, process)) for process in pieces}) == 1, "all processes have equally many rows")
    args.micro_batch_size = max(len(piece) for process in pieces for piece in process)
    has_critic = hasattr(module, "load_critic")

    def add_advantages(accelerator, model, reference, micro_batches, *rest):
        """Replace the critic's forward: the case gives its values."""
        for micro in micro_batches:
            rows, width = micro["prompts"][:, 0], micro["completions"].shape[1]
            for name in ("old_logprobs", "old_values", "returns", "ref_logprobs")[: 3 + (reference is not None)]:
                micro[name] = tables[name][rows, :width]

    def one_process(accelerator):
        rows = [row for piece in pieces[accelerator.process_index] for row in piece]
        own = {name: column[rows] for name, column in batch.items()}
        model, metrics = Tables(tables, has_critic), Means()
        optimizer = Gradients(model, has_critic)
        reference = Reference(tables["ref_logprobs"]) if "ref_logprobs" in inputs else None
        module.update(accelerator, model, reference, optimizer, own, args, metrics)
        cuts = pieces[accelerator.process_index]
        assert model.cuts[: len(cuts)] == cuts, "the script splits the rollout differently"
        return metrics.reduce(accelerator)["optim/loss"], optimizer.first

    with contextlib.ExitStack() as stack:
        stack.enter_context(default_dtype(dtype))
        stack.enter_context(mock.patch.object(module, "logprobs_and_entropy", numbers_of_tables))
        if has_critic:
            stack.enter_context(mock.patch.object(module, "add_advantages", add_advantages))
        if has(module, "whiten", "accelerator", "batch", "args"):  # the case gives the advantages
            stack.enter_context(mock.patch.object(module, "whiten", lambda _, batch, args: batch["advantages"]))
        results = Processes(len(pieces), TIMEOUT).run(one_process)
    gradients = {}
    for name in results[0][1]:
        gradients[name] = sum_of([first[name] for _, first in results], batch["loss_mask"]) / len(results)
    return results[0][0], gradients


def sum_of(gradients, like):
    """Return the sum of gradients; one is None if its table had no part in the loss."""
    total = torch.zeros(like.shape, dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            total = total + gradient
    return total


def cut(table, like):
    """Return the rows of a tensor as lists, without padding, as long as those of `like`."""
    return [row[: len(other)] for row, other in zip(table.tolist(), like, strict=True)]


def policy_step(module, inputs, options, dtype):
    refuse_unless(takes_steps(module), "no policy loss")
    args = step_args(module, options, len(inputs["logprobs"]), inputs["groups"])
    return answer_of_step(module, inputs, options, args, dtype)


def answer_of_step(module, inputs, options, args, dtype):
    table = inputs["logprobs"]
    loss, gradients = updated(module, inputs, table, args, dtype)
    if "entropies" not in inputs:
        other = inputs | {"entropies": [[float(i + t) for t in range(len(row))] for i, row in enumerate(table)]}
        _, moved = updated(module, other, table, args, dtype)
        is_same = torch.equal(moved["logprobs"], gradients["logprobs"])
        refuse_unless(is_same, "the loss depends on entropies, which the case does not give")
    answer = {"loss": loss, "gradient": cut(gradients["logprobs"], table)}
    if "entropy_coef" in options:
        answer["entropy_gradient"] = cut(gradients["entropies"], table)
    return answer


def value_loss(module, inputs, options, dtype):
    refuse_unless(takes_steps(module) and offers(module, "value_clip"), "no critic")
    args = with_penalty(module, module.Args(value_clip=options["value_clip"], num_minibatches=1, max_grad_norm=0.0))
    loss, gradients = updated(module, inputs, inputs["values"], args, dtype)
    return {"loss": loss, "gradient": cut(gradients["values"], inputs["values"])}


def step_totals(module, inputs, options, dtype):
    refuse_unless(takes_steps(module), "no rollout to split")
    steps = inputs["steps"]
    rows = len(inputs["mask"])
    batch = step_batch(inputs, inputs["mask"], dtype)
    refuse_unless(has(module, "split", "accelerator", "batch", "rows", "args"), "no micro-batches")
    args = module.Args(group_size=rows // len(set(inputs["groups"])), micro_batch_size=len(steps[0][0][0]))

    def one_process(accelerator):
        splits = []
        for step in steps:
            step_rows = [row for piece in step[accelerator.process_index] for row in piece]
            splits.append(module.split(accelerator, batch, step_rows, args))
        return splits

    processes = Processes(len(steps[0]), TIMEOUT).run(one_process)
    answer = {}
    for name in processes[0][0][1]:
        answer[name] = [
            [[totals[name]] * len(micro_batches) for micro_batches, totals in step]
            for step in zip(*processes, strict=True)
        ]
    return answer


# --- advantages, masks, bounds, penalties ---


def group_advantages(module, inputs, options, dtype):
    groups = inputs["rewards"]
    refuse_unless(not any(None in group for group in groups), "a row without a reward gets the mean of its group")
    refuse_unless(knows_advantages(module), "no advantages of groups")
    if options["deviation"] == "batch_of_centred":
        return whitened_advantages(module, groups, options, dtype)
    args = advantage_args(module, options)
    found = []
    for group in groups:  # a rollout has groups of one size
        advantages = advantages_of(module, torch.tensor(group, dtype=dtype), module.Args(group_size=len(group), **args))
        found.append(advantages[:, 0].tolist())
    return {"advantages": found}


def advantage_args(module, options):
    """Return the script's options for the case's advantages, found by those of one group."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    mean = rewards.mean()
    if options["baseline"] == "leave_one_out":
        mean = (rewards.sum() - rewards) / 3
    std = rewards.std(correction=options["std_ddof"]) if options["deviation"] == "group" else 1
    refuse_unless(options["deviation"] in ("group", "none"), f"no deviation of the kind {options['deviation']}")
    for value in (True, False):
        args = {"normalize_std": value} if offers(module, "normalize_std") else {}
        if offers(module, "std_eps"):
            args["std_eps"] = options["std_eps"]
        expected = (rewards - mean) / (std + args.get("std_eps", 0) * (std != 1))
        refuse_unless("std_eps" in args or options["std_eps"] == 0 or std == 1, "no eps beside the deviation")
        found = advantages_of(module, rewards, module.Args(group_size=4, **args))[:, 0]
        if torch.allclose(found.double(), expected):
            return args
    raise NotOffered(f"no {options['baseline']} with the deviation {options['deviation']}")


def whitened_advantages(module, groups, options, dtype):
    """Answer for a script that whitens over the tokens of the batch; here each row has one."""
    refuse_unless(has(module, "whiten", "accelerator", "batch", "args"), "no deviation of the batch")
    refuse_unless(options["std_ddof"] == 1, f"no ddof {options['std_ddof']}")
    args = module.Args(group_size=len(groups[0]), std_eps=options["std_eps"])
    advantages = module.compute_advantages(torch.tensor(groups, dtype=dtype).flatten(), args)
    batch = {"advantages": advantages, "loss_mask": torch.ones(advantages.shape).bool()}
    (whitened,) = Processes(1).run(lambda accelerator: module.whiten(accelerator, batch, args))
    return {"advantages": cut(whitened.double().view(len(groups), -1), groups)}


def smoothed_advantages(module, inputs, options, dtype):
    refuse_unless(hasattr(module, "smoothed_advantages") and knows_advantages(module), "no history of visits")
    refuse_unless(options["std_ddof"] == 0, "the deviation is that of the population")
    refuse_unless(options["smooth"], "the advantages are always smoothed")
    args = module.Args(group_size=len(inputs["visits"][0]))
    past = torch.zeros(1, 3, dtype=torch.float64)
    answer = {"advantages": [], "means": [], "variances": []}
    for rewards in inputs["visits"]:
        advantages, past = module.compute_advantages(torch.tensor(rewards, dtype=dtype), args, past)
        answer["advantages"].append(advantages[:, 0].tolist())
        answer["means"].append(past[0, 1].item())
        answer["variances"].append(past[0, 2].item())
    return answer


def completion_mask(module, inputs, options, dtype):
    refuse_unless(hasattr(module, "rollout") and takes_steps(module), "no rollout")
    tokens = torch.tensor(inputs["tokens"])
    mask, truncated = common.masked.completion_mask(tokens, options["stop_tokens"])
    return {"mask": mask.int().tolist(), "truncated": truncated.tolist()}


def clip_bounds(module, inputs, options, dtype):
    refuse_unless(has(module, "clip_bounds", "old_logprobs", "loss_mask", "args"), "no bounds that move")
    old = torch.tensor([inputs["old_logprobs"]], dtype=dtype)
    low, high = module.clip_bounds(old, torch.ones_like(old).bool(), module.Args(**options))
    return {"low": low[0].tolist(), "high": high[0].tolist()}


def soft_overlong(module, inputs, options, dtype):
    refuse_unless(has(module, "overlong_penalty", "lengths", "args"), "no penalty on the length")
    sizes = {"max_new_tokens": options["max_tokens"], "overlong_cache": options["cache"]}
    args = module.Args(overlong="soft", **sizes)
    return {"penalties": module.overlong_penalty(torch.tensor(inputs["lengths"]), args).tolist()}


# --- the KL ---


def kl_losses(module, new, old, ref, options):
    """Return the KL of each token: the script's loss with an advantage of 0."""
    refuse_unless(takes_steps(module) and offers(module, "kl_estimator"), "no KL in a policy loss")
    refuse_unless(not hasattr(module, "Penalty"), "the loss has another penalty beside the KL")
    place = {"kl_in": "loss"} if offers(module, "kl_in") else {}
    args = module.Args(kl_coef=1.0, kl_estimator=options["estimator"], **place)
    mask = torch.ones_like(new).bool()
    losses, _ = module.policy_loss(new, old, torch.zeros_like(new[:, :1]), mask, args, ref)
    return losses


def kl_tokens(module, inputs, options, dtype):
    table = inputs["logprobs"]
    new = ragged(table, dtype)[0].requires_grad_()
    old = ragged(inputs.get("old_logprobs", table), dtype)[0]
    losses = kl_losses(module, new, old, ragged(inputs["ref_logprobs"], dtype)[0], options)
    losses.sum().backward()
    return {"value": cut(losses, table), "gradient": cut(new.grad, table)}


def kl_expected_gradient(module, inputs, options, dtype):
    """Make each token of the vocabulary a row, weighted by its probability under the sampler."""
    logits, old, ref = (torch.tensor(inputs[name], dtype=dtype) for name in ("logits", "old_logits", "ref_logits"))
    new = logits.requires_grad_().log_softmax(0)[:, None]
    old, ref = old.log_softmax(0)[:, None], ref.log_softmax(0)[:, None]
    (kl_losses(module, new, old, ref, options) * old.exp()).sum().backward()
    return {"gradient": logits.grad.tolist()}


# --- ppo.py and its recipes ---


def shaped_rewards(module, inputs, options, dtype):
    names = ("rewards", "kl", "completion_mask", "args")
    refuse_unless(has(module, "shape_rewards", *names) and offers(module, "kl_in"), "no KL in the reward")
    old, mask = ragged(inputs["old_logprobs"], dtype)
    ref, _ = ragged(inputs["ref_logprobs"], dtype)
    kl = module.kl_estimate(old, ref, mask, "k1")
    scores = torch.tensor(inputs["scores"], dtype=dtype)
    shaped = module.shape_rewards(scores, kl, mask, module.Args(kl_in="reward", kl_coef=options["kl_coef"]))
    return {"rewards": cut(shaped, inputs["old_logprobs"])}


def gae(module, inputs, options, dtype):
    names = ("token_rewards", "values", "completion_mask", "args")
    refuse_unless(has(module, "compute_advantages", *names), "no critic")
    rewards, values = (torch.tensor(inputs[name], dtype=dtype) for name in ("rewards", "values"))
    args = module.Args(gamma=options["gamma"], gae_lambda=options["lambda"])
    advantages, returns = module.compute_advantages(rewards, values, torch.tensor(inputs["mask"]).bool(), args)
    return {"advantages": advantages.tolist(), "returns": returns.tolist()}


def whiten(module, inputs, options, dtype):
    """Whiten over two micro-batches of one row each; the script's result is float32."""
    refuse_unless(has(module, "whiten", "accelerator", "micro_batches"), "no whitening")
    offered = {"std_ddof": 1, "eps_of_variance": 1e-8}
    refuse_unless({name: options[name] for name in offered} == offered, "another deviation, or another eps")
    micro_batches = []
    for advantages, mask in zip(inputs["advantages"], inputs["mask"], strict=True):
        columns = {"advantages": torch.tensor([advantages], dtype=dtype), "loss_mask": torch.tensor([mask]).bool()}
        micro_batches.append(columns)
    Processes(1).run(lambda accelerator: module.whiten(accelerator, micro_batches))
    return {"advantages": [micro["advantages"][0].tolist() for micro in micro_batches]}


def adaptive_kl(module, inputs, options, dtype):
    refuse_unless(hasattr(module, "AdaptiveKL"), "no adaptive KL coefficient")
    args = module.Args(kl_coef=inputs["kl_coef"], kl_target=options["target"], kl_horizon=options["horizon"])
    return {"kl_coef": [moved(module.AdaptiveKL(args), kl, options["samples"]) for kl in inputs["kl"]]}


def adaptive_penalty(module, inputs, options, dtype):
    refuse_unless(hasattr(module, "Penalty"), "no adaptive penalty")
    args = module.Args(penalty_coef=inputs["penalty_coef"], penalty_target=options["target"])
    return {"penalty_coef": [moved(module.Penalty(args), kl) for kl in inputs["kl"]]}


def moved(controller, *measured):
    controller.move(*measured)
    return controller.coef


# --- pairs ---


class PairTables(nn.Module):
    """A stand-in for a model of pairs. The tokens of a completion are its row of the table."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)
        self.cuts = []  # the pairs of each forward

    def forward(self, batch=None, input_ids=None, logits_to_keep=None, **inputs):
        """Return a score for each completion, or its log-probs as logits."""
        width = logits_to_keep - 1 if batch is None else batch["completions"].shape[1]
        rows = input_ids[:, -width] if batch is None else batch["completions"][:, 0]
        self.cuts.append(rows[: len(rows) // 2].tolist())
        return self.table[rows] if batch else logits_of(self.table[rows, :width])


def updated_pairs(module, inputs, pairs, table, args):
    """Return the loss of a step of pairs by the script's `update`, and the gradient by the table."""
    model, metrics = PairTables(table), Means()
    optimizer = Gradients(model)

    def one_process(accelerator):
        module.update(accelerator, model, optimizer, pairs, args, metrics)
        return metrics.reduce(accelerator)["optim/loss"]

    patch = mock.patch.object(module, "logprobs_and_entropy", numbers_of_tables, create=True)
    with default_dtype(table.dtype), patch:
        (loss,) = Processes(1).run(one_process)
    if "pieces" in inputs:
        assert model.cuts == inputs["pieces"][0], "the script splits the step differently"
    return loss, optimizer.first["table"]


def pair_sizes(inputs, pairs):
    """Return options for micro-batches with as many pairs as the first piece."""
    pieces = pieces_of(inputs, pairs)
    return {"pairs_per_step": pairs, "micro_batch_size": 2 * len(pieces[0][0]), "max_grad_norm": 0.0}


def preference_loss(module, inputs, options, dtype):
    refuse_unless(hasattr(module, "preference_loss"), "no preference loss")
    refuse_unless(not options["per_token"], "IPO is of whole completions")
    refuse_unless(not options["reference_free"], "there is always a reference")
    chosen, rejected = inputs["chosen_logprobs"], inputs["rejected_logprobs"]
    count = len(chosen)
    pairs = []
    for i in range(count):
        ids = [[i] * len(chosen[i]), [count + i] * len(rejected[i])]
        refs = [sum(inputs["ref_chosen_logprobs"][i]), sum(inputs["ref_rejected_logprobs"][i])]
        pairs.append(Pair([0], *ids, *refs))
    args = module.Args(
        loss=options["loss"],
        beta=options["beta"],
        label_smoothing=options["label_smoothing"],
        nll_coef=options["nll_coef"],
        **pair_sizes(inputs, count),
    )
    loss, gradient = updated_pairs(module, inputs, pairs, ragged([*chosen, *rejected], dtype)[0], args)
    gradients = cut(gradient, [*chosen, *rejected])
    return {"loss": loss, "chosen_gradient": gradients[:count], "rejected_gradient": gradients[count:]}


def reward_model_loss(module, inputs, options, dtype):
    refuse_unless(hasattr(module, "reward_loss"), "no reward model")
    count = len(inputs["chosen"])
    pairs = [Pair([0], [i], [count + i]) for i in range(count)]
    args = module.Args(center_coef=options["center_coef"], **pair_sizes(inputs, count))
    table = torch.tensor([*inputs["chosen"], *inputs["rejected"]], dtype=dtype)
    loss, gradient = updated_pairs(module, inputs, pairs, table, args)
    gradients = gradient.tolist()
    return {"loss": loss, "chosen_gradient": gradients[:count], "rejected_gradient": gradients[count:]}


# --- all of them ---

OPERATIONS = {
    function.__name__: function
    for function in (
        adaptive_kl,
        adaptive_penalty,
        clip_bounds,
        completion_mask,
        gae,
        group_advantages,
        kl_expected_gradient,
        kl_tokens,
        policy_step,
        preference_loss,
        reward_model_loss,
        shaped_rewards,
        smoothed_advantages,
        soft_overlong,
        step_totals,
        value_loss,
        whiten,
    )
}


def answer(module, case, dtype=torch.float64):
    """Return a script's answer to a case, or {"not_offered": why}."""
    operation = OPERATIONS.get(case["operation"])
    if operation is None:
        return {"not_offered": "no such function"}
    try:
        return operation(module, case["inputs"], case["options"], dtype)
    except NotOffered as reason:
        return {"not_offered": str(reason)}


def main():
    name = sys.argv[1].removesuffix(".py")
    assert name in ALL, f"{name} is none of {', '.join(ALL)}"
    answers = {name_of_case: answer(script(name), case) for name_of_case, case in load_cases().items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
