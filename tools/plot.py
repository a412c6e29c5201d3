"""Draw runs: python tools/plot.py RUN [RUN ...] [-o picture.png]

RUN is the folder of a run of any script, its metrics.jsonl, or a file that lab/unpack.py gives back. The picture of
one folder is written into it, as metrics.png; for several runs name it with -o. A panel is drawn where a run logs its
metric; accuracy and pass@1 where `accuracy` or `math_verify` is part of its --reward.

A run has the name of its folder, or of its file if that is not metrics.jsonl. Runs whose names differ in `-seedN` alone
are the seeds of one: they are thin lines of one colour, and their mean is the thick one, with the name at its end.
"""

import argparse
import functools
import glob
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import sys

import numpy as np

PANELS = {  # in this order
    "reward/mean": "reward",
    "eval/reward": "held-out reward",
    "rewards/margin": "margin of the pairs",
    "rewards/accuracy": "share of pairs in the right order",
    "eval/accuracy": "the same, of held-out pairs",
    "eval/loss": "loss on held-out pairs",
    "logps/chosen": "log-prob of the chosen completion",
    "logps/rejected": "log-prob of the rejected one",
    "reward/accuracy": "accuracy in training",
    "eval/pass@1": "held-out pass@1",
    "completion/length": "tokens of a completion",
    "policy/entropy": "entropy (nats per token)",
    "policy/approx_kl": "KL to the old policy, per token",
    "policy/kl_old_new": "the same, after the last update",
    "policy/kl_ref": "KL in the loss, per token",
    "policy/kl_old_ref": "KL to the reference, per token",
    "policy/clip_fraction_low": "share of tokens clipped below",
    "policy/clip_fraction_high": "share of tokens clipped above",
    "policy/token_clip_ratio": "share of clipped tokens",
    "policy/ratio_max": "largest ratio",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/critic_grad_norm": "gradient norm of the critic",
    "rollout/logprob_gap": "gap of log-probs",
    "advantage/zero_groups": "share of groups that agree",
    "completion/unique": "distinct completions of a group",
    "completion/truncated": "share of truncated completions",
}
RULES, BY_RULE = {"accuracy", "math_verify"}, {"reward/accuracy", "eval/pass@1"}
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
COLUMNS = 4


class NoRun(Exception):
    """One line for the user."""


@functools.cache
def pyplot():
    """matplotlib.pyplot, loaded where something is drawn: a run that ends needs nothing but `command`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def __getattr__(name):
    if name == "plt":
        return pyplot()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def command(folder):
    """What draws a run, as the run prints it at its end."""
    tool = pathlib.Path(__file__).resolve()
    try:
        tool = pathlib.Path(os.path.relpath(tool))
    except ValueError:  # another drive of Windows
        pass
    return shlex.join(["python", tool.as_posix(), pathlib.Path(folder).as_posix()])


def files_of(names):
    """The files of these runs; a folder is its metrics.jsonl.

    Patterns are expanded, which the shells of Windows leave to the program.
    """
    paths = [pathlib.Path(found) for name in names for found in sorted(glob.glob(str(name))) or [str(name)]]
    return [path / "metrics.jsonl" if path.is_dir() else path for path in paths]


def read(files):
    """{name: [rows of a seed]} of runs, or of files that lab/unpack.py gives back."""
    runs = {}
    for file in files_of(files):
        name = re.sub(r"-seed\d+$", "", file.parent.resolve().name if file.name == "metrics.jsonl" else file.stem)
        text = re.sub(r'"policy/clip_(low|high)":', r'"policy/clip_fraction_\1":', file.read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in text.splitlines()]  # of older results, with today's names
        hidden = set() if rewards_of(file) & RULES else BY_RULE
        kept = [{key: x for key, x in row.items() if key not in hidden} for row in rows if "step" in row]
        runs.setdefault(name, []).append(kept)
    return runs


def rewards_of(file):
    """The parts of the --reward of a run; of a kept file, which has no options beside it, the default's."""
    options = file.parent / "args.json"
    if file.name != "metrics.jsonl" or not options.is_file():
        return RULES
    return set(json.loads(options.read_text(encoding="utf-8")).get("reward", ()))


def draw(axis, runs, metric):
    """The curves of one metric; runs without it are left out."""
    others, ends = itertools.cycle(OTHERS), []
    for name, seeds in runs.items():
        colour = COLOURS.get(name) or next(others)
        curves = [{row["step"]: row[metric] for row in rows if metric in row} for rows in seeds]
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


def logged(runs, metrics):
    """Those of the metrics {name: title} that a run has."""
    names = {name for seeds in runs.values() for rows in seeds for row in rows for name in row}
    return {name: title for name, title in metrics.items() if name in names}


def panels(runs, metrics):
    """A figure, four panels in a row: one for each of the metrics {name: title} that a run has."""
    metrics = logged(runs, metrics)
    columns = min(len(metrics), COLUMNS)
    lines = math.ceil(len(metrics) / columns)
    size = (4.4 * columns, 3.2 * lines)
    figure, places = pyplot().subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for place, metric in zip(places.flat, metrics, strict=False):
        draw(place, runs, metric)
        place.set(title=metrics[metric], xlabel="step")
        place.spines[["top", "right"]].set_visible(False)
    for place in places.flat[len(metrics) :]:
        place.remove()
    return figure


def draw_runs(names, output):
    """Draw runs; the path of the picture and the metrics in it. What cannot be drawn is a NoRun."""
    files, runs = files_of(names), {}
    for file in files:
        if not file.is_file():
            raise NoRun(f"{file} is not there: RUN is the folder of a run")
        try:
            for name, seeds in read([file]).items():
                runs.setdefault(name, []).extend(seeds)
        except (ValueError, TypeError, AttributeError):
            raise NoRun(f"{file} is not the metrics.jsonl of a run") from None
    drawn = {name: f"{title}\n{name}" for name, title in logged(runs, PANELS).items()}
    if not drawn:
        raise NoRun(f"{', '.join(map(str, files))}: no row has a metric that is drawn")
    if not output and (len(files) > 1 or files[0].name != "metrics.jsonl"):
        raise NoRun(f"{len(files)} files, and only the picture of one run has a place: name it with -o picture.png")
    path = pathlib.Path(output) if output else files[0].with_name("metrics.png")
    (name, *others), title = runs, None
    if not others:
        runs, title = {"": runs[name]}, name  # above the panels, in place of beside each curve
    try:
        figure = panels(runs, drawn)
        figure.suptitle(title)
        figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    except ImportError:
        raise NoRun("matplotlib is not installed: pip install matplotlib") from None
    except (OSError, ValueError) as error:  # no such folder, no right to write, an unknown kind of picture
        raise NoRun(f"{path} cannot be written: {' '.join(str(error).split())}") from None
    return path, drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("-o", "--output", metavar="FILE", help="the picture [metrics.png in the folder of the run]")
    args = parser.parse_args()
    try:
        path, drawn = draw_runs(args.runs, args.output)
    except NoRun as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {', '.join(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
