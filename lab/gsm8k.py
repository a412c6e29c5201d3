"""GSM8K with a 0.5B chat model: the data of registered_gsm8k.json, and the numbers of its runs.

python lab/gsm8k.py data GSM8K        # runs/gsm8k/train.jsonl and test.jsonl, from GSM8K/
python lab/make_runs.py registered_gsm8k.json
python lab/gsm8k.py                   # every number of the section in docs/results.md
"""

import argparse
import json
import pathlib
import random

import numpy as np

import registry

PLAN = registry.HERE / "registered_gsm8k.json"
FOLDER = registry.HERE.parent / "runs" / "gsm8k"
T_95 = 4.303  # Student's t for three values


# --- the data ---


def write_data(source):
    """Write the problems of GSM8K that the plan names, behind its examples, as conversations."""
    plan = json.loads(PLAN.read_text(encoding="utf-8"))
    turns = []
    for question, answer in plan["examples"]:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = (source / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if row["answer"].count("<<") <= plan["most_calculations"]]
        if split == "test":
            chosen = random.Random(plan["test_seed"]).sample(
                range(len(rows)), plan["test_problems"]
            )
            rows = [rows[i] for i in sorted(chosen)]
        with open(FOLDER / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                prompt = [*turns, {"role": "user", "content": row["question"]}]
                file.write(json.dumps({"prompt": prompt, "answer": row["answer"]}) + "\n")


# --- the numbers ---


def interval(values):
    """Return the mean of three values with its 95 % interval, as text."""
    mean = np.mean(values)
    half = T_95 * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def mean_of(rows, metric, steps):
    """Return the mean of a metric over the steps of a range."""
    return np.mean([row[metric] for row in rows if row["step"] in steps])


def print_numbers(registration):
    """Print the numbers of the runs that have finished, one after another on a line."""
    jobs = [job for job in registration.jobs() if registration.counts(*job)]
    runs = [registration.rows(*job) for job in jobs]
    print(f"{len(jobs)} of {len(registration.jobs())} runs have finished")
    end = registration.content["steps"]
    first, last = range(1, 6), range(end - 4, end + 1)
    evaluated = [range(step, step + 1) for step in (0, end // 2, end)]
    print_metrics(runs, ["eval/pass@1", "eval/length"], evaluated)
    print_metrics(runs, registration.content["sampled"], [first, last])
    for name, before, after in (
        ("eval/pass@1", evaluated[0], evaluated[-1]),
        ("reward/accuracy", first, last),
    ):
        gains = [mean_of(rows, name, after) - mean_of(rows, name, before) for rows in runs]
        print(f"gain of {name}: {interval(gains)}")
    hours = [
        sum(row.get("time/rollout_s", 0) + row.get("time/update_s", 0) for row in rows) / 3600
        for rows in runs
    ]
    print("hours of steps:", *(f"{value:.2f}" for value in hours))


def print_metrics(runs, metrics, ranges):
    for metric in metrics:
        for steps in ranges:
            values = [f"{mean_of(rows, metric, steps):.3f}" for rows in runs]
            print(f"{metric}, steps {steps[0]} to {steps[-1]}:", *values)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["data", "print"], default="print")
    parser.add_argument("source", nargs="?", type=pathlib.Path)
    args = parser.parse_args()
    if args.action == "data":
        write_data(args.source)
    else:
        print_numbers(registry.Registration(PLAN))


if __name__ == "__main__":
    main()
