"""Makes what registered runs read besides the project's own data, in runs/lab; a few minutes of one core:

python lab/tasks.py                     the held-out problems of embedded-hard, and what follows
python lab/tasks.py hard-1 hard-301     the hard task built with other seeds: its data, model and held-out problems

Held-out problems are drawn as common/tiny_hard/build.py draws, and none is in train.jsonl or test.jsonl. They are as
many as the task has of easy ones (126 in all, 80 of them in the lists), 512 medium and 1,024 hard ones, so accuracies
are given by class and weighted by the shares of the lists. The untrained model may have met them in its own training,
which drew problems at random, but no reinforcement learning does.

The bases of registered_lead.json have held-out problems of their own each, and those that tune have none of the medium
and hard ones of those that decide. There are 126 easy sums in all, so that easy ones are shared.
"""

import json
import pathlib
import random
import sys

from common.tiny.build import make_problem
from common.tiny_hard import build

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "runs" / "lab"
HELD_OUT = {"easy": 126 - 80, "medium": 512, "hard": 1024}
DRAWN_BY = 1000  # the seed of the held-out problems
BASES = {"hard-1": 1, "hard-2": 2}  # and the seeds of the hard tasks that are not embedded
DECIDING = {f"hard-{seed}": seed for seed in range(301, 313)}  # those of registered_lead.json, and what it tunes on
TUNING = {f"hard-{seed}": seed for seed in range(321, 324)}
BUILT = BASES | DECIDING | TUNING


def questions(folder):
    """The questions of the training and the test list of a task."""
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    return {json.loads(line)["question"] for file in files for line in file.read_text(encoding="utf-8").splitlines()}


def held_out_rows(seen, seed=DRAWN_BY):
    """Problems of each class, all distinct and none of `seen`."""
    rng, rows, seen = random.Random(seed), [], set(seen)
    for name, count in HELD_OUT.items():
        wanted = len(rows) + count
        while len(rows) < wanted:
            question, answer = make_problem(rng, *build.CLASSES[name].terms)
            if question not in seen:
                seen.add(question)
                rows.append({"question": question, "answer": answer, "difficulty": name})
    return rows


def decided_on():
    """The medium and hard held-out problems of all bases of DECIDING, whose lists are drawn before their models."""
    found = set()
    for seed in DECIDING.values():
        lists = {row["question"] for rows in build.make_lists(random.Random(seed)) for row in rows}
        rows = held_out_rows(lists, DRAWN_BY + seed)
        found |= {row["question"] for row in rows if row["difficulty"] != "easy"}
    return found


def write_held_out(task, folder):
    """Write the held-out problems of a task, whose lists are in `folder`."""
    seen, seed = questions(folder), DRAWN_BY + (DECIDING | TUNING).get(task, 0)
    if task in TUNING:
        seen |= decided_on()
    rows = held_out_rows(seen, seed)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"held_out-{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def build_base(task):
    """The hard task built with another seed: other problems, and another model."""
    build.FOLDER, build.SEED = FOLDER / task, BUILT[task]
    build.FOLDER.mkdir(parents=True, exist_ok=True)
    build.main()


if __name__ == "__main__":
    for name in sys.argv[1:] or ["embedded-hard"]:
        if name in BUILT:
            build_base(name)
        write_held_out(name, build.FOLDER)  # the last file: what is there is complete
