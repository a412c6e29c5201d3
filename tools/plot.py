"""Draw runs of one or several scripts in one picture: python tools/plot.py runs/*/metrics.jsonl [-o picture.png]

A run has the name of its folder, or of its file if that is not metrics.jsonl. Runs whose names differ in `-seedN` alone
are the seeds of one: they are thin lines of one colour, and their mean is the thick one, with the name at its end.
"""

import argparse
import glob
import itertools
import json
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

PANELS = {
    "reward/accuracy": "accuracy in training",
    "eval/pass@1": "held-out pass@1",
    "completion/length": "tokens of a completion",
    "policy/entropy": "entropy (nats per token)",
}
TITLES = PANELS | {
    "completion/length_incorrect": "tokens of a wrong completion",
    "completion/truncated": "share of truncated completions",
    "value/explained_variance": "explained variance of the critic",
    "reward_part/easy": "accuracy on easy problems",
    "reward_part/medium": "accuracy on medium problems",
    "reward_part/hard": "accuracy on hard problems",
    "policy/clip_fraction_low": "share of tokens clipped below",
    "policy/clip_fraction_high": "share of tokens clipped above",
    "policy/clipped": "clipped share, of tokens (gspo: of rows)",
    "policy/kl_ref": "KL in the loss, per token",
    "sampling/rounds": "sampling rounds of a step",
    "dcpo/response_utilization": "share of completions that train",
    "policy/token_clip_ratio": "share of clipped tokens",
    "reward/mean": "learned reward",
    "logps/chosen": "log-prob of the chosen completion",
    "logps/rejected": "log-prob of the rejected one",
}
COLOURS = {  # the same for an algorithm in all pictures
    "grpo": "#1f77b4",
    "dr_grpo": "#2ca02c",
    "dapo": "#d62728",
    "gspo": "#9467bd",
    "dcpo": "#ff7f0e",
    "ppo": "#17becf",
    "dpo": "#7f7f7f",
}
OTHERS = ["#8c564b", "#e377c2", "#bcbd22", "#000000", "#4c9f70", "#a05195", "#f95d6a", "#003f5c"]


def read(files):
    """{name: [rows of a seed]} of metrics.jsonl files, or of files in lab/results/pages or lab/results/claims.

    Patterns are expanded, which the shells of Windows leave to the program.
    """
    runs = {}
    for file in [pathlib.Path(found) for name in files for found in sorted(glob.glob(str(name))) or [name]]:
        name = re.sub(r"-seed\d+$", "", file.parent.name if file.name == "metrics.jsonl" else file.stem)
        text = re.sub(r'"policy/clip_(low|high)":', r'"policy/clip_fraction_\1":', file.read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in text.splitlines()]  # of older results, with today's names
        runs.setdefault(name, []).append([row for row in rows if "step" in row])
    return runs


def draw(axis, runs, metric, x="step", colours=COLOURS):
    """The curves of one metric; runs without it are left out."""
    others, ends = iter(OTHERS), []
    for name, seeds in runs.items():
        colour = colours.get(name) or next(others)
        curves = [{row[x]: row[metric] for row in rows if metric in row} for rows in seeds]
        curves = [curve for curve in curves if curve]
        for curve in curves:
            few = "." if len(curve) < 10 else None  # evaluations
            axis.plot(list(curve), list(curve.values()), color=colour, linewidth=0.6, alpha=0.5, marker=few)
        if curves:
            places = np.linspace(0, min(max(curve) for curve in curves), 101)
            places = places[places >= max(min(curve) for curve in curves)]
            mean = np.mean([np.interp(places, list(curve), list(curve.values())) for curve in curves], axis=0)
            axis.plot(places, mean, color=colour, linewidth=2)
            if places.size:  # else one ended before another began
                ends.append([mean[-1], places[-1], name, colour])
    label_ends(axis, ends)


def label_ends(axis, ends):
    """The names at the ends of their curves, moved apart where they would lie on each other."""
    low, high = axis.get_ylim()
    gap, heights, ends = (high - low) / 14, [], sorted(ends)
    for y, *_ in ends:
        heights.append(max(y, heights[-1] + gap if heights else low))
    for i in reversed(range(len(ends))):  # what was moved beyond the top comes down
        heights[i] = min(heights[i], heights[i + 1] - gap if i + 1 < len(ends) else high)
    for (y, x, name, colour), height in zip(ends, heights, strict=True):
        axis.annotate(name, (x, y), (axis.get_xlim()[1], height), color=colour, fontsize=8, va="center")


def panels(runs, metrics, axes=("step",)):
    """A figure with a panel for each of the metrics {name: title} that a run has, over each of `axes`."""
    logged = {name for seeds in runs.values() for rows in seeds for row in rows for name in row}
    metrics = {name: title for name, title in metrics.items() if name in logged}
    count = len(metrics) * len(axes)
    figure, places = plt.subplots(1, count, figsize=(4.4 * count, 3.2), squeeze=False, layout="constrained")
    for place, (x, metric) in zip(places[0], itertools.product(axes, metrics), strict=True):
        draw(place, runs, metric, x)
        place.set(title=metrics[metric], xlabel={"step": "step", "completions": "sampled completions"}[x])
        place.spines[["top", "right"]].set_visible(False)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--output", default="metrics.png")
    args = parser.parse_args()
    panels(read(args.files), PANELS).savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
