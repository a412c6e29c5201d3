"""`embedded-hard`: its data match lab/build_tiny_hard.py, and two options run on it."""

import collections
import json
import random
import re

import pytest
from safetensors.torch import load_file

import build_tiny_hard as build
import grpo

TERMS = {"easy": {2}, "medium": {3, 4}, "hard": {6, 7, 8}}


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def terms_of(question):
    return re.findall(r"[+-]?\d", question)


@pytest.mark.parametrize("split, easy, medium, hard", [("train", 64, 192, 256), ("test", 16, 48, 64)])
def test_the_shares_of_the_classes(split, easy, medium, hard):
    rows = rows_of(build.FOLDER / f"{split}.jsonl")
    counts = collections.Counter(row["difficulty"] for row in rows)
    assert counts == {"easy": easy, "medium": medium, "hard": hard}
    for row in rows:
        terms = terms_of(row["question"])
        assert len(terms) in TERMS[row["difficulty"]]
        assert row["answer"].endswith(f"\n#### {sum(map(int, terms))}")
        assert row["answer"].count("\n") == len(terms) - 1  # right, in steps, no line twice


def test_lists_match_the_program():
    train, test = build.make_lists(random.Random(build.SEED))
    assert train == rows_of(build.FOLDER / "train.jsonl")
    assert test == rows_of(build.FOLDER / "test.jsonl")
    assert sum(path.stat().st_size for path in build.FOLDER.glob("*.*")) < 1e6


EASY = "def easy(difficulty, **_):\n    return [10.0 * (name == 'easy') for name in difficulty]\n"
FEW = "--max_steps 1 --prompts_per_step 8 --group_size 2 --eval_prompts 2 --eval_samples 1 --eval_k 1"


def test_run_finds_model_data_and_column(tmp_path):
    (tmp_path / "mine.py").write_text(EASY, encoding="utf-8")
    options = f"--model_name_or_path embedded-hard --dataset embedded-hard --reward accuracy {tmp_path}/mine.py:easy"
    grpo.main([*options.split(), *FEW.split(), "--output_dir", str(tmp_path / "run")])
    samples = rows_of(tmp_path / "run" / "samples.jsonl")
    assert samples
    for sample in samples:
        is_easy = len(terms_of(sample["prompt"])) == 2
        assert (sample["reward"] >= 10) == is_easy
    before = load_file(build.FOLDER / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changes = [float((after[name] - weights).abs().max()) for name, weights in before.items()]
    assert 0 < max(changes) < 2 * grpo.Args.learning_rate  # one step of AdamW from these weights
