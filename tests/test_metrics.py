"""`Means` of common/masked.py over several calls and processes, and the metrics of samples in common/run.py."""

import math

import pytest
import torch
from accelerate import Accelerator

from common.load import Prompt
from common.masked import Means
from common.rewards import Completion, Samples
from common.run import add_rewards, add_samples
from small_run import samples_of


class SecondOfTwo:
    """Stand in for an Accelerator; the first process has added other numbers."""

    device = torch.device("cpu")

    def __init__(self, sums, maxima):
        self.sums, self.maxima = torch.tensor(sums).double(), torch.tensor([maxima]).double()

    def reduce(self, tensor):
        return tensor + self.sums.flatten()

    def gather(self, tensor):
        return torch.cat([tensor, self.maxima])


def test_means_over_several_calls():
    metrics = Means()
    for values, mask in (([3.0, 9.0], [True, False]), ([5.0, 1.0], [True, True])):
        values, mask = torch.tensor(values), torch.tensor(mask)
        metrics.add("mean", values, mask)
        metrics.add("some_max", values + 1, mask)
        metrics.add("none", values, mask & False)
        metrics.add("none_max", values, mask & False)
        metrics.add_ratio("ratio", values.sum(), 4)
    metrics.add("some_max", torch.tensor([2.0]))
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx({"mean": 3.0, "some_max": 6.0, "ratio": 18 / 8})


def test_means_over_processes():
    """Not the mean of their means; a metric without values here may have some on another process."""
    metrics = Means()
    metrics.add("mean", torch.tensor([1.0, 2.0, 3.0]))
    metrics.add("here_none", torch.tensor([7.0]), torch.tensor([False]))
    metrics.add("most_max", torch.tensor([5.0]))
    metrics.add("here_none_max", torch.tensor([5.0]), torch.tensor([False]))
    found = metrics.reduce(SecondOfTwo([[10.0, 1.0], [4.0, 2.0]], [3.0, 2.0]))
    assert found == {"mean": 16 / 4, "here_none": 2.0, "most_max": 5.0, "here_none_max": 2.0}


def test_values_of_rows_count_once():
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    stats = {"token": torch.tensor([[1.0, 2, 3], [6, 9, 9], [9, 9, 9]]), "row": torch.tensor([[1.0], [4], [9]])}
    metrics = Means()
    for name, values in stats.items():
        metrics.add(f"policy/{name}", values, mask)
    metrics.add("optim/lr", 0.5)
    assert metrics.reduce(Accelerator(cpu=True)) == {"policy/token": 3.0, "policy/row": 2.5, "optim/lr": 0.5}


def sampled(rows, lengths, truncated, rewards, terms, prompts=1, texts=None):
    """Return `Samples` of completions that are the first `lengths` tokens of `rows`."""
    mask = torch.arange(len(rows[0])) < torch.tensor(lengths)[:, None]
    batch = {"completions": torch.tensor(rows), "completion_mask": mask, "truncated": torch.tensor(truncated)}
    texts = texts or [""] * len(rows)
    completions = [Completion(text, row[:x], False) for text, row, x in zip(texts, rows, lengths, strict=True)]
    prompts = [Prompt([1], "1+1", "2")] * prompts
    return Samples(batch, prompts, completions, torch.tensor(rewards, dtype=torch.float64), terms)


def test_metrics_of_samples():
    rows = [[5, 1, 0], [5, 1, 7], [6, 6, 1], [6, 6, 6], [5, 1, 0], [5, 5, 1], [5, 1, 0], [1, 0, 0]]
    nan = math.nan
    terms = {
        "accuracy": [1, 1, -1, -1, 1, nan, nan, -1],  # a script may count a wrong answer as -1
        "a": [1.0] * 4 + [nan] * 2 + [nan] + [4.0],
        "b": [nan] * 5 + [3.0, nan, nan],
    }
    terms = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()}
    lengths, truncated = [2, 2, 3, 3, 2, 3, 2, 1], [False] * 3 + [True] + [False] * 4
    metrics = Means()
    texts = [f"#### {answer}" for answer in (2, 2, 3, 3, 2, 3, 2, 3)]
    add_samples(metrics, sampled(rows, lengths, truncated, [0.0] * 8, terms, prompts=2, texts=texts), 4)
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx({
        "reward/accuracy": 4 / 8,  # rows without a reward count
        "reward_terms/accuracy": 0.0,
        "reward_terms/a": 8 / 5,
        "reward_terms/b": 3.0,
        "reward/unscored": 1 / 8,  # no term applies
        "completion/length": 18 / 8,
        "completion/length_correct": 8 / 4,
        "completion/length_incorrect": 10 / 4,
        "completion/truncated": 1 / 8,
        "completion/unique": (3 / 4 + 3 / 4) / 2,  # tokens after the stop token do not count
    })  # fmt: skip


def test_metrics_of_rewards():
    """Rows without any reward have the mean of their group, or 0: they are in no mean."""
    metrics, accelerator = Means(), Accelerator(cpu=True)
    rewards = [0.1 + 0.2, 0.3, 5, 1, 7, 7]  # two are equal but for rounding
    add_rewards(metrics, samples_of(rewards, own=[*rewards[:5], math.nan]), 2, accelerator)
    scored = torch.tensor(rewards[:5], dtype=torch.float64)
    expected = {"reward/mean": float(scored.mean()), "reward/std": float(scored.std(unbiased=False))}
    assert metrics.reduce(accelerator) == pytest.approx(expected | {"advantage/zero_groups": 2 / 3})


def test_timed_phases(monkeypatch):
    now = iter([0.0, 10.0])
    monkeypatch.setattr("common.masked.time.perf_counter", lambda: next(now))
    metrics = Means()
    with metrics.timed("rollout"):
        pass
    assert metrics.reduce(SecondOfTwo([[6.0, 1.0]], [])) == {"time/rollout_s": 8.0}
