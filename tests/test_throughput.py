"""The game of benchmarks/throughput.py. Its contestants are threads here, as new processes would have to start."""

import argparse
import json
import multiprocessing
import threading
import time
import types
import warnings

import pytest
import torch
import transformers

from benchmarks import throughput


class End:
    """The contestant's end of the pipe: a thread has no copy of its own, which the game could close."""

    def __init__(self, pipe):
        self.pipe, self.send, self.recv = pipe, pipe.send, pipe.recv

    def close(self):
        pass


class Thread(threading.Thread):
    """A thread with the methods of a process that the game calls."""

    def run(self):
        try:
            super().run()
        finally:
            self.end.pipe.close()

    def kill(self):
        pass

    def join(self, timeout=60):
        super().join(timeout)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    def start_thread(target, args, daemon):
        thread = Thread(target=target, args=args, daemon=daemon)
        thread.end = args[-1]
        return thread

    def pipe():
        ours, theirs = multiprocessing.Pipe()
        return ours, End(theirs)

    monkeypatch.setattr(throughput, "SPAWN", types.SimpleNamespace(Pipe=pipe, Process=start_thread))
    before = torch.get_num_threads(), transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(before[0])
    transformers.logging.set_verbosity(before[1])
    transformers.logging.enable_progress_bar()


@pytest.fixture
def options(tmp_path):
    """Those of the command line, for one timed turn, one contestant after the other."""
    return argparse.Namespace(
        repetitions=1,
        against=["stock"],
        only=None,
        alone=True,
        threads=1,
        rows=None,
        stock_rows=None,
        trl_rows=None,
        decode_rows=[],
        grpo=[],
        gradient_checkpointing=False,
        lines=str(tmp_path / "lines.jsonl"),
    )


def new_game(options, folder, deadline=None):
    workload = throughput.WORKLOADS["tiny"]
    return throughput.Game("tiny", workload, options, throughput.prepare(workload, options, str(folder)), deadline)


def lines(options):
    with open(options.lines, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def pretend(monkeypatch, fits=64, step=lambda name: None, gradient=lambda name: 1.0):
    """Contestants that compute nothing, for which up to `fits` rows a forward have memory."""

    def contestant(name, task, pipe):
        pipe.send({"ready": True})
        while message := pipe.recv():
            if "decode" in message:
                pipe.send(dict(rows=message["decode"], tokens=8, cold_ms_a_token=2.0, ms_a_token=1.0))
                continue
            if message["rows"] > fits:
                return pipe.send({"out_of_memory": "tried to allocate 2 GiB"})
            if step(name) == "ends":
                return
            if message["save"]:
                torch.save({"weight": torch.tensor([gradient(name)])}, f"{task.folder}/{message['save']}.pt")
            seconds = dict(rollout_s=0.5, update_s=0.25, step_s=1.0, ms_a_token=250.0)
            counts = dict(tokens=4, longest=2, peak_gb=0.1)
            pipe.send(seconds | counts | dict(completions=message["given"] or [[5, 6], [7, 8]]))

    monkeypatch.setattr(throughput, "contestant", contestant)
    monkeypatch.setattr(throughput, "make_random", lambda workload, number, folder: [([1], "a", "")] * number)


@pytest.mark.parametrize("only", [None, ["ours"]])
def test_steps_of_ours_and_of_stock(options, tmp_path, only):
    """The real contestants: the same gradient with each number of rows, and every part of a step is measured."""
    options.rows, options.decode_rows, options.only = [4, 8], [2], only
    game = new_game(options, tmp_path)
    game.play()
    assert not game.problems and game.check.keys() == {"rows", "tokens", "ours-8", "stock"}
    assert max(game.check[who] for who in ("ours-8", "stock")) < 1e-5
    assert list(game.results) == ["ours-4", "ours-8"] + (["stock"] if not only else [])
    for (turn,) in game.results.values():
        assert turn["rollout_s"] + turn["update_s"] <= turn["step_s"] and turn["longest"] <= 16 < turn["tokens"]
        assert {"rollout_now_gb", "rollout_peak_gb", "scored_now_gb", "update_peak_gb"} <= turn.keys()
    assert game.results["ours-4"][0]["tokens"] == game.results["ours-8"][0]["tokens"]  # the same draws
    (decoding,) = game.decoding
    assert (decoding["rows"], decoding["tokens"]) == (2, 16)  # none of them ended
    assert {line["contestant"] for line in lines(options)} == {"ours", "ours-4", "ours-8", "stock"}


def test_prompts_have_several_lengths(tmp_path):
    prompts = throughput.make_random(throughput.WORKLOADS["tiny"], 40, str(tmp_path))
    assert {len(ids) for ids, _, _ in prompts} == set(range(4, 13))


@pytest.mark.parametrize("rows, fits, found", [([2, 16], 4, ["ours-2", "ours-4"]), ([16], 4, ["ours"])])
def test_without_memory_half_the_rows(monkeypatch, options, tmp_path, rows, fits, found):
    """Of 16, 8 and 4 rows only 4 fit; what was timed with fewer rows stays."""
    pretend(monkeypatch, fits)
    options.rows, options.stock_rows = rows, 8
    game = new_game(options, tmp_path)
    game.play()
    assert sorted(game.results) == sorted([*found, "stock"]) and not game.problems
    assert [turn["rows"] for who in ("stock", found[-1]) for turn in game.results[who]] == [4, 4]
    said = [(line["contestant"], line["rows"]) for line in lines(options) if "out_of_memory" in line]
    assert said == [("ours", 16), ("ours", 8), ("stock", 8)]
    assert f"| {found[-1]} is better than stock by | 1.00 | 1.00 | 1.00 | 1.00 |" in throughput.tables(game)


def test_not_even_one_row_has_memory(monkeypatch, options, tmp_path):
    pretend(monkeypatch, fits=0)
    options.rows = [2]
    game = new_game(options, tmp_path)
    game.play()
    assert game.problems == [
        "ours: has too little memory for one row a forward",
        "stock: there is no rollout of ours to compare it on",
    ]


def test_one_contestant_fails_and_the_others_go_on(monkeypatch, options, tmp_path):
    pretend(monkeypatch, step=lambda name: "ends" if name == "stock" else None)
    options.against = ["stock", "trl"]
    game = new_game(options, tmp_path)
    game.play()
    assert list(game.results) == ["ours", "trl"]
    assert game.problems == ["stock: its process ended; its traceback is above"]
    assert "PROBLEM: stock" in throughput.tables(game)


@pytest.mark.parametrize("value", [1.1, float("nan")])
def test_another_gradient_is_a_problem(monkeypatch, options, tmp_path, value):
    pretend(monkeypatch, gradient=lambda name: value if name == "stock" else 1.0)
    game = new_game(options, tmp_path)
    game.play()
    (problem,) = game.problems
    assert problem.startswith("stock: the gradient differs from ours by ")


def test_cut_off_keeps_what_there_is(monkeypatch, options, tmp_path):
    """The second contestant hangs: the tables still have the first."""
    pretend(monkeypatch, step=lambda name: time.sleep(1) if name == "stock" else None)
    game = new_game(options, tmp_path, time.monotonic() + 0.5)
    with pytest.raises(throughput.CutOff):
        game.play()
    assert [len(turns) for turns in game.results.values()] == [1]
    assert "| ours | 8 | 4 | 0.50 | 8 |" in throughput.tables(game)


def test_turns_are_taken_in_turn(monkeypatch, options, tmp_path):
    pretend(monkeypatch)
    options.alone, options.repetitions, options.decode_rows = False, 2, [4]
    game = new_game(options, tmp_path)
    game.play()
    said = [(line["contestant"], line["turn"]) for line in lines(options) if "turn" in line]
    order = ["check", "warm-up", 0, 1]
    assert said == [(who, turn) for turn in order for who in ("ours", "stock")]
