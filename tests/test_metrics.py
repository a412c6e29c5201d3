"""common/harness/metrics.py: sums, maxima and deviations over several calls, and the metrics of a rollout."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from common.metrics import Metrics, peak_memory_gb


def test_metrics_equal_their_definitions_over_several_calls():
    metrics = Metrics()
    for values, mask in (([3.0, 9.0], [True, False]), ([5.0, 1.0], [True, True])):
        values, mask = torch.tensor(values), torch.tensor(mask)
        metrics.add("mean", values, mask)
        metrics.add_max("max", values + 1, mask)
        metrics.add("std", values)
        metrics.add("std squared", values.square())
        metrics.add("none", values, mask & False)
    metrics.add_max("max", torch.tensor([2.0]))
    expected = {"mean": 3.0, "std": ((1.5**2 + 4.5**2 + 0.5**2 + 3.5**2) / 4) ** 0.5, "max": 6.0}
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx(expected)


def test_the_metrics_of_a_rollout_by_hand():
    completions = torch.tensor([[5, 1, 0], [5, 1, 7], [6, 6, 1], [6, 6, 6], [5, 1, 0], [5, 5, 1], [5, 1, 0], [1, 0, 0]])
    lengths = torch.tensor([2, 2, 3, 3, 2, 3, 2, 1])
    batch = {
        "completions": completions,
        "completion_mask": torch.arange(3) < lengths[:, None],
        "truncated": torch.tensor([False] * 3 + [True] + [False] * 4),
    }
    nan = math.nan
    correct = torch.tensor([1, 1, 0, 0, 1, nan, 0, 0], dtype=torch.float64)
    rewards = torch.tensor([2, 2, 2, 2, 1, 1, 1, nan], dtype=torch.float64)
    metrics = Metrics()
    metrics.add_rollout(batch, rewards, correct, {"a": torch.tensor([1.0] * 4 + [nan] * 2 + [4.0] * 2)}, 4)
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx({
        "reward/accuracy": 3 / 7,
        "reward_part/a": 2.0,
        "reward/unscored": 1 / 8,  # whatever the parts say
        "completion/length": 18 / 8,
        "completion/length_correct": 6 / 3,
        "completion/length_incorrect": 9 / 4,
        "completion/truncated": 1 / 8,
        "completion/unique": (3 / 4 + 3 / 4) / 2,  # what stands after the stop token does not count
    })  # fmt: skip


def test_rows_without_a_reward_are_in_no_metric_of_the_rewards():
    nan = math.nan
    metrics = Metrics()
    groups = [[1, 3, nan, nan], [nan] * 4, [2, 2, nan, 2], [2] * 4]
    metrics.add_rewards(torch.tensor(groups, dtype=torch.float64).flatten(), 4)
    expected = {"reward/mean": 2.0, "reward/std": (2 / 9) ** 0.5, "advantage/zero_groups": 2 / 3}  # of scored groups
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx(expected)


def test_tokens_per_second_by_hand(monkeypatch):
    monkeypatch.setattr("common.metrics.time.perf_counter", lambda: 14.0)
    monkeypatch.setattr("common.metrics.world_size", lambda: 2)
    batch = {"completions": torch.zeros(2, 4), "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]) > 0}
    for drawn, rollout in ((None, 6 * 2 / 10), (9, 9 * 2 / 10)):  # what dapo.py rejects was sampled too
        metrics = Metrics()
        metrics.add_times(batch, 0.0, 10.0, SimpleNamespace(num_epochs=3), drawn)
        found = metrics.reduce(Accelerator(cpu=True))
        found = {name: value for name, value in found.items() if name.startswith("time/")}
        each = {"time/rollout_tokens_per_s": rollout, "time/update_tokens_per_s": 6 * 3 * 2 / 4}
        assert found == pytest.approx(each | {"time/rollout_s": 10.0, "time/update_s": 4.0})


@pytest.mark.parametrize("platform, peak", [("linux", 2.048), ("darwin", 0.002)])
def test_the_peak_memory_of_a_process_comes_in_kib_and_on_a_mac_in_bytes(platform, peak, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=2_000_000))
    assert peak_memory_gb(torch.device("cpu")) == pytest.approx(peak)


def test_without_resource_as_on_windows_the_peak_memory_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    assert peak_memory_gb(torch.device("cpu")) == -math.inf
