"""tools/throughput.py: its contestants compute the same work, and what differs or fails is said."""

import concurrent.futures
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
    """What a comparison of the workload `tiny` finds, and its tables."""
    monkeypatch.setattr(throughput.concurrent.futures, "ProcessPoolExecutor", Here)
    options = throughput.parse_options([*"--workload tiny --repetitions 1 --threads 1".split(), *words])
    found = throughput.compare_all(throughput.prepare("tiny", options, str(folder)), options)
    return found, throughput.tables("tiny", found, options)


def test_the_contestants_compute_the_same_work(monkeypatch, tmp_path):
    """One gradient in another loop and with other rows in a forward; the same draws; rows that do not end."""
    words = "--against stock --rows 4 8 --decode_rows 2".split()
    found, table = compared(monkeypatch, tmp_path, *words)
    assert not found.problems
    assert found.check.keys() == {"rows", "tokens", "ours-8", "stock"}
    assert max(found.check["ours-8"], found.check["stock"]) < 1e-5
    assert list(found.results) == ["ours-4", "ours-8", "stock"]
    assert "| ours-8 is better than stock by |" in table
    for (turn,) in found.results.values():
        assert turn["rollout_s"] + turn["update_s"] <= turn["step_s"]
        assert turn["longest"] <= 16 < turn["tokens"]
    assert found.results["ours-4"][0]["tokens"] == found.results["ours-8"][0]["tokens"]
    (decoding,) = found.decoding
    assert (decoding["rows"], decoding["tokens"]) == (2, 16)


@pytest.mark.needs("trl")
def test_trl_computes_the_same_gradient(monkeypatch, tmp_path):
    found, table = compared(monkeypatch, tmp_path, "--against", "trl")
    assert not found.problems and found.check["trl"] < 1e-5
    assert "| ours is better than trl by |" in table


TURN = {
    "rows": 8,
    "rollout_s": 0.5,
    "update_s": 0.25,
    "step_s": 1.0,
    "ms_a_token": 250.0,
    "tokens": 4,
    "longest": 2,
    "peak_gb": 0.1,
}


@pytest.mark.parametrize(
    "value, problem", [(1.0, None), (1.1, "stock: the gradient differs"), (float("nan"), "stock:")]
)
def test_another_gradient_or_a_failure_is_a_problem(value, problem, monkeypatch, tmp_path):
    def contestant(who, task):
        if who == "trl":
            raise MemoryError
        torch.save({"weight": torch.tensor([value if who == "stock" else 1.0])}, task.gradient)
        return [TURN] * task.steps, [[5, 6], [7, 8]], []

    def questions(workload, number, folder):
        return [throughput.Question([1], "a", "")] * number

    monkeypatch.setattr(throughput, "contestant", contestant)
    monkeypatch.setattr(throughput, "make_random", questions)
    monkeypatch.setattr(throughput.importlib.util, "find_spec", lambda name: True)
    found, table = compared(monkeypatch, tmp_path, "--against", "trl", "stock")
    assert list(found.results) == ["ours", "stock"]
    assert found.problems[0].startswith("trl: MemoryError")
    assert len(found.problems) == 1 + bool(problem)
    assert problem is None or found.problems[1].startswith(problem)
    assert "| ours is better than stock by | 1.00 | 1.00 | 1.00 | 1.00 |" in table
    assert "PROBLEM: trl" in table
