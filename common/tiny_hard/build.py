"""Builds `embedded-hard`, the second embedded task, which takes its time: data, tokenizer and model, in this folder.

python -m common.tiny_hard.build
"""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from common.tiny.build import ROWS, make_model, make_problem, make_tokenizer, pad, train

FOLDER = Path(__file__).parent
SEED = 0
TRAIN_PROBLEMS, TEST_PROBLEMS = 512, 128
SLIP = 0.1  # of the steps are off by 1 or 2, and what follows carries on from there
TWICE = 0.2  # of the lines are said twice


@dataclass
class Difficulty:
    terms: tuple  # the least and the most
    share: float  # of the problems
    straight: float  # of the answers


CLASSES = {
    "easy": Difficulty(terms=(2, 2), share=0.125, straight=0.0),
    "medium": Difficulty(terms=(3, 4), share=0.375, straight=0.2),
    "hard": Difficulty(terms=(6, 8), share=0.5, straight=0.3),
}


def make_lists(rng):
    """Two lists of distinct problems, training and test, with the same shares of each class."""
    lists, seen = [], set()
    for size in (TEST_PROBLEMS, TRAIN_PROBLEMS):
        rows = []
        for name, difficulty in CLASSES.items():
            wanted = len(rows) + round(difficulty.share * size)
            while len(rows) < wanted:
                question, answer = make_problem(rng, *difficulty.terms)
                if question not in seen:
                    seen.add(question)
                    rows.append({"question": question, "answer": answer, "difficulty": name})
        rng.shuffle(rows)
        lists.append(rows)
    return reversed(lists)


def careless_answer(rng, question):
    """The answer in steps of a teacher who slips, and says some lines twice."""
    first, *terms = re.findall(r"[+-]?\d", question)
    total, steps = int(first), ""
    for term in terms:
        result = total + int(term)
        if rng.random() < SLIP:
            result += rng.choice((-2, -1, 1, 2))
        line = f"{total}{term}={result}\n"
        steps += line * (2 if rng.random() < TWICE else 1)
        total = result
    return f"{steps}#### {total}"


def make_batch(rng, tokenizer, held_out):
    """Token ids and labels of fresh problems; the loss counts the answer and its end token, not the question."""
    rows, classes = [], list(CLASSES.values())
    while len(rows) < ROWS:
        difficulty = rng.choices(classes, [difficulty.share for difficulty in classes])[0]
        question, answer = make_problem(rng, *difficulty.terms)
        if question in held_out:
            continue
        straight = rng.random() < difficulty.straight
        answer = answer[answer.index("####") :] if straight else careless_answer(rng, question)
        prompt, completion = tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append((prompt + completion, [-100] * len(prompt) + completion))
    return pad(rows, tokenizer)


def main():
    torch.set_num_threads(1)  # with more, sums may be ordered otherwise from run to run
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    train_rows, test_rows = make_lists(rng)
    for name, rows in ("train", train_rows), ("test", test_rows):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(name, dict(Counter(row["difficulty"] for row in rows)))
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} weights")
    held_out = {row["question"] for row in test_rows}
    train(model, lambda step: make_batch(rng, tokenizer, held_out))
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
