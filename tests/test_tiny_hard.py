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


EASY = "def easy(difficulty, **_):\n    return [float(name == 'easy') for name in difficulty]\n"


def test_a_run_reaches_model_data_and_column(tmp_path):
    (tmp_path / "mine.py").write_text(EASY, encoding="utf-8")
    options = f"--model_name_or_path embedded-hard --dataset embedded-hard --reward accuracy {tmp_path}/mine.py:easy"
    grpo.main([*QUICK, *options.split(), "--max_steps", "1", "--output_dir", str(tmp_path)])
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert samples and all(x["parts"]["easy"] == (len(terms_of(x["prompt"])) == 2) for x in samples)
    before, after = (load_file(path / "model.safetensors") for path in (build.FOLDER, tmp_path / "model"))
    changes = [(after[name] - weights).abs().max() for name, weights in before.items()]
    assert 0 < max(changes) < 2 * grpo.Args.learning_rate  # one step of AdamW from these weights
