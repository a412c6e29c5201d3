"""One of reasoning-gym's hundred generated tasks as data, with its own scorer as the reward.

pip install reasoning-gym==0.1.25
python examples/reasoning_gym_task.py runs/gym chain_sum max_terms=2 min_digits=1 max_digits=2
python grpo.py --config configs/smollm2.yaml --dataset runs/gym \\
    --reward examples/reasoning_gym_task.py:score
"""

import argparse
import json
from pathlib import Path

import yaml

try:
    import reasoning_gym
except ImportError:
    raise SystemExit("pip install reasoning-gym==0.1.25") from None


def score(completions, entry, **columns):
    """Return the scores of the entries' tasks, 0 to 1.

    Most give some of the points to an answer that has words around it.
    """
    entries = [json.loads(text) for text in entry]
    scorers = [
        reasoning_gym.get_score_answer_fn(item["metadata"]["source_dataset"]) for item in entries
    ]
    rows = zip(scorers, completions, entries, strict=True)
    return [scorer(text.strip(), item) for scorer, text, item in rows]


def main(folder, task, *options):
    """Write test.jsonl with 96 rows, and train.jsonl with at most 1,024; `score` reads `entry`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    options = {
        name: yaml.safe_load(value)
        for name, _, value in (option.partition("=") for option in options)
    }
    made = reasoning_gym.create_dataset(task, size=3000, seed=0, **options)
    entries = {entry["question"]: entry for entry in made}  # each question once
    entries = list(entries.values())[:1120]
    for name, part in (("test.jsonl", entries[:96]), ("train.jsonl", entries[96:])):
        rows = [
            {"question": x["question"], "answer": x["answer"], "entry": json.dumps(x)} for x in part
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(folder) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("task")
    parser.add_argument("options", nargs="*", metavar="name=value")
    words = parser.parse_args()
    main(words.folder, words.task, *words.options)
