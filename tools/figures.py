"""Draws a figure of a run of grpo.py: python tools/figures.py step|answers RUN [-o FILE]

step: the first step, from tokens.jsonl. It shows the answers to one prompt, their rewards and
advantages, and what the update did to each token.
answers: a column for each of six steps, a row for the same sample of one evaluation prompt, from
samples.jsonl. An evaluation draws the same random numbers each time, so that a row changes only where
the model does. RUN needs evaluations at these steps, as `python grpo.py --eval_every 1` makes them.
"""

import argparse
import json
import math
import pathlib
import sys

import matplotlib

from look import NoRun, read_rows

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

# All sizes and places are in inches, from the upper left corner.
UP = "#1f6fc4"  # blue and red as on the page of tools/look.py
DOWN = "#d73027"
GREY = "#666666"
LINE = "#c8c8c8"

WIDTH = 12.35
TOP = 1.45  # of the answers
ROW = 0.4  # height of an answer
CELL = 0.2  # width of a token
LEFT = 1.75  # of the answers
MOST_TOKENS = 29  # of an answer, for which there is room
REWARD = 8.05
ADVANTAGE = 9.6
UPDATE = 10.75

STEPS = (0, 1, 2, 4, 8, 50)
PROMPT = 1  # of the four whose answers an evaluation writes
ANSWERS = 4  # of eight
MARGIN = 0.2
COLUMN_WIDTH = 1.75
COLUMN_TOP = 1.3
ANSWER_HEIGHT = 0.86
RIGHT = "#1a9850"
RIGHT_FILL = "#e3f4e8"
WRONG_FILL = "#fbe6e4"


def canvas(width, height):
    """A figure, and an axis of its size without ticks."""
    figure = plt.figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axis.axis("off")
    return figure, axis


def box(axis, x, y, width, height, **look):
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.04", **look)
    axis.add_patch(shape)


def write(axis, x, y, text, size, align="left", **look):
    axis.text(x, y, text, fontsize=size, ha=align, va="center", **look)


# --- one step ---


def colour(change, most):
    """White for no change of a log-prob, blue for one upwards, red for one downwards."""
    strength = min(1.0, abs(change) / most) ** 0.5  # A small change is seen too.
    goal = matplotlib.colors.to_rgb(UP if change > 0 else DOWN)
    return [1 - 0.75 * strength * (1 - part) for part in goal]


def visible(token):
    return {"\n": "↵", "<eos>": "■"}.get(token, token)


def draw_tokens(axis, row, y, most):
    """The tokens of an answer, coloured by the change of their log-probs; `most` has the full colour."""
    changes = row["change"][:MOST_TOKENS]
    for i, (token, change) in enumerate(zip(row["tokens"], changes, strict=False)):
        x = LEFT + i * CELL
        fill = colour(change, most)
        box(axis, x, y - 0.15, CELL - 0.02, 0.3, facecolor=fill, edgecolor="#dddddd", linewidth=0.6)
        write(axis, x + CELL / 2 - 0.01, y, visible(token), 11.5, "center", family="monospace")


def draw_numbers(axis, row, y):
    """Reward, advantage as a bar, and the probability of the token that changes most, before and after."""
    advantage = row["advantage"]
    ink = UP if advantage > 0 else DOWN
    write(axis, REWARD, y, f"{row['reward']:.0f}", 13, "center", fontweight="bold", color=ink)
    bar = 0.36 * advantage
    box(axis, ADVANTAGE + min(bar, 0), y - 0.11, abs(bar), 0.22, facecolor=ink, edgecolor="none")
    side, align = (-0.08, "right") if bar > 0 else (0.08, "left")
    write(axis, ADVANTAGE + side, y, f"{advantage:+.2f}", 11.5, align, color=ink)
    sizes = [abs(change) for change in row["change"]]
    place = sizes.index(max(sizes))
    old = math.exp(row["logprob"][place])
    new = math.exp(row["logprob"][place] + row["change"][place])
    write(axis, UPDATE + 0.1, y, visible(row["tokens"][place]), 12, "center", family="monospace")
    write(axis, UPDATE + 0.35, y, f"{old:.2f} → {new:.2f}", 11.5, color=ink)


def draw_heads(axis, rows):
    mean = sum(row["reward"] for row in rows) / len(rows)
    key = "↵ new line, ■ end; coloured by what 5 does to a token"
    heads = [
        (0.2, "1  Ask", "a prompt"),
        (LEFT, f"2  Sample {len(rows)} answers", key),
        (REWARD - 0.3, "3  Reward", f"mean {mean:.3g}"),
        (ADVANTAGE - 0.55, "4  Compare", "(reward − mean) / std"),
        (UPDATE, "5  Update", "a token's probability"),
    ]
    write(axis, 0.2, 0.3, "One step of GRPO", 18, fontweight="bold")
    for x, title, words in heads:
        write(axis, x, 0.78, title, 13.5, fontweight="bold")
        write(axis, x, 1.05, words, 10, color=GREY)


def step_figure(run):
    args = json.loads((run / "args.json").read_text(encoding="utf-8"))
    rows = [row for row in read_rows(run / "tokens.jsonl") if row["step"] == 1]
    bottom = TOP + ROW * len(rows)
    height = bottom + 0.65
    figure, axis = canvas(WIDTH, height)
    draw_heads(axis, rows)
    middle = (TOP + bottom - ROW) / 2
    box(axis, 0.2, middle - 0.25, 1.1, 0.5, facecolor="#eef3fb", edgecolor="#7da0d0")
    write(axis, 0.75, middle, rows[0]["prompt"], 13, "center", family="monospace")
    most = max(max(map(abs, row["change"])) for row in rows)
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        axis.plot([1.31, LEFT - 0.06], [middle, y], color=LINE, linewidth=1)
        draw_tokens(axis, row, y, most)
        draw_numbers(axis, row, y)
    axis.plot([ADVANTAGE, ADVANTAGE], [TOP - 0.2, bottom - 0.24], color=LINE, linewidth=1)
    prompts = args["prompts_per_step"]
    answers = prompts * args["group_size"]
    lesson = "Answers above the mean of their group become more likely, answers below it less likely."
    source = (
        f"Real numbers: the first step of grpo.py --seed {args['seed']}, one of its {prompts} prompts. "
        f"All {answers} answers make one update, so some tokens of wrong answers rise too."
    )
    write(axis, 0.2, height - 0.55, lesson, 13)
    write(axis, 0.2, height - 0.22, source, 10, color=GREY)
    return figure


# --- answers along a run ---


def answers_of(samples, steps, number):
    """The prompt with this number among those of an evaluation, and {step: its rows of samples.jsonl}."""
    rows = [row for row in samples if row.get("evaluation")]
    prompt = list(dict.fromkeys(row["prompt"] for row in rows))[number]
    found = {step: [] for step in steps}
    for row in rows:
        if row["prompt"] == prompt and row["step"] in found:
            found[row["step"]].append(row)
    missing = ", ".join(str(step) for step in steps if not found[step])
    if missing:
        sys.exit(f"figures.py: the run has no evaluation at step {missing}: --eval_every 1")
    return prompt, found


def draw_answer(axis, x, y, row):
    """A row of samples.jsonl in a box with this upper left corner."""
    is_right = row["reward"] == 1
    width = COLUMN_WIDTH - 0.08
    height = ANSWER_HEIGHT - 0.08
    fill = RIGHT_FILL if is_right else WRONG_FILL
    axis.add_patch(plt.Rectangle((x, y), width, height, facecolor=fill, edgecolor="none"))
    middle = y + height / 2
    write(axis, x + 0.12, middle, row["completion"], 10.5, family="monospace")
    mark = "✓" if is_right else "✗"
    write(axis, x + width - 0.17, middle, mark, 15, "center", color=RIGHT if is_right else DOWN)


def answers_figure(run):
    prompt, answers = answers_of(read_rows(run / "samples.jsonl"), STEPS, PROMPT)
    metrics = read_rows(run / "metrics.jsonl")
    scores = {row["step"]: row["eval/pass@1"] for row in metrics if "eval/pass@1" in row}
    width = 2 * MARGIN + COLUMN_WIDTH * len(answers)
    height = COLUMN_TOP + ANSWER_HEIGHT * ANSWERS + 0.4
    figure, axis = canvas(width, height)
    write(axis, MARGIN, 0.3, f"What the model answers to {prompt}", 17, fontweight="bold")
    for i, (step, rows) in enumerate(answers.items()):
        x = MARGIN + COLUMN_WIDTH * i
        write(axis, x + 0.03, 0.8, f"step {step}", 13, fontweight="bold")
        write(axis, x + 0.03, 1.07, f"held-out pass@1 {scores[step]:.2f}", 10, color=GREY)
        for j, row in enumerate(rows[:ANSWERS]):
            draw_answer(axis, x, COLUMN_TOP + ANSWER_HEIGHT * j, row)
    words = "A row keeps its random numbers in all evaluations: its answer changes where the model does."
    write(axis, MARGIN, height - 0.22, words, 10, color=GREY)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["step", "answers"])
    parser.add_argument("run", type=pathlib.Path, metavar="RUN")
    parser.add_argument("-o", "--output", metavar="FILE", help="the picture [FIGURE.png]")
    options = parser.parse_args()
    draw = step_figure if options.figure == "step" else answers_figure
    try:
        figure = draw(options.run)
    except (NoRun, OSError, LookupError, TypeError, ValueError) as error:
        sys.exit(f"figures.py: {options.run} is not the folder of such a run: {error}")
    output = options.output or f"{options.figure}.png"
    figure.savefig(output, dpi=150, metadata={"Software": None})
    print(f"written: {output}")


if __name__ == "__main__":
    main()
