"""GSM8K with a 0.5B chat model: the data of registered_gsm8k.json, and the numbers of the runs.

python lab/gsm8k.py data GSM8K        # runs/gsm8k: train, test and rest.jsonl, from GSM8K/
python lab/make_runs.py registered_gsm8k_longer.json
python lab/gsm8k.py                   # every number of the section in docs/results.md
"""

import argparse
import json
import pathlib
import random

import numpy as np

import registry
import unpack

FOLDER = registry.HERE.parent / "runs" / "gsm8k"
T_95 = 4.303  # Student's t for three values


# --- the data ---


def write_data(source):
    """Write the problems of GSM8K that the plan names, behind its examples, as conversations.

    rest.jsonl has the problems of the test file that the plan does not draw.
    """
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
            chosen = set(generator.sample(range(len(rows)), plan["test_problems"]))
            write_problems("rest", [row for i, row in enumerate(rows) if i not in chosen], turns)
            rows = [row for i, row in enumerate(rows) if i in chosen]
        write_problems(split, rows, turns)


def write_problems(name, rows, turns):
    """Write problems behind the example `turns` to runs/gsm8k/NAME.jsonl."""
    with open(FOLDER / f"{name}.jsonl", "w", encoding="utf-8") as file:
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
    """Return the rows of the page's table, one for each run that has finished.

    A sampled metric is the mean of the first quarter of a run's steps, and of the last.
    """
    lines = []
    for run, seed in registration.jobs():
        if not registration.counts(run, seed):
            continue
        rows = registration.rows(run, seed)
        scores = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
        cells = [f"`{run}.py`", str(seed), ", ".join(f"{score:.2f}" for score in scores)]
        for name in SAMPLED:
            cell = "-"  # ppo.py has no groups
            if name in rows[-1]:
                before, after = first_and_last(rows, name, rows[-1]["step"] // 4)
                cell = f"{rounded(before)} → {rounded(after)}"
            cells.append(cell)
        seconds = sum(
            row.get(name, 0) for row in rows for name in ("time/rollout_s", "time/update_s")
        )
        lines.append(f"| {' | '.join(cells)} | {seconds / 3600:.2f} |")
    return lines


def gains(registration, window):
    """Return the gains of grpo.py, greedy and sampled, each with its interval, as text.

    The sampled one is between the means of the first and the last `window` steps.
    """
    greedy, sampled = [], []
    for seed in (0, 1, 2):
        rows = registration.rows("grpo", seed)
        scores = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
        before, after = first_and_last(rows, "reward/accuracy", window)
        greedy.append(scores[-1] - scores[0])
        sampled.append(after - before)
    return interval(greedy), interval(sampled)


def greedy(pack):
    """Return the greedy accuracies in a pack of evaluations: before, and after each seed."""
    runs = unpack.runs(unpack.RESULTS / pack)
    names = ("base", "grpo-seed0", "grpo-seed1", "grpo-seed2")
    return [runs[f"{name}.jsonl"][1]["eval/pass@1"] for name in names]


def with_interval(accuracy, problems=340):
    """Return an accuracy with its 95 % interval over the problems, as text."""
    half = 1.96 * np.sqrt(accuracy * (1 - accuracy) / problems)
    return f"{accuracy:.3f} ({accuracy - half:.3f} to {accuracy + half:.3f})"


def first_and_last(rows, metric, window):
    """Return the means of a metric over the first and over the last `window` steps."""
    values = [row[metric] for row in rows if row["step"] > 0]
    return np.mean(values[:window]), np.mean(values[-window:])


def rounded(value):
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def interval(values):
    """Return the mean of three values with its 95 % interval, as text."""
    mean = np.mean(values)
    half = T_95 * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["data", "print"], default="print")
    parser.add_argument("source", nargs="?", type=pathlib.Path)
    args = parser.parse_args()
    if args.action == "data":
        if args.source is None:
            parser.error("data needs the folder of GSM8K")
        write_data(args.source)
    else:
        longer = registry.Registration(registry.GSM8K_LONGER)
        print("\n".join(table(longer)))
        short = registry.Registration(registry.GSM8K)
        print("gains at step 16, greedy and sampled:", *gains(short, 5))
        print("gains at step 32, greedy and sampled:", *gains(longer, 8))
        print("with 640 tokens, before and of each seed after:", *greedy("gsm8k_640.jsonl"))
        rest = map(with_interval, greedy("gsm8k_rest.jsonl"))
        print("on the other 340 problems, before and of each seed after:", *rest)


if __name__ == "__main__":
    main()
