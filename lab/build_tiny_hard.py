"""Builds `embedded-hard`, the second embedded task, which takes its time: all in common/tiny_hard.

    python lab/build_tiny_hard.py [FOLDER]

The first task (build_tiny.py) is learnt within 25 steps, because its model already knows the good
way to answer and only has to prefer it: whatever the algorithm, the curves look alike. This one is
for comparisons. The sums are of the same kind, the tokenizer, the size of the model and its training
are the same, and four things differ:

- **Three classes of difficulty**, in the column `difficulty`: easy sums have 2 terms, medium ones 3
  or 4, hard ones 6 to 8. Sums of 5 terms are left out, so that the classes do not touch. An eighth
  of the problems is easy, three eighths are medium, half is hard, in both lists: the model solves
  them with probabilities near 0.9, 0.5 and 0.1, and most of what there is to learn is hard.
- **A careless teacher**: the model learns from answers in steps of which one in ten is off by 1 or
  2, and the next step carries on from the wrong total. So right and wrong steps look alike, a
  mistake cannot be seen in the form of an answer, and the model has learnt to make mistakes. What
  reinforcement learning has to find is not one habit but care in each step of every sum, and that
  takes hundreds of optimizer steps.
- **Lines said twice**: one line in five stands there a second time, which helps nothing and harms
  nothing. So the length of an answer is free to move, and what an algorithm does to it by its
  averages can be seen.
- **Straight answers** (the last line alone) in none of the easy sums, a fifth of the medium and
  three tenths of the hard ones: a short way that is usually wrong, so that there is a choice of ways
  too, but not a decisive one.

The answers in the lists are right and have no line twice; only the training of the model shows
careless ones. That draws fresh problems throughout and never one of `test.jsonl`. There are 126 sums
of two terms in all: 80 of them are in the lists. The lists are disjoint, with 512 and 128 problems:
a run of 80 steps of 32 prompts meets each problem five times, and its evaluation takes seconds.

Takes about three minutes on one core. Again on the same machine it writes the same bytes; another
kind of processor rounds otherwise, and gives other weights.

Measured on `test.jsonl`, 32 samples a problem at temperature 1 (`straight`: the share of answers that
are, and how many of those are right):

    class     pass@1   in steps   straight          tokens   longest
    easy      0.87     0.87       0.01, 0.00 right    15.4        31
    medium    0.47     0.55       0.24, 0.19 right    21.8        52
    hard      0.11     0.12       0.33, 0.09 right    40.4        95
    all       0.34     0.41       0.26, 0.13 right    30.3        95

Each medium problem was solved by 7 to 24 of its 32 samples, each easy one by 24 or more, each hard
one by at most 11, and an eighth of the hard ones by none or one. Some line is said twice in 0.15,
0.34 and 0.49 of the answers in steps of the three classes. No answer is cut at 128 tokens.
"""

import collections
import pathlib
import random
import re
import sys
from dataclasses import dataclass

import torch

from build_tiny import (
    ROWS,
    encode,
    make_model,
    make_problem,
    make_tokenizer,
    pad,
    train,
    write_list,
)

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "common" / "tiny_hard"
SEED = 0
TRAIN_PROBLEMS = 512
TEST_PROBLEMS = 128
SLIP = 0.1  # of the teacher's steps are off by 1 or 2, and what follows carries on from there
TWICE = 0.2  # of its lines are said twice


@dataclass
class Difficulty:
    terms: tuple  # the least and the most
    share: float  # of the problems
    straight: float  # of the answers that the model learns from


CLASSES = {
    "easy": Difficulty(terms=(2, 2), share=0.125, straight=0.0),
    "medium": Difficulty(terms=(3, 4), share=0.375, straight=0.2),
    "hard": Difficulty(terms=(6, 8), share=0.5, straight=0.3),
}


def make_lists(rng):
    """Two lists of distinct problems, training and test, with the same shares of each class."""
    seen = set()
    test = make_list(rng, TEST_PROBLEMS, seen)
    train = make_list(rng, TRAIN_PROBLEMS, seen)
    return train, test


def make_list(rng, size, seen):
    """So many problems, none of which is `seen`; they are added to it."""
    rows = []
    for name, difficulty in CLASSES.items():
        wanted = len(rows) + round(difficulty.share * size)
        while len(rows) < wanted:
            question, answer = make_problem(rng, *difficulty.terms)
            if question not in seen:
                seen.add(question)
                rows.append({"question": question, "answer": answer, "difficulty": name})
    rng.shuffle(rows)
    return rows


def careless_answer(rng, question):
    """The answer in steps of a teacher who slips, and says some lines twice."""
    first, *terms = re.findall(r"[+-]?\d", question)
    total = int(first)
    steps = ""
    for term in terms:
        result = total + int(term)
        if rng.random() < SLIP:
            result += rng.choice((-2, -1, 1, 2))
        line = f"{total}{term}={result}\n"
        steps += line * (2 if rng.random() < TWICE else 1)
        total = result
    return f"{steps}#### {total}"


def make_batch(rng, tokenizer, held_out):
    """Token ids and labels of fresh problems, answered by the careless teacher or straight."""
    classes = list(CLASSES.values())
    shares = [difficulty.share for difficulty in classes]
    rows = []
    while len(rows) < ROWS:
        difficulty = rng.choices(classes, shares)[0]
        question, answer = make_problem(rng, *difficulty.terms)
        if question in held_out:
            continue
        if rng.random() < difficulty.straight:
            answer = answer[answer.index("####") :]
        else:
            answer = careless_answer(rng, question)
        rows.append(encode(question, answer, tokenizer))
    return pad(rows, tokenizer)


def main(folder=FOLDER):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # with more, sums may be ordered otherwise from run to run
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    train_rows, test_rows = make_lists(rng)
    for name, rows in (("train", train_rows), ("test", test_rows)):
        write_list(folder / f"{name}.jsonl", rows)
        print(name, dict(collections.Counter(row["difficulty"] for row in rows)))
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} weights")
    held_out = {row["question"] for row in test_rows}
    train(model, lambda step: make_batch(rng, tokenizer, held_out))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
