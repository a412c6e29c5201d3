"""Makes what registered runs read besides the project's own data, in runs/lab; a few minutes of one core:

python lab/tasks.py                     the held-out problems of embedded-hard, and what follows
python lab/tasks.py hard-1              the hard task built with another seed: its data, model and held-out problems

Held-out problems are drawn as common/tiny_hard/build.py draws, and none is in train.jsonl or test.jsonl. They are as
many as the task has of easy ones (126 in all, 80 of them in the lists), 512 medium and 1,024 hard ones, so accuracies
are given by class and weighted by the shares of the lists. The untrained model may have met them in its own training,
which drew problems at random, but no reinforcement learning does.
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


def questions(folder):
    """The questions of the training and the test list of a task."""
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    return {json.loads(line)["question"] for file in files for line in file.read_text(encoding="utf-8").splitlines()}


def held_out_rows(seen):
    """Problems of each class, all distinct and none of `seen`."""
    rng, rows, seen = random.Random(DRAWN_BY), [], set(seen)
    for name, count in HELD_OUT.items():
        wanted = len(rows) + count
        while len(rows) < wanted:
            question, answer = make_problem(rng, *build.CLASSES[name].terms)
            if question not in seen:
                seen.add(question)
                rows.append({"question": question, "answer": answer, "difficulty": name})
    return rows


def write_held_out(task, folder):
    """Write the held-out problems of a task, whose lists are in `folder`."""
    rows = held_out_rows(questions(folder))
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"held_out-{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


def build_base(task):
    """The hard task built with another seed: other problems, and another model."""
    build.FOLDER, build.SEED = FOLDER / task, BASES[task]
    build.FOLDER.mkdir(parents=True, exist_ok=True)
    build.main()


if __name__ == "__main__":
    for name in sys.argv[1:] or ["embedded-hard"]:
        if name in BASES:
            build_base(name)
        write_held_out(name, build.FOLDER)  # the last file: what is there is complete
