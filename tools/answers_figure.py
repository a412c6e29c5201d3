"""Draws answers along a run: python tools/answers_figure.py RUN [-o docs/figures/answers.png]

RUN is the folder of a run that evaluated at the steps of the picture, as

    python grpo.py --eval_every 1 --output_dir runs/answers

does. A column is a step, a row the same sample of one evaluation prompt: an evaluation draws the same
random numbers each time, so that a row changes only where the model does.
"""

import argparse
import json
import pathlib
import sys

import matplotlib

from tree import ROOT

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = (0, 1, 2, 4, 8, 50)
PROMPT = 1  # of the four whose answers an evaluation writes
ANSWERS = 4  # of eight
RIGHT = ("✓", "#e3f4e8", "#1a9850")  # mark, fill, ink
WRONG = ("✗", "#fbe6e4", "#d73027")
GREY = "#666666"
LEFT = 0.2  # in inches, as all sizes
TOP = 1.3
CELL_WIDTH = 1.75
CELL_HEIGHT = 0.86


def rows_of(file):
    """The rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def answers_of(folder, steps, number):
    """The prompt with this number among those of an evaluation, and {step: its rows of samples.jsonl}."""
    rows = [row for row in rows_of(folder / "samples.jsonl") if row.get("evaluation")]
    prompt = list(dict.fromkeys(row["prompt"] for row in rows))[number]
    found = {step: [] for step in steps}
    for row in rows:
        if row["prompt"] == prompt and row["step"] in found:
            found[row["step"]].append(row)
    missing = ", ".join(str(step) for step in steps if not found[step])
    if missing:
        sys.exit(f"answers_figure.py: {folder} has no evaluation at step {missing}: --eval_every 1")
    return prompt, found


def draw_answer(axis, x, y, row):
    """A row of samples.jsonl in a box with this upper left corner."""
    mark, fill, ink = RIGHT if row["reward"] == 1 else WRONG
    size = CELL_WIDTH - 0.08, CELL_HEIGHT - 0.08
    axis.add_patch(plt.Rectangle((x, y), *size, facecolor=fill, edgecolor="none"))
    middle = y + size[1] / 2
    axis.text(x + 0.12, middle, row["completion"], family="monospace", fontsize=10.5, va="center")
    axis.text(x + size[0] - 0.17, middle, mark, color=ink, fontsize=15, ha="center", va="center")


def draw(prompt, answers, scores, count):
    """`answers` {step: rows of samples.jsonl}, of which `count` are drawn; `scores` {step: pass@1}."""
    width = 2 * LEFT + CELL_WIDTH * len(answers)
    height = TOP + CELL_HEIGHT * count + 0.4
    figure = plt.figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    axis.text(LEFT, 0.3, f"What the model answers to {prompt}", fontsize=17, fontweight="bold", va="center")
    for i, (step, rows) in enumerate(answers.items()):
        x = LEFT + CELL_WIDTH * i
        axis.text(x + 0.03, 0.8, f"step {step}", fontsize=13, fontweight="bold", va="center")
        axis.text(x + 0.03, 1.07, f"held-out pass@1 {scores[step]:.2f}", fontsize=10, color=GREY, va="center")
        for j, row in enumerate(rows[:count]):
            draw_answer(axis, x, TOP + CELL_HEIGHT * j, row)
    words = "A row keeps its random numbers in all evaluations: its answer changes where the model does."
    axis.text(LEFT, height - 0.22, words, fontsize=10, color=GREY, va="center")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    parser.add_argument("-o", "--output", default=ROOT / "docs" / "figures" / "answers.png", metavar="FILE")
    args = parser.parse_args()
    try:
        prompt, answers = answers_of(args.run, STEPS, PROMPT)
        metrics = rows_of(args.run / "metrics.jsonl")
        scores = {row["step"]: row["eval/pass@1"] for row in metrics if "eval/pass@1" in row}
        figure = draw(prompt, answers, scores, ANSWERS)
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"answers_figure.py: {args.run} is not the folder of such a run: {error}")
    figure.savefig(args.output, dpi=150, metadata={"Software": None})
    print(f"{args.output}: {prompt}")


if __name__ == "__main__":
    main()
