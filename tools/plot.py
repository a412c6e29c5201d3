"""Plot the metrics of runs: python tools/plot.py RUN [RUN ...] [-o picture.png] [--metrics NAME ...]

RUN is the folder of a run of any script, finished or not, or a metrics.jsonl. The picture of one run is
written into its folder as metrics.png; for several runs name it with -o. It needs matplotlib.

Reward and held-out result get large panels, other metrics that change get small ones, also those that
only your script logs. A metric that is flat, or repeats a curve, is named below the panels instead. If
a run's --reward does not include `accuracy`, an accuracy or pass@1 of 0 is left out: the rule may find
none of the answers.

    python tools/plot.py runs/a --metrics eval/pass@1 'value/*'    plots only these

Several runs are named by the part of their paths that differs, and the title lists the options that
differ. Runs whose folders differ only in `-seedN`, or in the time of a default folder, are seeds of one
run if no option but --seed differs: thin lines and their range in one color, and a thick line for the
mean; from 100 steps on the thick line is a running mean. Next to dapo.py, which scales rewards
differently, accuracy replaces reward. dcpo.py scores -1 without an answer, where others score 0.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import json
import math
import pathlib
import re
import sys
import textwrap

import numpy as np

PANELS = {  # {name or pattern of a metric: title}, in this order
    "reward/mean": "reward",
    "eval/pass@1": "held-out pass@1",
    "eval/reward": "held-out reward",
    "rewards/accuracy": "pairs in the right order",
    "eval/accuracy": "held-out pairs in the right order",
    "reward/accuracy": "accuracy in training",
    "reward_terms/*": "reward term",
    "logged/*": "logged",
    "eval/logged/*": "logged, held-out",
    "completion/length": "tokens per completion",
    "completion/truncated": "share truncated",
    "completion/unique": "share of distinct completions",
    "advantage/zero_groups": "share of groups of equal rewards",
    "sampling/keep_rate": "share of groups kept",
    "sampling/rounds": "rounds of sampling",
    "sampling/surplus": "groups kept but not used",
    "sampling/short": "steps with too few groups",
    "overlong/penalty": "overlong penalty",
    "policy/entropy": "entropy (nats per token)",
    "policy/approx_kl": "KL to the old policy",
    "policy/kl_old_new": "KL, old to new policy",
    "policy/kl_ref": "KL to the reference, in the loss",
    "policy/kl_old_ref": "KL to the reference",
    "policy/clip_fraction_low": "share clipped below",
    "policy/clip_fraction_high": "share clipped above",
    "policy/token_clip_ratio": "share of tokens clipped",
    "policy/log_s": "size of a completion's log-ratio",
    "policy/ratio_max": "largest ratio",
    "rewards/margin": "margin of the pairs",
    "eval/loss": "loss on held-out pairs",
    "logps/chosen": "log-prob of the chosen",
    "logps/rejected": "log-prob of the rejected",
    "value/explained_variance": "variance the critic explains",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/critic_grad_norm": "gradient norm of the critic",
}
# These are plotted only by --metrics. What is in neither list, a fork logs, and it is plotted.
UNPLOTTED = """eval/pass@[!1]* eval/pass@1?* eval/length eval/margin reward/std reward/shaped reward/unscored
rewards/chosen rewards/rejected completion/length_* policy/mean_prob policy/dual_clip policy/bound_*
value/loss value/clip value/mean dcpo/* optim/loss optim/lr optim/critic_lr time/*""".split()
# The first metric of each list that is logged gets a large panel.
LARGE = [
    ["reward/mean", "rewards/accuracy", "reward/accuracy"],
    ["eval/pass@1", "eval/reward", "eval/accuracy"],
]
# dapo.py rewards right answers with 1 and wrong ones with -1.
OF_DAPO = ["reward/mean", "reward_terms/accuracy", "eval/reward"]
BY_RULE = {"reward/accuracy", "eval/pass@1"}
FLAT = 1e-6  # rounding in float32 moves a metric by less
GREY = "#666666"
WIDTH, LARGE_HEIGHT, SMALL_HEIGHT = 11, 3.4, 2.1  # inches
NO_SETTING = (
    "output_dir",
    "resume",
    "seed",
    "script",
    "save_every",
    "save_total_limit",
    "report_to",
)


class PlotError(Exception):
    """Raised for what cannot be plotted, with a one-line message."""


@dataclasses.dataclass
class Run:
    """The rows of a metrics.jsonl, and the options of its run."""

    name: str  # seeds of one setting share it
    options: dict  # args.json; {} if there is none
    rows: list

    def curve(self, metric):
        """Return {step: value} of a metric where it is a finite number."""
        points = {row["step"]: row.get(metric) for row in self.rows}
        return {s: x for s, x in points.items() if isinstance(x, int | float) and math.isfinite(x)}


# --- reading ---


def metric_files(names):
    """Return the metrics.jsonl of each run, once."""
    paths = [pathlib.Path(name) for name in names]
    for path in paths:
        if path.is_dir() and not (path / "metrics.jsonl").is_file():
            runs = sorted(file.parent.name for file in path.glob("*/metrics.jsonl"))
            raise PlotError(f"{path} has no metrics.jsonl; runs in it: {', '.join(runs) or 'none'}")
    return list(dict.fromkeys(path / "metrics.jsonl" if path.is_dir() else path for path in paths))


def run_names(files, pattern=r"-seed\d+$|-\d{8}-\d{6}-\d{6}$"):
    """Return the names of runs: the parts of their paths that differ, without what matches.

    curr/r1, loo/r1 -> curr, loo        runs/a-seed0, runs/a-seed1 -> a, a
    """
    names = []
    for file in files:
        path = file.parent if file.name == "metrics.jsonl" else file.with_suffix("")
        names.append([re.sub(pattern, "", part) for part in path.resolve().parts])
    for end in (0, -1):
        while min(map(len, names)) > 1 and len({name[end] for name in names}) == 1:
            for name in names:
                name.pop(end)
    return ["/".join(name) for name in names]


def read_run(file, name):
    """Return the `Run` of a file; skip a row that is still being written."""
    options = {}
    if file.name == "metrics.jsonl" and file.with_name("args.json").is_file():
        options = json.loads(file.with_name("args.json").read_text(encoding="utf-8"))
    text = file.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    rows = [row for row in rows if "step" in row]
    if options and "accuracy" not in options.get("reward", ()):
        empty = {metric for metric in BY_RULE if not any(row.get(metric) for row in rows)}
        rows = [{name: x for name, x in row.items() if name not in empty} for row in rows]
    return Run(name, options, rows)


def read_runs(files):
    runs = []
    for file, name in zip(files, run_names(files), strict=True):
        try:
            runs.append(read_run(file, name))
        except (ValueError, TypeError, AttributeError):
            raise PlotError(f"{file} is not the metrics.jsonl of a run") from None
    mixed = {
        a.name for a, b in itertools.combinations(runs, 2) if a.name == b.name and not seeds(a, b)
    }
    for run, name in zip(runs, run_names(files, "$"), strict=True):
        run.name = name if run.name in mixed else run.name
    return runs


def seeds(a, b):
    """Return whether two runs differ in --seed alone; without an args.json their folders tell."""
    one, other = ({k: v for k, v in run.options.items() if k not in NO_SETTING} for run in (a, b))
    return one == other and (not one or a.options.get("seed") != b.options.get("seed"))


# --- choosing ---


def logged(runs, patterns):
    """Return the metrics of the runs that match a pattern, in the order of the patterns."""
    names = {name: None for run in runs for row in run.rows for name in row if name != "step"}
    chosen = []
    for pattern in patterns:
        chosen += [pattern] if pattern in names else fnmatch.filter(names, pattern)
    return list(dict.fromkeys(chosen))


def other_scale(runs, metrics):
    """Return the metrics that are not comparable between runs, if accuracy can replace them."""
    filters = [bool(run.curve("sampling/keep_rate")) for run in runs]
    if all(filters) or not any(filters) or "reward/accuracy" not in metrics:
        return []
    return [metric for metric in OF_DAPO if metric in metrics]


def choose(runs):
    """Return the metrics for large panels, the metrics for small panels, and a note on the rest."""
    unplotted = logged(runs, UNPLOTTED)
    metrics = [name for name in logged(runs, [*PANELS, "*"]) if name not in unplotted]
    left_out = other_scale(runs, metrics)
    metrics = [metric for metric in metrics if metric not in left_out]
    large = []
    for names in LARGE:
        large += [name for name in names if name in metrics][:1]
    plotted = {}
    flat = []
    repeated = []
    for metric in [*large, *(metric for metric in metrics if metric not in large)]:
        curves = [run.curve(metric) for run in runs]
        values = [value for points in curves for value in points.values()]
        twin = next((name for name in plotted if plotted[name] == curves), None)
        if metric in large or (values and not twin and max(values) - min(values) > FLAT):
            plotted[metric] = curves
        elif twin:
            repeated.append(f"{metric} = {twin}")
        elif values:
            flat.append(f"{metric} {values[0]:.2g}")
    notes = []
    if flat:
        notes.append(f"Flat: {', '.join(flat)}.")
    if repeated:
        notes.append(f"Same curve: {', '.join(repeated)}.")
    if left_out:
        notes.append(f"Not plotted: {', '.join(left_out)}, which dapo.py scales from -1 to 1.")
    return large, [metric for metric in plotted if metric not in large], " ".join(notes)


# --- drawing ---


def pyplot():
    """Return matplotlib.pyplot, imported only once the runs are read."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a name may have dollar signs
    import matplotlib.pyplot

    return matplotlib.pyplot


def differences(runs):
    """Return the options that all runs have and that differ: `kl_coef 0.04 | 0`."""
    options = list({run.name: run.options for run in reversed(runs)}.values())[::-1]
    found = []
    for name in options[0]:
        if name in NO_SETTING or not all(name in own for own in options):
            continue
        values = [own[name] for own in options]
        texts = [" ".join(map(str, x)) if isinstance(x, list) else str(x) for x in values]
        if len(set(texts)) > 1:
            found.append(f"{name} {' | '.join(texts)}")
    return "   ".join(found)


def mean(curves):
    """Return the steps that all curves cover; mean, smallest and largest value at each of them."""
    first = max(min(points) for points in curves)
    last = min(max(points) for points in curves)
    steps = sorted(step for step in set().union(*curves) if first <= step <= last)
    values = [np.interp(steps, list(points), list(points.values())) for points in curves]
    return steps, np.mean(values, axis=0), np.min(values, axis=0), np.max(values, axis=0)


def running_mean(values):
    """Average each value with its neighbors: one on either side per 100 values."""
    reach = len(values) // 100
    return [np.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def panel_title(metric):
    """Return the title in PANELS, with what `*` matches, or the name of the metric."""
    for pattern, title in PANELS.items():
        if fnmatch.fnmatchcase(metric, pattern):
            star = metric.removeprefix(pattern.removesuffix("*"))
            return f"{title}: {star}" if star else title
    return metric


def plot_metric(axis, runs, metric, large):
    """Plot the curves of one metric; runs without it are left out."""
    for i, name in enumerate(dict.fromkeys(run.name for run in runs)):
        color = f"C{i}"
        curves = [points for run in runs if run.name == name and (points := run.curve(metric))]
        for points in curves:
            axis.plot(list(points), list(points.values()), color=color, linewidth=0.7, alpha=0.4)
        steps, values, low, high = mean(curves) if curves else ([], [], [], [])
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        marker = "o" if len(steps) <= 12 else None  # a single point has no line
        style = {"color": color, "linewidth": 2.4 if large else 1.6, "markersize": 4}
        axis.plot(steps, running_mean(values), marker=marker, label=name, **style)
        if large and len(values) > 1 and len({run.name for run in runs}) == 1:
            axis.set_title(f"{values[0]:.3g} → {values[-1]:.3g}", loc="right", color=color, pad=16)
    axis.set_title(panel_title(metric), loc="left", fontsize=13 if large else 9.5, pad=16)
    name = {"fontsize": 8 if large else 7, "color": GREY, "va": "bottom"}
    axis.text(0, 1.02, metric, transform=axis.transAxes, **name)
    low, high = axis.dataLim.intervaly
    if 0 <= low < high / 2:
        axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1, nbins=6)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", color="#e8e8e8")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0, labelsize=10 if large else 8, colors=GREY)


def picture(runs, large, small, notes=""):
    """Return the figure: a row of large panels, rows of small ones, and the notes below."""
    rows = [large] if large else []
    rows += [small[start : start + 4] for start in range(0, len(small), 4)]
    heights = [LARGE_HEIGHT if row is large else SMALL_HEIGHT for row in rows]
    figure = pyplot().figure(figsize=(WIDTH, sum(heights) + 1), layout="constrained")
    grid = figure.add_gridspec(len(rows), 12, height_ratios=heights)
    steps = [row["step"] for run in runs for row in run.rows]
    margin = max(0.5, (max(steps) - min(steps)) / 25)
    for i, row in enumerate(rows):
        width = 12 // len(row) if row is large else 3
        for j, metric in enumerate(row):
            axis = figure.add_subplot(grid[i, j * width : (j + 1) * width])
            plot_metric(axis, runs, metric, row is large)
            axis.set_xlim(min(steps) - margin, max(steps) + margin)
    options = runs[0].options
    title = f"{runs[0].name}, step {max(steps)} of {options.get('max_steps', max(steps))}"
    for name in ("model_name_or_path", "dataset"):
        title += f", {options[name]}" if name in options else ""
    if len(runs) > 1:
        title = "\n".join(textwrap.wrap(differences(runs), 140))
        lines = figure.axes[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside right upper", frameon=False)
    left = {"x": 0.01, "ha": "left", "color": GREY}
    figure.suptitle(title, fontsize=10, **left)
    notes = "\n".join(textwrap.wrap(notes, 180, break_on_hyphens=False))
    figure.supxlabel(notes, fontsize=8, **left)
    return figure


def plot_runs(names, output=None, patterns=None):
    """Plot runs; return a line with the path and the metrics."""
    files = metric_files(names)
    runs = read_runs(files)
    for pattern in patterns or ():
        if not logged(runs, [pattern]):
            raise PlotError(f"no metric {pattern}; there are {', '.join(logged(runs, '*'))}")
    large, small, notes = ([], logged(runs, patterns), "") if patterns else choose(runs)
    if not large + small:
        raise PlotError(f"{', '.join(map(str, files))}: no row has a metric to plot")
    if not output and (len(files) > 1 or files[0].name != "metrics.jsonl"):
        raise PlotError("name the picture with -o picture.png")
    path = pathlib.Path(output) if output else files[0].with_name("metrics.png")
    try:
        figure = picture(runs, large, small, notes)
    except ImportError:
        raise PlotError("matplotlib is not installed: pip install matplotlib") from None
    figure.savefig(path, dpi=160)
    pyplot().close(figure)
    return f"{path}: {', '.join(large + small)}. {notes}".strip()


def main(words=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN")
    add("-o", "--output", metavar="FILE", help="the picture [metrics.png in the folder of the run]")
    add("--metrics", nargs="+", metavar="NAME", help="plot only these; `policy/*` is a pattern")
    args = parser.parse_args(words)
    try:
        print(plot_runs(args.runs, args.output, args.metrics))
    except (PlotError, OSError, ValueError) as error:  # such as an unknown format
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
