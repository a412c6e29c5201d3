"""harness/metrics.py: means, maxima and deviations over several calls and processes, and the metrics of samples."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from common.batches import Completion, Samples
from harness.data import Prompt
from harness.metrics import Metrics, peak_memory_gb
from harness.pairs import Pair
from small_run import samples_of


class SecondOfTwo:
    """In the place of an Accelerator; the first process has added other numbers."""

    device = torch.device("cpu")

    def __init__(self, sums, maxima):
        self.sums, self.maxima = torch.tensor(sums).double(), torch.tensor([maxima]).double()

    def reduce(self, tensor, how):
        assert how == "sum"
        return tensor + self.sums.flatten()

    def gather(self, tensor):
        return torch.cat([tensor, self.maxima])


def test_metrics_equal_their_definitions_over_several_calls():
    metrics = Metrics()
    for values, mask in (([3.0, 9.0], [True, False]), ([5.0, 1.0], [True, True])):
        values, mask = torch.tensor(values), torch.tensor(mask)
        metrics.add("mean", values, mask)
        metrics.add("some_max", values + 1, mask)
        metrics.add("none", values, mask & False)
        metrics.add("none_max", values, mask & False)
        metrics.add_ratio("ratio", values.sum(), 4)
    metrics.add("some_max", torch.tensor([2.0]))
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx({"mean": 3.0, "some_max": 6.0, "ratio": 18 / 8})


def test_a_metric_is_the_sum_of_all_processes_over_their_counts():
    """Not the mean of their means; what counts nothing on this process may count on another."""
    metrics = Metrics()
    metrics.add("mean", torch.tensor([1.0, 2.0, 3.0]))
    metrics.add("here_none", torch.tensor([7.0]), torch.tensor([False]))
    metrics.add("most_max", torch.tensor([5.0]))
    metrics.add("here_none_max", torch.tensor([5.0]), torch.tensor([False]))
    found = metrics.reduce(SecondOfTwo([[10.0, 1.0], [4.0, 2.0]], [3.0, 2.0]))
    assert found == {"mean": 16 / 4, "here_none": 2.0, "most_max": 5.0, "here_none_max": 2.0}


def test_statistics_of_rows_count_rows_and_those_of_tokens_tokens():
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    stats = {"token": torch.tensor([[1.0, 2, 3], [6, 9, 9], [9, 9, 9]]), "row": torch.tensor([[1.0], [4], [9]])}
    metrics = Metrics()
    metrics.add_all("policy", stats, mask)
    metrics.add_all("optim", {"lr": 0.5})
    assert metrics.reduce(Accelerator(cpu=True)) == {"policy/token": 3.0, "policy/row": 2.5, "optim/lr": 0.5}


def sampled(rows, lengths, truncated, rewards, terms, prompts=1):
    """Return `Samples` of completions that are the first `lengths` tokens of `rows`."""
    mask = torch.arange(len(rows[0])) < torch.tensor(lengths)[:, None]
    batch = {"completions": torch.tensor(rows), "completion_mask": mask, "truncated": torch.tensor(truncated)}
    completions = [Completion("", row[:length], False) for row, length in zip(rows, lengths, strict=True)]
    prompts = [Prompt([1], "1+1", None)] * prompts
    return Samples(batch, prompts, completions, torch.tensor(rewards, dtype=torch.float64), terms)


def test_the_samples_of_a_rollout_by_hand():
    rows = [[5, 1, 0], [5, 1, 7], [6, 6, 1], [6, 6, 6], [5, 1, 0], [5, 5, 1], [5, 1, 0], [1, 0, 0]]
    nan = math.nan
    terms = {
        "accuracy": [1, 1, -1, -1, 1, nan, nan, -1],  # a script may count a wrong answer as -1
        "a": [1.0] * 4 + [nan] * 2 + [nan] + [4.0],
        "b": [nan] * 5 + [3.0, nan, nan],
    }
    terms = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()}
    lengths, truncated = [2, 2, 3, 3, 2, 3, 2, 1], [False] * 3 + [True] + [False] * 4
    metrics = Metrics()
    metrics.add_samples(sampled(rows, lengths, truncated, [0.0] * 8, terms, prompts=2), 4)
    metrics.tokens.clear()  # nothing was timed
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx({
        "reward/accuracy": 3 / 6,
        "reward_terms/accuracy": 0.0,
        "reward_terms/a": 8 / 5,
        "reward_terms/b": 3.0,
        "reward/unscored": 1 / 8,  # no term applies
        "completion/length": 18 / 8,
        "completion/length_correct": 6 / 3,
        "completion/length_incorrect": 7 / 3,
        "completion/truncated": 1 / 8,
        "completion/unique": (3 / 4 + 3 / 4) / 2,  # what stands after the stop token does not count
    })  # fmt: skip


def test_the_rewards_of_a_rollout_by_hand():
    metrics = Metrics()
    for rewards in ([1, 3, 2, 2], [0.1 + 0.2, 0.3, 5, 1]):  # two are equal but for rounding
        metrics.add_rewards(samples_of(rewards), 2)
    # Rows without any reward have the mean of their group, or 0: they are in no mean.
    metrics.add_rewards(samples_of([7, 7, 0, 0], own=[7, math.nan, math.nan, math.nan]), 2)
    rewards = torch.tensor([1, 3, 2, 2, 0.3, 0.3, 5, 1, 7], dtype=torch.float64)
    expected = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(unbiased=False))}
    metrics.tokens.clear()  # nothing was timed
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx(expected | {"advantage/zero_groups": 4 / 6})


def test_tokens_per_second_by_hand(monkeypatch):
    now = iter([0.0, 10.0, 20.0, 24.0])
    monkeypatch.setattr("harness.metrics.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("harness.metrics.world_size", lambda: 2)
    monkeypatch.setattr("harness.metrics.peak_memory_gb", lambda: 1.5)
    terms = {"accuracy": torch.zeros(2)}
    samples = sampled([[5, 5, 5, 1], [5, 1, 0, 0]], [4, 2], [False, False], [0.0, 0.0], terms)
    metrics = Metrics()
    for phase in ("rollout", "update"):
        with metrics.timed(phase):
            pass
    metrics.add_samples(samples, 2)
    metrics.add_rewards(samples, 2)
    # The other process has sampled 4 tokens in 6 seconds, and trained on them in 4.
    theirs = {"time/rollout_s": (6, 1), "time/update_s": (4, 1)}
    theirs |= {"time/rollout_tokens_per_s": (8, 6), "time/update_tokens_per_s": (8, 4)}
    metrics.add_speed()
    metrics.add_speed = lambda: None  # `reduce` would add it once more
    found = metrics.reduce(SecondOfTwo([theirs.get(name, (0, 0)) for name in metrics.means], [2.5]))
    assert {name: x for name, x in found.items() if name.startswith(("time/", "memory/"))} == pytest.approx({
        "time/rollout_s": 8.0,
        "time/update_s": 4.0,
        "time/rollout_tokens_per_s": (6 + 4) / 8,  # of both processes, while both take the mean time
        "time/update_tokens_per_s": (6 + 4) / 4,
        "memory/peak_gb": 2.5,
    })  # fmt: skip


def test_a_prompt_counts_with_each_of_its_two_completions(monkeypatch):
    now = iter([0.0, 2.0])
    monkeypatch.setattr("harness.metrics.time.perf_counter", lambda: next(now))
    metrics = Metrics()
    with metrics.timed("update"):
        pass
    metrics.add_pairs([Pair([1, 2], [3], [4, 5, 6]), Pair([1], [3, 3], [4])])
    found = metrics.reduce(Accelerator(cpu=True))
    assert (found["completion/length_chosen"], found["completion/length_rejected"]) == (1.5, 2.0)
    assert found["time/update_tokens_per_s"] == (4 + 1 + 3 + 2 + 2 + 1) / 2


@pytest.mark.parametrize("platform, on_gpu, peak", [("linux", 0, 2.048), ("darwin", 0, 0.002), ("linux", 1, 3.0)])
def test_the_peak_memory_is_that_of_the_gpu_or_else_in_kib_and_on_a_mac_in_bytes(platform, on_gpu, peak, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", platform)
    for name, value in (("is_available", on_gpu), ("is_initialized", on_gpu), ("max_memory_allocated", 3e9)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2_000_000))
    assert peak_memory_gb() == pytest.approx(peak)


def test_without_resource_as_on_windows_the_peak_memory_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    metrics = Metrics()
    with metrics.timed("update"):
        pass
    metrics.tokens["update"] = 1
    assert "memory/peak_gb" not in metrics.reduce(Accelerator(cpu=True))
