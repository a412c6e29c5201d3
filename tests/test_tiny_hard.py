"""`embedded-hard`: its data are as common/tiny_hard/build.py says, and a run on it is two options."""

import collections
import json
import random
import re

import pytest
from safetensors.torch import load_file

import grpo
from common.tiny_hard import build
from small_run import QUICK
from testbed import ROOT, metric_rows

TERMS = {"easy": {2}, "medium": {3, 4}, "hard": {6, 7, 8}}


def rows_of(split):
    return [json.loads(line) for line in (build.FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def terms_of(question):
    return re.findall(r"[+-]?\d", question)


@pytest.mark.parametrize("split, easy, medium, hard", [("train", 64, 192, 256), ("test", 16, 48, 64)])
def test_the_shares_of_the_classes(split, easy, medium, hard):
    rows = rows_of(split)
    assert collections.Counter(row["difficulty"] for row in rows) == {"easy": easy, "medium": medium, "hard": hard}
    for row in rows:
        terms = terms_of(row["question"])
        assert len(terms) in TERMS[row["difficulty"]]
        assert row["answer"].endswith(f"\n#### {sum(map(int, terms))}")
        assert row["answer"].count("\n") == len(terms) - 1  # right, in steps, no line twice


def test_no_problem_is_there_twice():
    questions = [row["question"] for split in ("train", "test") for row in rows_of(split)]
    assert len(set(questions)) == 640


def test_the_lists_are_those_that_the_script_makes():
    train, test = build.make_lists(random.Random(build.SEED))
    assert train == rows_of("train") and test == rows_of("test")
    assert sum(path.stat().st_size for path in build.FOLDER.glob("*.*")) < 1e6


def test_the_careless_teacher():
    """One step in ten is off by 1 or 2, the next goes on from there, and one line in five is said twice."""
    rng, steps, slips, twice = random.Random(0), 0, 0, 0
    for _ in range(2000):
        question, _ = build.make_problem(rng, 6, 8)
        *lines, last = build.careless_answer(rng, question).split("\n")
        said = [line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]]
        total, terms = terms_of(question)[0], []
        for line in said:
            before, term, after = re.fullmatch(r"(-?\d+)([+-]\d)=(-?\d+)", line).groups()
            assert before == total and abs(int(before) + int(term) - int(after)) <= 2
            slips += int(before) + int(term) != int(after)
            total, terms = after, [*terms, term]
        assert terms == terms_of(question)[1:] and last == f"#### {total}"
        steps, twice = steps + len(said), twice + len(lines) - len(said)
    assert slips / steps == pytest.approx(0.1, abs=0.01) and twice / steps == pytest.approx(0.2, abs=0.015)


@pytest.mark.beside("lab")
def test_a_run_reaches_model_data_and_column(tmp_path):
    classes = [f"{ROOT}/lab/by_class.py:{name}" for name in TERMS]
    options = ["--model_name_or_path", "embedded-hard", "--dataset", "embedded-hard", "--max_steps", "1"]
    options += ["--reward", "accuracy", *classes, "--reward_weights", "1", "0", "0", "0"]
    grpo.main([*QUICK, *options, "--prompts_per_step", "16", "--output_dir", str(tmp_path)])
    row = metric_rows(tmp_path)[-1]
    parts = {name: row[f"reward_part/{name}"] for name in TERMS}  # with 16 tokens an easy sum can be answered
    assert parts["easy"] > 0.5 and parts["hard"] < parts["easy"]
    before, after = (load_file(path / "model.safetensors") for path in (build.FOLDER, tmp_path / "model"))
    changes = [(after[name] - weights).abs().max() for name, weights in before.items()]
    assert 0 < max(changes) < 2 * grpo.Args.learning_rate  # one step of AdamW from these weights
