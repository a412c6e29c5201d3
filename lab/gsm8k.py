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

FOLDER = registry.HERE.parent / "runs" / "gsm8k"
T_95 = 4.303  # Student's t for three values


# --- the data ---


def write_data(source):
    """Write the problems of GSM8K that the plan names, behind its examples, as conversations."""
    plan = json.loads(registry.GSM8K.read_text(encoding="utf-8"))
    turns = []
    for question, answer in plan["examples"]:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = (source / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if row["answer"].count("<<") <= plan["most_calculations"]]
        if split == "test":
            generator = random.Random(plan["test_seed"])
            chosen = generator.sample(range(len(rows)), plan["test_problems"])
            rows = [rows[i] for i in sorted(chosen)]
        with open(FOLDER / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                prompt = [*turns, {"role": "user", "content": row["question"]}]
                file.write(json.dumps({"prompt": prompt, "answer": row["answer"]}) + "\n")


# --- the numbers ---

SAMPLED = (
    "reward/accuracy",
    "reward_terms/last_number",
    "completion/length",
    "completion/truncated",
    "policy/entropy",
    "advantage/zero_groups",
)


def table(registration):
    """Return the rows of the page's table, one for each run that has finished, and its gains."""
    end = registration.content["steps"]
    first, last = range(1, 6), range(end - 4, end + 1)
    lines, greedy, sampled = [], [], []
    for run, seed in registration.jobs():
        if not registration.counts(run, seed):
            continue
        rows = registration.rows(run, seed)
        scores = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
        pairs = [(mean_of(rows, name, first), mean_of(rows, name, last)) for name in SAMPLED]
        greedy.append(scores[-1] - scores[0])
        sampled.append(pairs[0][1] - pairs[0][0])
        cells = [str(seed), ", ".join(f"{score:.2f}" for score in scores)]
        cells += [f"{rounded(before)} → {rounded(after)}" for before, after in pairs]
        seconds = sum(
            row.get(name, 0) for row in rows for name in ("time/rollout_s", "time/update_s")
        )
        lines.append(f"| {' | '.join(cells)} | {seconds / 3600:.2f} |")
    return lines, [interval(greedy), interval(sampled)]


def mean_of(rows, metric, steps):
    """Return the mean of a metric over the steps of a range."""
    return np.mean([row[metric] for row in rows if row["step"] in steps])


def rounded(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def interval(gains):
    """Return the mean gain of three runs with its 95 % interval, as text."""
    mean = np.mean(gains)
    half = T_95 * np.std(gains, ddof=1) / np.sqrt(len(gains))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


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
        lines, gains = table(registry.Registration(registry.GSM8K))
        print("\n".join(lines))
        print(f"gain of greedy answers: {gains[0]}\ngain of sampled answers: {gains[1]}")


if __name__ == "__main__":
    main()
