"""Metrics: global sums, maxima and quantiles, and what every script logs of a rollout and of a step."""

import math
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from common.errors import world_size
from common.masked import group_statistics


@dataclass
class Metrics:
    """The metrics of one step: each a global sum over a global count, a global maximum, or quantiles of all values.
    Every process must add the same names in the same order, whatever its data."""

    sums: dict = field(default_factory=dict)  # {name: (numerator, denominator)}
    maxima: dict = field(default_factory=dict)  # {name: value}
    values: dict = field(default_factory=dict)  # {name: [values]}, whose quantiles leave NaN out

    def add(self, name, values, mask=None):
        """Count `values` (any shape), or those where `mask` is true, towards the mean `name`."""
        values = torch.as_tensor(values).detach().double()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.expand_as(values)
        self.add_ratio(name, torch.where(mask, values, 0).sum(), mask.sum())

    def add_max(self, name, values, mask=None):
        """Count `values` (any shape), or those where `mask` is true, towards the maximum `name`."""
        values = torch.as_tensor(values).detach().double()
        value = (values if mask is None else torch.where(mask, values, -math.inf)).max()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def add_stats(self, group, stats, mask):
        """Count {name: values} as `group/name`: means over the tokens of `mask` (R, T), of values (R, 1) over its rows.
        Names in `_max` are maxima; of `x_quantiles` 50th, 90th and 99th percentile are `x_p50`, `x_p90` and `x_p99`."""
        for name, values in stats.items():
            counted = mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True)
            if name.endswith("_quantiles"):
                values = torch.where(counted, values.detach().double(), math.nan).flatten()
                self.values.setdefault(f"{group}/{name.removesuffix('_quantiles')}", []).append(values)
                continue
            add = self.add_max if name.endswith("_max") else self.add
            add(f"{group}/{name}", values, counted)

    def add_ratio(self, name, numerator, denominator):
        """Count towards `name` = sum of numerators / sum of denominators. Tensors stay on their device: no waiting."""
        total, count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = total + numerator, count + denominator

    def add_rollout(self, batch, rewards, correct, parts, group_size):
        """Count a rollout: reward_part/, completion/, reward/accuracy and reward/unscored."""
        lengths = batch["completion_mask"].sum(dim=1).cpu()
        right = torch.full(lengths.shape, math.nan, dtype=torch.float64) if correct is None else correct
        self.add("reward/accuracy", right, ~right.isnan())
        for name, part in parts.items():
            self.add(f"reward_part/{name}", part, ~part.isnan())
        self.add("reward/unscored", rewards.isnan())
        self.add("completion/length", lengths)
        self.add("completion/length_correct", lengths, right == 1)
        self.add("completion/length_incorrect", lengths, right == 0)
        self.add("completion/truncated", batch["truncated"].cpu())
        if group_size > 1:
            rows = [tuple(row[:n]) for row, n in zip(batch["completions"].tolist(), lengths.tolist(), strict=True)]
            for start in range(0, len(rows), group_size):
                self.add("completion/unique", len(set(rows[start : start + group_size])) / group_size)

    def add_rewards(self, rewards, group_size):
        """Count the rewards that the advantages are made of."""
        scored = ~rewards.isnan()
        self.add("reward/mean", rewards, scored)
        self.add("reward/std", rewards[scored])
        self.add("reward/std squared", rewards[scored].double().square())
        if group_size > 1:
            *_, zero = group_statistics(rewards.view(-1, group_size), 0)
            self.add("advantage/zero_groups", zero.all(dim=1), scored.view(-1, group_size).any(dim=1))

    def add_times(self, batch, start, rollout_end, args, drawn_tokens=None):
        """Count speed of rollout and update, peak memory, and on a GPU whether the rollout replayed graphs;
        `drawn_tokens`: of a rollout that `batch` is part of."""
        update_s, tokens = time.perf_counter() - rollout_end, batch["completion_mask"].sum().double()
        self.add_speed("rollout", rollout_end - start, tokens if drawn_tokens is None else drawn_tokens)
        self.add_speed("update", update_s, tokens * args.num_epochs)
        self.add_max("memory/peak_gb", peak_memory_gb(batch["completions"].device))
        if batch["completions"].device.type == "cuda":
            from common.graphs import OneTokenByGraph

            self.add("rollout/graphs", float(OneTokenByGraph.replayed))

    def add_speed(self, phase, seconds, tokens):
        """Count the seconds that this process took for `phase` and for so many tokens of its own."""
        self.add(f"time/{phase}_s", seconds)
        # Own tokens x processes over the sum of seconds is all tokens over the mean of seconds.
        self.add_ratio(f"time/{phase}_tokens_per_s", tokens * world_size(), seconds)

    def reduce(self, accelerator, reward_functions=()):
        """{name: float} over all processes, with what the user's rewards logged; without metrics that count nothing."""
        result, numbers = {}, [x for pair in self.sums.values() for x in pair] + list(self.maxima.values())
        # Put together on the device and fetched at once: fetched one by one, each would wait for the GPU.
        numbers = [torch.as_tensor(x, dtype=torch.float64).to(accelerator.device, non_blocking=True) for x in numbers]
        if self.sums:
            pairs = accelerator.reduce(torch.stack(numbers[: 2 * len(self.sums)]).view(-1, 2), "sum").tolist()
            result = {name: total / count for name, (total, count) in zip(self.sums, pairs, strict=True) if count}
            for name in [name for name in result if f"{name} squared" in result]:  # from sums, ddof 0
                result[name] = max(0.0, result.pop(f"{name} squared") - result[name] ** 2) ** 0.5
        if self.maxima:
            maxima = accelerator.gather(torch.stack(numbers[2 * len(self.sums) :])[None]).amax(dim=0).tolist()
            result |= {name: value for name, value in zip(self.maxima, maxima, strict=True) if value > -math.inf}
        for name, parts in self.values.items():
            values = accelerator.pad_across_processes(torch.cat(parts), pad_index=math.nan)  # N may differ between them
            values = accelerator.gather(values).cpu().numpy()
            if not np.isnan(values).all():
                result |= {f"{name}_p{p}": float(np.nanpercentile(values, p)) for p in (50, 90, 99)}
        own = [reward for reward in reward_functions if not reward.built_in]
        return result | (take_logged(accelerator, own, result) if own else {})


def take_logged(accelerator, rewards, beside):
    """{logged/name: mean over processes} of what rewards logged since the last call; eval/ where `beside` has eval/."""
    from accelerate.utils import gather_object

    values = {}
    for logged in gather_object([reward.logged for reward in rewards]):
        for name, numbers in logged.items():
            values.setdefault(name, []).extend(numbers)
    for reward in rewards:
        reward.logged.clear()
    group = "eval/logged" if any(name.startswith("eval/") for name in beside) else "logged"
    return {f"{group}/{name}": sum(values[name]) / len(values[name]) for name in sorted(values)}


def sample_rows(prompts, texts, rewards, parts, number):
    """The completions of the first `number` prompts, for samples.jsonl."""
    rows, n = [], len(texts) // len(prompts)
    for i, text in enumerate(texts[: len(prompts[:number]) * n]):
        row = {"prompt": prompts[i // n].prompt, "completion": text, "answer": prompts[i // n].answer}
        row["reward"] = None if math.isnan(rewards[i]) else float(rewards[i])
        row["parts"] = {name: None if part[i].isnan() else float(part[i]) for name, part in parts.items()}
        row |= {"tokens": len(text.ids), "truncated": text.truncated}
        rows.append(row | ({"extra": text.extra} if text.extra else {}))  # of `log_extra`
    return rows


def peak_memory_gb(device):
    """Peak memory of this process in GB: allocated on the GPU, resident on CPU; -inf, which is left out, if unknown."""
    if device.type != "cpu":
        allocated = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return allocated(device) / 1e9 if allocated else -math.inf
    try:
        import resource
    except ImportError:  # Windows
        return -math.inf
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
