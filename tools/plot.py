"""Plot the metrics of runs: python tools/plot.py RUN [RUN ...] [-o picture.png] [--metrics NAME ...]

RUN is the folder of a run of any script, finished or not, or a metrics.jsonl. The picture of one run is
written into its folder as metrics.png; for several runs name it with -o. It needs matplotlib.

Reward and held-out result get large panels, the other metrics that move get small ones. A metric that
stays at one value, or repeats a curve, is named below the panels instead. Where `accuracy` is not in the
--reward of a run, an accuracy and a pass@1 of 0 are left out: its rule may find none of the answers.

    python tools/plot.py runs/a --metrics eval/pass@1 'value/*'    plots only these

Several runs are named by their scripts or, if these are equal, by the part of their paths that differs.
The options that differ are listed below the title. Runs whose paths differ in `-seedN` alone are seeds of
one: thin lines of one color, and their mean as a thick one. From 100 steps on the thick line is a running
mean. Beside dapo.py, whose reward has another scale, accuracy takes the place of the reward.
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
    "rollout/logprob_gap": "log-prob gap of the sampler",
}
# The first metric of each list that is logged gets a large panel.
LARGE = [
    ["reward/mean", "rewards/accuracy", "reward/accuracy"],
    ["eval/pass@1", "eval/reward", "eval/accuracy"],
]
# dapo.py rewards right answers with 1 and wrong ones with -1.
OF_DAPO = ["reward/mean", "reward_terms/accuracy", "eval/reward"]
BY_RULE = {"reward/accuracy", "eval/pass@1"}
COLORS = {  # of an algorithm, the same in all pictures
    "grpo": "#1f77b4",
    "dr_grpo": "#2ca02c",
    "dapo": "#d62728",
    "gspo": "#9467bd",
    "dcpo": "#ff7f0e",
    "ppo": "#17becf",
    "dpo": "#7f7f7f",
}
OTHERS = ["#8c564b", "#e377c2", "#bcbd22", "#000000", "#4c9f70", "#a05195", "#f95d6a", "#003f5c"]
FLAT = 1e-6  # rounding in float32 moves a metric by less
GREY = "#666666"
WIDTH, LARGE_HEIGHT, SMALL_HEIGHT = 11, 3.4, 2.1  # inches
LEGEND_COLUMNS = 4
MOST_DIFFERENT = 8  # options below the title
NO_SETTING = ("output_dir", "resume", "seed", "script", "save_every", "report_to", "record_tokens")


class PlotError(Exception):
    """What cannot be plotted, as one line."""


@dataclasses.dataclass
class Run:
    """The rows of a metrics.jsonl, and the options of its run."""

    name: str  # seeds of one setting share it
    options: dict  # args.json; {} if there is none
    rows: list

    @property
    def script(self):
        return self.options.get("script")

    def curve(self, metric):
        """Return {step: value} of a metric where it is a finite number."""
        points = {row["step"]: row.get(metric) for row in self.rows}
        return {s: x for s, x in points.items() if isinstance(x, int | float) and math.isfinite(x)}


# --- reading ---


def metric_files(names):
    """Return the metrics.jsonl of each run, once."""
    paths = map(pathlib.Path, names)
    return list(dict.fromkeys(path / "metrics.jsonl" if path.is_dir() else path for path in paths))


def run_names(files):
    """Return the names of runs: the parts of their paths that differ, without `-seedN`.

    curr/r1, loo/r1 -> curr, loo        runs/a-seed0, runs/a-seed1 -> a, a
    """
    names = []
    for file in files:
        path = file.parent if file.name == "metrics.jsonl" else file.with_suffix("")
        names.append([re.sub(r"-seed\d+$", "", part) for part in path.resolve().parts])
    for end in (0, -1):
        while min(map(len, names)) > 1 and len({name[end] for name in names}) == 1:
            for name in names:
                name.pop(end)
    return ["/".join(name) for name in names]


def read_run(file, name):
    """Return the `Run` of a file; a row that is still being written is left out."""
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
    """Return the runs, under the names of their scripts if each name has a script of its own."""
    runs = []
    for file, name in zip(files, run_names(files), strict=True):
        try:
            runs.append(read_run(file, name))
        except OSError:
            raise PlotError(f"{file} cannot be read: RUN is the folder of a run") from None
        except (ValueError, TypeError, AttributeError):
            raise PlotError(f"{file} is not the metrics.jsonl of a run") from None
    pairs = {(run.name, run.script) for run in runs}
    scripts = {script for _, script in pairs}
    if len(pairs) > 1 and None not in scripts and len(scripts) == len(pairs):
        return [dataclasses.replace(run, name=run.script) for run in runs]
    return runs


# --- choosing ---


def logged(runs, patterns):
    """Return the metrics of the runs that match a pattern, in the order of the patterns."""
    names = {name: None for run in runs for row in run.rows for name in row if name != "step"}
    chosen = []
    for pattern in patterns:
        chosen += [pattern] if pattern in names else fnmatch.filter(names, pattern)
    return list(dict.fromkeys(chosen))


def other_scale(runs, metrics):
    """Return the metrics whose curves would not compare, if an accuracy can take their place."""
    filters = [bool(run.curve("sampling/keep_rate")) for run in runs]
    if all(filters) or not any(filters) or "reward/accuracy" not in metrics:
        return []
    return [metric for metric in OF_DAPO if metric in metrics]


def choose(runs):
    """Return the metrics of large panels, those of small ones, and a note on the others."""
    metrics = logged(runs, PANELS)
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
    matplotlib.rcParams["text.parse_math"] = False  # a run may be called a$b$
    import matplotlib.pyplot

    return matplotlib.pyplot


def default_title(runs):
    """Return script, model and data of the runs, as far as there are no more than three of each."""
    parts = []
    for name, prefix in (("script", ""), ("model_name_or_path", "model "), ("dataset", "data ")):
        values = {}
        for run in runs:
            value = run.options.get(name)
            for each in value if isinstance(value, list) else [value]:
                if each:
                    values["/".join(pathlib.PurePath(each).parts[-2:])] = None
        if 0 < len(values) <= 3:
            parts.append(prefix + ", ".join(values))
    return "  ·  ".join(parts)


def differences(runs):
    """Return the options that differ, in the order of the names: `kl_coef 0.04 | 0`.

    Only options that all runs have are compared.
    """
    options = list({run.name: run.options for run in reversed(runs)}.values())[::-1]
    found = []
    for name in options[0]:
        if name in NO_SETTING or not all(name in own for own in options):
            continue
        values = [own[name] for own in options]
        texts = [" ".join(map(str, x)) if isinstance(x, list) else str(x) for x in values]
        if len(set(texts)) > 1:
            found.append(f"{name} {' | '.join(texts)}")
    more = [f"and {len(found) - MOST_DIFFERENT} more"] if len(found) > MOST_DIFFERENT else []
    return "   ".join(found[:MOST_DIFFERENT] + more)


def colors_of(runs):
    """Return {name: color}; the first run of an algorithm gets the color of the algorithm."""
    own = {}
    for run in runs:
        color = COLORS.get(run.script or run.name)
        if color and run.name not in own and color not in own.values():
            own[run.name] = color
    free = itertools.cycle(x for x in [*COLORS.values(), *OTHERS] if x not in own.values())
    return {name: own.get(name) or next(free) for name in dict.fromkeys(run.name for run in runs)}


def mean(curves):
    """Return the steps that all curves of seeds have reached, and the mean of the curves there."""
    first = max(min(points) for points in curves)
    last = min(max(points) for points in curves)
    steps = sorted(step for step in set().union(*curves) if first <= step <= last)
    values = [np.interp(steps, list(points), list(points.values())) for points in curves]
    return steps, np.mean(values, axis=0)


def running_mean(values):
    """Average each value with its neighbors: one on either side per 100 values."""
    reach = len(values) // 100
    return [np.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def panel_title(metric, runs=()):
    """Return the title in PANELS, with what stands for a star; or the name of the metric."""
    if metric == "reward/mean" and runs and all(run.curve("sampling/keep_rate") for run in runs):
        return "reward of the groups kept"  # dapo.py drops those that are all right or all wrong
    for pattern, title in PANELS.items():
        if fnmatch.fnmatchcase(metric, pattern):
            star = metric.removeprefix(pattern.removesuffix("*"))
            return f"{title}: {star}" if star else title
    return metric


def plot_metric(axis, runs, metric, large):
    """Plot the curves of one metric; runs without it are left out."""
    colors = colors_of(runs)
    for name, color in colors.items():
        curves = [points for run in runs if run.name == name and (points := run.curve(metric))]
        for points in curves:
            axis.plot(list(points), list(points.values()), color=color, linewidth=0.7, alpha=0.4)
        steps, values = mean(curves) if curves else ([], [])
        if steps:  # there are none if one seed ends before another begins
            marker = "o" if len(steps) <= 12 else None  # a single point has no line
            style = {"color": color, "linewidth": 2.4 if large else 1.6, "markersize": 4}
            axis.plot(steps, running_mean(values), marker=marker, **style)
            if large and len(colors) == 1 and len(steps) > 1:
                ends = f"{values[0]:.3g} → {values[-1]:.3g}".replace("-", "−")  # as on the axis
                axis.set_title(ends, loc="right", color=color, fontsize=13, pad=16)
    axis.set_title(panel_title(metric, runs), loc="left", fontsize=13 if large else 9.5, pad=16)
    name = {"fontsize": 8 if large else 7, "color": GREY, "va": "bottom"}
    axis.text(0, 1.02, metric, transform=axis.transAxes, **name)
    low, high = axis.dataLim.intervaly
    is_share = large and 0 <= low <= high <= 1
    if high > 0 and (is_share or 0 <= low < high / 2):  # show the zero
        axis.set_ylim(0, 1.03 if 0.5 < high <= 1 else 1.05 * high)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1, nbins=6)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", color="#e8e8e8")
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#aaaaaa")
    axis.tick_params(length=0, labelsize=10 if large else 8, colors=GREY)


def plot_header(figure, runs, height, title):
    """Write the title, and below it the legend; for a single run how far it is."""
    place = {"x": 0.012, "ha": "left", "va": "top"}
    colors = colors_of(runs)
    title = title or default_title(runs) or ", ".join(colors)
    figure.text(y=1 - 0.12 / height, s=title, fontsize=15, fontweight="bold", **place)
    if len(runs) == 1:
        last, end = runs[0].rows[-1]["step"], runs[0].options.get("max_steps", 0)
        progress = f"step {last} of {end}" if end > last else f"step {last}"
        figure.text(y=1 - 0.45 / height, s=f"{runs[0].name}, {progress}", color=GREY, **place)
        return
    figure.text(y=1 - 0.42 / height, s=differences(runs), color=GREY, fontsize=9, **place)
    lines = []
    for name, color in colors.items():
        seeds = [run.name for run in runs].count(name)
        label = f"{name}, mean of {seeds} seeds" if seeds > 1 else name
        lines.append(pyplot().Line2D([], [], color=color, linewidth=2.4, label=label))
    anchor = 0.005, 1 - (0.62 if differences(runs) else 0.42) / height
    style = {"borderpad": 0, "frameon": False, "labelcolor": "linecolor"}
    legend = {"loc": "upper left", "bbox_to_anchor": anchor, "ncols": LEGEND_COLUMNS}
    figure.legend(handles=lines, **legend, **style)


def picture(runs, large, small, notes="", title=None):
    """Return the figure: the header, a row of large panels, rows of small ones, and the notes."""
    columns = 3 if len(small) in (1, 2, 3, 5, 6, 9) else 4  # leaves few gaps
    if not large:
        columns = min(columns, len(small))
    rows = [(large, LARGE_HEIGHT, len(large))] if large else []
    for start in range(0, len(small), columns):
        rows.append((small[start : start + columns], SMALL_HEIGHT, columns))
    heights = [height for _, height, _ in rows]
    notes = textwrap.wrap(notes, 180, break_on_hyphens=False)
    top = 0.55 + 0.22 * math.ceil(len(colors_of(runs)) / LEGEND_COLUMNS)
    top += 0.2 if len(runs) > 1 and differences(runs) else 0
    bottom = 0.1 + 0.17 * len(notes)
    height = top + sum(heights) + bottom
    figure = pyplot().figure(figsize=(WIDTH, height), layout="constrained")
    area = 0.005, bottom / height, 0.99, 1 - (top + bottom) / height
    figure.get_layout_engine().set(rect=area, hspace=0.07, wspace=0.04)
    grid = figure.add_gridspec(len(rows), 12, height_ratios=heights)
    steps = [row["step"] for run in runs for row in run.rows]
    margin = max(0.5, (max(steps) - min(steps)) / 25)
    for i, (metrics, row_height, columns) in enumerate(rows):
        width = 12 // columns
        for j, metric in enumerate(metrics):
            axis = figure.add_subplot(grid[i, j * width : (j + 1) * width])
            plot_metric(axis, runs, metric, large=row_height == LARGE_HEIGHT)
            axis.set_xlim(min(steps) - margin, max(steps) + margin)
            if not small or metric in small[-columns:]:  # no panel is below
                axis.set_xlabel("step", color=GREY, fontsize=9)
    plot_header(figure, runs, height, title)
    figure.text(0.012, 0.08 / height, "\n".join(notes), fontsize=8, color=GREY, va="bottom")
    return figure


def plot_runs(names, output=None, patterns=None, title=None):
    """Plot runs; return the line that says where and what."""
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
        figure = picture(runs, large, small, notes, title)
        figure.savefig(path, dpi=160)
        pyplot().close(figure)
    except ImportError:
        raise PlotError("matplotlib is not installed: pip install matplotlib") from None
    except (OSError, ValueError) as error:  # no folder, no permission, an unknown format
        raise PlotError(f"{path} cannot be written: {error}") from None
    return f"{path}: {', '.join(large + small)}. {notes}".strip()


def main(words=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN")
    add("-o", "--output", metavar="FILE", help="the picture [metrics.png in the folder of the run]")
    add("--metrics", nargs="+", metavar="NAME", help="plot only these; `policy/*` is a pattern")
    add("--title", metavar="TEXT", help="instead of script, model and data")
    args = parser.parse_args(words)
    try:
        print(plot_runs(args.runs, args.output, args.metrics, args.title))
    except PlotError as error:
        print(f"plot.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
