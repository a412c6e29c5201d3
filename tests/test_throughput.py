"""tools/throughput.py: its contestants compute the same work, and what differs or fails is a problem."""

import concurrent.futures
import json
import warnings

import pytest
import torch
import transformers

import throughput


@pytest.fixture(autouse=True)
def restored():
    """What a contestant sets for its process."""
    threads = torch.get_num_threads()
    verbosity = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


class Here:
    """In the place of a ProcessPoolExecutor: the contestant runs in this process."""

    def __init__(self, *given, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *given):
        pass

    def submit(self, function, *given):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*given))
        except Exception as error:
            future.set_exception(error)
        return future


def compared(monkeypatch, folder, *words):
    """What a comparison finds, {who: turns}, {who: distance} and problems, and its tables."""
    monkeypatch.setattr(throughput.concurrent.futures, "ProcessPoolExecutor", Here)
    options = throughput.parse_options([*"--workload tiny --repetitions 1 --threads 1".split(), *words])
    found = throughput.compare_all(throughput.prepare("tiny", options, str(folder)), options.against)
    return *found, throughput.tables("tiny", options, *found)


@pytest.mark.parametrize("who", ["stock", pytest.param("trl", marks=pytest.mark.needs("trl"))])
def test_a_contestant_computes_the_gradient_of_ours(who, monkeypatch, tmp_path):
    results, check, problems, table = compared(monkeypatch, tmp_path, "--against", who, "--rows", "4")
    assert not problems and check[who] < 1e-5 and check["tokens"] > check["rows"] == 16
    assert list(results) == ["ours", who]
    assert f"| ours is better than {who} by |" in table
    for (turn,) in results.values():
        assert turn["rollout_s"] + turn["update_s"] <= turn["step_s"]
        assert 16 < turn["tokens"] <= 16 * 16


def test_the_embedded_workload_runs(monkeypatch, tmp_path):
    """Its reward grades answers; it named a function that was gone."""
    monkeypatch.setattr(throughput.concurrent.futures, "ProcessPoolExecutor", Here)
    small = throughput.dataclasses.replace(throughput.WORKLOADS["embedded"], prompts=8, cap=32)
    monkeypatch.setitem(throughput.WORKLOADS, "embedded", small)
    words = f"--workload embedded --against stock --repetitions 1 --threads 1 -o {tmp_path / 'result.json'}"
    assert throughput.main(words.split()) == 0
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["embedded"]
    assert {"step_s", "tokens", "peak_gb"} < result["ours"][0].keys() and result["check"]["stock"] < 1e-5


TURN = {"rollout_s": 0.5, "update_s": 0.25, "step_s": 1.0, "tokens": 4, "peak_gb": 0.1}


@pytest.mark.parametrize("value, problem", [(1.0, None), (1.1, "stock: its gradient"), (float("nan"), "stock:")])
def test_another_gradient_or_a_failure_is_a_problem(value, problem, monkeypatch, tmp_path):
    def contestant(task):
        if task.who == "trl":
            raise MemoryError
        torch.save({"weight": torch.tensor([value if task.who == "stock" else 1.0])}, task.gradient)
        return [TURN] * task.steps, [[5, 6], [7, 8]]

    monkeypatch.setattr(throughput, "run_contestant", contestant)
    monkeypatch.setattr(throughput.importlib.util, "find_spec", lambda name: True)
    results, _, problems, table = compared(monkeypatch, tmp_path, "--against", "trl", "stock")
    assert list(results) == ["ours", "stock"]
    assert problems[0].startswith("trl: MemoryError")
    assert len(problems) == 1 + bool(problem)
    assert problem is None or problems[1].startswith(problem)
    assert "| ours is better than stock by | 1.00 | 1.00 | 1.00 | 1.00 |" in table
    assert "PROBLEM: trl" in table
