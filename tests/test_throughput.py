"""lab/throughput.py: contestants do the same work, and a different gradient is an error."""

import concurrent.futures
import json

import pytest
import torch
import transformers

import throughput


class Here:
    """Stand in for a ProcessPoolExecutor; runs the contestant in this process."""

    def __init__(self, *given, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *given):
        pass

    def submit(self, function, *given):
        future = concurrent.futures.Future()
        future.set_result(function(*given))
        return future


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(throughput.concurrent.futures, "ProcessPoolExecutor", Here)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    transformers.logging.enable_progress_bar()


SHORT = "--repetitions 1 --threads 1 --workload".split()


@pytest.mark.parametrize(
    "workload, who",
    [("tiny", "plain"), ("embedded", "plain"), pytest.param("tiny", "trl", marks=pytest.mark.needs("trl"))],
)
def test_contestants_compute_the_same_gradient(workload, who, monkeypatch, tmp_path, capsys):
    small = throughput.dataclasses.replace(throughput.WORKLOADS["embedded"], prompts=8, cap=32)
    monkeypatch.setitem(throughput.WORKLOADS, "embedded", small)
    file = tmp_path / "result.json"
    fast = ["--fast"] if who == "plain" else []
    throughput.main([*SHORT, workload, *fast, "--against", who, "--rows", "4", "-o", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))[workload]
    assert result["check"][who] < 1e-5 and result["check"]["tokens"] > result["check"]["rows"] >= 16
    for (turn,) in (result["ours"], result[who]):
        assert turn["rollout_s"] + turn["update_s"] <= turn["step_s"]
        assert turn["tokens"] > 16 and "peak_gb" in turn
    assert f"| ours is better than {who} by |" in capsys.readouterr().out


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_another_gradient_ends_the_comparison(value, monkeypatch):
    def contestant(task):
        torch.save({"weight": torch.tensor([value if task.who == "trl" else 1.0])}, task.gradient)
        return [{"tokens": 4}] * task.steps, [[5, 6], [7, 8]]

    monkeypatch.setattr(throughput, "run_contestant", contestant)
    with pytest.raises(SystemExit, match="trl: its gradient"):
        throughput.main([*SHORT, "tiny", "--against", "trl"])


def test_ratios_are_theirs_over_ours():
    ours = {"rollout_s": 0.5, "update_s": 0.25, "step_s": 1.0, "tokens": 4, "peak_gb": 0.1}
    theirs = {"rollout_s": 1.0, "update_s": 0.75, "step_s": 4.0, "tokens": 4, "peak_gb": 0.5}
    row = "| ours is better than plain by | 2.00 (2.00-2.00) | 3.00 (3.00-3.00) | 4.00 (4.00-4.00) | 5.00 |"
    assert throughput.table({"ours": [ours], "plain": [theirs]}).splitlines()[-1] == row
