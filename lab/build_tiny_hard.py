"""Build `embedded-hard`, the second embedded task, in common/tiny_hard. It takes longer to learn.

    python lab/build_tiny_hard.py [FOLDER]

The first task (build_tiny.py) is learnt within 25 steps, because its model already knows the good
way to answer and only has to prefer it. All algorithms have similar curves there. This task is for
comparisons. Tokenizer, model size and training are the same, and the problems are sums again. Four
things differ:

- **Three classes of difficulty**, in the column `difficulty`: easy sums have 2 terms, medium ones 3
  or 4, hard ones 6 to 8. No sum has 5, which keeps medium and hard apart. In both lists an eighth
  of the problems is easy, three eighths are medium, and half are hard. The model solves them with
  probabilities near 0.9, 0.5 and 0.1, so most of what can be learnt is hard.
- **A careless teacher.** The model learns from answers in which one step in ten is off by 1 or 2,
  and the next step continues from the wrong total. So a wrong step looks like a right one, and the
  model has learnt to make mistakes. Reinforcement learning has to teach it care in each step of
  every sum, and that takes hundreds of optimizer steps.
- **Repeated lines.** One line in five appears twice, which neither helps nor hurts. So the length
  of an answer is free to drift, which shows what the averages of an algorithm do to it.
- **Straight answers** (the last line alone) for none of the easy sums, a fifth of the medium and
  three tenths of the hard ones. They are short and usually wrong, so there is a second way here
  too, but it decides less.

The answers in the lists are right and repeat no line; only supervised training shows careless ones.
It draws fresh problems throughout, and never one of test.jsonl. Of the 126 possible sums of two
terms 80 are in the lists. The lists are disjoint, with 512 and 128 problems: a run of 80 steps with
32 prompts sees each problem five times, and its evaluation takes seconds.

This takes about three minutes on one core. The same machine writes the same bytes each time;
another processor rounds differently and ends with other weights.

Measured on test.jsonl with 32 samples per problem at temperature 1 (`straight`: the share of
straight answers, and how many of them are right):

    class     pass@1   in steps   straight          tokens   longest
    easy      0.87     0.87       0.01, 0.00 right    15.4        31
    medium    0.47     0.55       0.24, 0.19 right    21.8        52
    hard      0.11     0.12       0.33, 0.09 right    40.4        95
    all       0.34     0.41       0.26, 0.13 right    30.3        95

Each easy problem was solved by at least 24 of its 32 samples, each medium one by 7 to 24, each hard
one by at most 11, and an eighth of the hard ones by none or one. A line is repeated in 0.15, 0.34
and 0.49 of the answers in steps of the three classes. No answer is truncated at 128 tokens.
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
SLIP = 0.1  # share of the teacher's steps that are off by 1 or 2
TWICE = 0.2  # share of its lines that are repeated


@dataclass
class Difficulty:
    terms: tuple  # fewest and most
    share: float  # of the problems
    straight: float  # share of straight answers that the model learns from


CLASSES = {
    "easy": Difficulty(terms=(2, 2), share=0.125, straight=0.0),
    "medium": Difficulty(terms=(3, 4), share=0.375, straight=0.2),
    "hard": Difficulty(terms=(6, 8), share=0.5, straight=0.3),
}


def make_lists(rng):
    """Return two disjoint lists, training and test, with the same share of each class."""
    seen = set()
    test = make_list(rng, TEST_PROBLEMS, seen)
    train = make_list(rng, TRAIN_PROBLEMS, seen)
    return train, test


def make_list(rng, size, seen):
    """Return `size` problems that are not in `seen`, and add them to it."""
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
    """Return an answer in steps by a teacher who slips, and who repeats some lines."""
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
    """Return token ids and labels of fresh problems, answered carelessly in steps or straight."""
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
    torch.set_num_threads(1)  # several threads may add up in another order each time
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
