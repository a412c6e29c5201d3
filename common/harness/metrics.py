"""Metrics: means, maxima and quantiles over all processes, and what every script logs of a step."""

import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from common.errors import world_size
from common.masked import group_statistics, moments


@dataclass
class Metrics:
    """The metrics of one step over all processes: means, maxima, and quantiles of all values.

    Every process must add the same names in the same order, whatever its data.
    """

    sums: dict = field(default_factory=dict)  # {name: (sum, count)} of the means
    maxima: dict = field(default_factory=dict)  # {name: value}
    # {name: [values (N,)]}, whose quantiles leave NaN out.
    values: dict = field(default_factory=lambda: defaultdict(list))
    paused: float = 0.0  # seconds after the rollout that the update did not take

    def add(self, name, values, mask=None):
        """Count `values` (any shape), or those where `mask` is true, towards the mean `name`."""
        values = torch.as_tensor(values).detach().double()
        if mask is None:
            mask = torch.ones_like(values, dtype=torch.bool)
        mask = mask.expand_as(values)
        self.add_ratio(name, torch.where(mask, values, 0).sum(), mask.sum())

    def add_max(self, name, values, mask=None):
        """Count `values` (any shape), or those where `mask` is true, towards the maximum `name`."""
        values = torch.as_tensor(values).detach().double()
        if mask is not None:
            values = torch.where(mask, values, -math.inf)
        value = values.max()
        if name in self.maxima:
            value = torch.maximum(self.maxima[name], value)
        self.maxima[name] = value

    def add_quantiles(self, name, values, mask):
        """Count `values` where `mask` is true; `name`_p50, _p90 and _p99 are their percentiles."""
        values = torch.where(mask, values.detach().double(), math.nan)
        self.values[name].append(values.flatten())

    def add_stats(self, group, stats, mask):
        """Count {name: values} as `group/name`, over the tokens of `mask` (R, T).

        Values (R, 1) count over the rows that have such a token. A name that ends in `_max` is a
        maximum, one that ends in `_quantiles` has quantiles, and any other one is a mean.
        """
        for name, values in stats.items():
            counted = mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True)
            if name.endswith("_quantiles"):
                name = name.removesuffix("_quantiles")
                self.add_quantiles(f"{group}/{name}", values, counted)
            elif name.endswith("_max"):
                self.add_max(f"{group}/{name}", values, counted)
            else:
                self.add(f"{group}/{name}", values, counted)

    def add_ratio(self, name, numerator, denominator):
        """Count towards `name`, the sum of all numerators over the sum of all denominators.

        Tensors stay on their device, so nothing waits for it.
        """
        total, count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = total + numerator, count + denominator

    def add_rollout(self, batch, rewards, correct, parts, group_size):
        """Count a rollout: reward_part/, completion/, reward/accuracy and reward/unscored.

        `correct` (R,) is None where no row has a gold answer.
        """
        lengths = batch["completion_mask"].sum(dim=1).cpu()
        if correct is None:
            correct = torch.full(lengths.shape, math.nan, dtype=torch.float64)
        self.add("reward/accuracy", correct, ~correct.isnan())
        for name, part in parts.items():
            self.add(f"reward_part/{name}", part, ~part.isnan())
        self.add("reward/unscored", rewards.isnan())
        self.add("completion/length", lengths)
        self.add("completion/length_correct", lengths, correct == 1)
        self.add("completion/length_incorrect", lengths, correct == 0)
        self.add("completion/truncated", batch["truncated"].cpu())
        if group_size > 1:
            self.add_unique(batch["completions"].tolist(), lengths.tolist(), group_size)

    def add_unique(self, completions, lengths, group_size):
        """Count the share of different completions in each group."""
        rows = [tuple(row[:length]) for row, length in zip(completions, lengths, strict=True)]
        for start in range(0, len(rows), group_size):
            different = set(rows[start : start + group_size])
            self.add("completion/unique", len(different) / group_size)

    def add_rewards(self, rewards, group_size):
        """Count the rewards that the advantages are made of."""
        scored = ~rewards.isnan()
        self.add("reward/mean", rewards, scored)
        self.add("reward/std", rewards[scored])
        self.add("reward/std squared", rewards[scored].double().square())
        if group_size > 1:
            *_, zero = group_statistics(rewards.view(-1, group_size), 0)
            has_score = scored.view(-1, group_size).any(dim=1)
            self.add("advantage/zero_groups", zero.all(dim=1), has_score)

    def add_times(self, batch, start, rollout_end, args, drawn_tokens=None):
        """Count the speed of rollout and update, peak memory, and on a GPU whether the rollout replayed graphs.

        `drawn_tokens` are those of a rollout of which `batch` is only a part.
        """
        update_s = time.perf_counter() - rollout_end - self.paused
        tokens = batch["completion_mask"].sum().double()
        if drawn_tokens is None:
            drawn_tokens = tokens
        self.add_speed("rollout", rollout_end - start, drawn_tokens)
        self.add_speed("update", update_s, tokens * args.num_epochs)
        self.add_max("memory/peak_gb", peak_memory_gb(batch["completions"].device))
        if batch["completions"].device.type == "cuda":
            from common.shortcuts.graphs import OneTokenByGraph

            self.add("rollout/graphs", float(OneTokenByGraph.replayed))

    def add_speed(self, phase, seconds, tokens):
        """Count the seconds that this process took for `phase`, and its tokens in that time."""
        self.add(f"time/{phase}_s", seconds)
        # All tokens / mean seconds = all tokens x processes / sum of seconds.
        self.add_ratio(f"time/{phase}_tokens_per_s", tokens * world_size(), seconds)

    def reduce(self, accelerator, reward_functions=()):
        """{name: float} over all processes, with what the user's rewards have logged.

        What counts nothing is left out.
        """
        result = self.reduce_sums(accelerator)
        result |= self.reduce_maxima(accelerator)
        result |= self.reduce_quantiles(accelerator)
        users_rewards = [reward for reward in reward_functions if not reward.built_in]
        if users_rewards:
            result |= take_logged(accelerator, users_rewards, result)
        return result

    def reduce_sums(self, accelerator):
        """The means. Those of `x` and `x squared` become the standard deviation of x (ddof 0)."""
        if not self.sums:
            return {}
        numbers = stack_on(accelerator.device, chain.from_iterable(self.sums.values()))
        pairs = accelerator.reduce(numbers.view(-1, 2), "sum").tolist()
        result = {}
        for name, (total, count) in zip(self.sums, pairs, strict=True):
            if count:
                result[name] = total / count
        for name in list(result):
            if f"{name} squared" in result:
                mean_square = result.pop(f"{name} squared")
                variance = mean_square - result[name] ** 2
                result[name] = max(0.0, variance) ** 0.5
        return result

    def reduce_maxima(self, accelerator):
        if not self.maxima:
            return {}
        numbers = stack_on(accelerator.device, self.maxima.values())
        maxima = accelerator.gather(numbers[None]).amax(dim=0).tolist()
        named = zip(self.maxima, maxima, strict=True)
        return {name: value for name, value in named if value > -math.inf}

    def reduce_quantiles(self, accelerator):
        result = {}
        for name, parts in self.values.items():
            # The processes may have different numbers of values.
            values = accelerator.pad_across_processes(torch.cat(parts), pad_index=math.nan)
            values = accelerator.gather(values).cpu().numpy()
            if np.isnan(values).all():
                continue
            for percentile in (50, 90, 99):
                result[f"{name}_p{percentile}"] = float(np.nanpercentile(values, percentile))
        return result


def stack_on(device, numbers):
    """Numbers and tensors as one tensor (N,) on the device.

    It is then fetched at once: fetched one by one, each number would wait for the GPU.
    """
    moved = [torch.as_tensor(x, dtype=torch.float64).to(device, non_blocking=True) for x in numbers]
    return torch.stack(moved)


def take_logged(accelerator, rewards, beside):
    """{logged/name: mean over processes} of what rewards have logged since the last call.

    The name begins with eval/ if one of the other metrics, `beside`, does.
    """
    from accelerate.utils import gather_object

    values = defaultdict(list)
    for logged in gather_object([reward.logged for reward in rewards]):
        for name, numbers in logged.items():
            values[name].extend(numbers)
    for reward in rewards:
        reward.logged.clear()
    is_evaluation = any(name.startswith("eval/") for name in beside)
    group = "eval/logged" if is_evaluation else "logged"
    return {f"{group}/{name}": sum(values[name]) / len(values[name]) for name in sorted(values)}


def add_explained_variance(accelerator, micro_batches, metrics):
    """Count the share of the variance of all tokens' returns that the old values explain."""
    returns = torch.cat([micro["returns"][micro["loss_mask"]] for micro in micro_batches])
    values = torch.cat([micro["old_values"][micro["loss_mask"]] for micro in micro_batches])
    _, variance = moments(returns, 0, accelerator.reduce)
    _, unexplained = moments(returns - values, 0, accelerator.reduce)
    if variance > 1e-8:  # equal returns still differ by rounding
        metrics.add("value/explained_variance", 1 - unexplained / variance)


def sample_rows(prompts, texts, rewards, parts, number):
    """The completions of the first `number` prompts, for samples.jsonl."""
    n = len(texts) // len(prompts)
    rows = []
    for i, text in enumerate(texts[: len(prompts[:number]) * n]):
        prompt = prompts[i // n]
        row = {
            "prompt": prompt.prompt,
            "completion": text,
            "answer": prompt.answer,
            "reward": float_or_none(rewards[i]),
            "parts": {name: float_or_none(part[i]) for name, part in parts.items()},
            "tokens": len(text.ids),
            "truncated": text.truncated,
        }
        if text.extra:  # what a reward gave to `log_extra`
            row["extra"] = text.extra
        rows.append(row)
    return rows


def float_or_none(value):
    """The value as JSON has it, which has no NaN."""
    return None if math.isnan(value) else float(value)


def peak_memory_gb(device):
    """Peak memory of this process in GB: allocated on the GPU, resident on CPU.

    It is -inf where nobody knows it, which leaves it out of the metrics.
    """
    if device.type != "cpu":
        max_allocated = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return max_allocated(device) / 1e9 if max_allocated else -math.inf
    try:
        import resource
    except ImportError:  # Windows
        return -math.inf
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
