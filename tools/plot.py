"""Draw runs: python tools/plot.py RUN [RUN ...] [-o picture.png] [--metrics NAME ...] [--watch]

RUN is the folder of a run of any script, finished or not; its metrics.jsonl; or a file that
lab/unpack.py gives back. The picture of one run is written into its folder, as metrics.png; for
several runs name it with -o.

Reward and held-out result are large. Below are the other metrics that move: one that stays at a
value is named with it under the panels, and so is one whose curve is drawn already. Where
`accuracy` is no part of the --reward of a run, an accuracy and a pass@1 of 0 are left out: its rule
may find none of the answers.

    python tools/plot.py runs/a --metrics eval/pass@1 'value/*'    draws just these
    python tools/plot.py runs/a --watch                            draws again with each new row

Several runs are named by their scripts, or where these are equal by the part of their paths that
differs. Under the title stand the options that differ. Runs whose paths differ in `-seedN` alone are
the seeds of one: they are thin lines of one colour, and their mean is the thick one. From 100 steps on
the thick line is a running mean. Beside dapo.py the accuracy is drawn in the place of the reward, which
is of another scale there; --metrics draws that too.
"""

import argparse
import dataclasses
import fnmatch
import functools
import glob
import itertools
import json
import math
import pathlib
import re
import sys
import textwrap
import time

import numpy as np

from piped import end_with_the_reader

PANELS = {  # {name or pattern of a metric: what it is}, in this order
    "reward/mean": "reward",
    "eval/pass@1": "held-out pass@1",
    "eval/reward": "held-out reward",
    "rewards/accuracy": "pairs in the right order",
    "eval/accuracy": "held-out pairs in the right order",
    "reward/accuracy": "accuracy in training",
    "reward_part/*": "part of the reward",
    "logged/*": "logged",
    "eval/logged/*": "logged, held-out",
    "completion/length": "tokens of a completion",
    "completion/truncated": "share truncated",
    "completion/unique": "share of distinct completions",
    "advantage/zero_groups": "share of groups that agree",
    "sampling/keep_rate": "share of groups kept",
    "sampling/rounds": "rounds of sampling",
    "sampling/surplus": "groups kept and not used",
    "sampling/short": "step with too few groups",
    "overlong/penalty": "penalty for overlong ones",
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
    "logps/chosen": "log-prob of the chosen one",
    "logps/rejected": "log-prob of the rejected one",
    "value/explained_variance": "variance the critic explains",
    "optim/grad_norm": "gradient norm before clipping",
    "optim/critic_grad_norm": "gradient norm of the critic",
    "rollout/logprob_gap": "gap of log-probs",
}
# Of each of these lists, the first metric that is there has a large panel.
LARGE = [
    ["reward/mean", "rewards/accuracy", "reward/accuracy"],
    ["eval/pass@1", "eval/reward", "eval/accuracy"],
]
# dapo.py counts right answers as 1 or -1, and the first of these over the groups that it keeps.
OF_DAPO = ["reward/mean", "reward_part/accuracy", "eval/reward"]
BY_RULE = {"reward/accuracy", "eval/pass@1"}
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
FLAT = 1e-6  # A metric that moves less shows the rounding of float32.
GREY = "#666666"
WIDTH = 11  # in inches, as all sizes
LARGE_HEIGHT = 3.4
SMALL_HEIGHT = 2.1
LEGEND_COLUMNS = 4
SECONDS = 5  # between two looks of --watch
MOST_DIFFERENT = 8  # options under the title
# Options that make no other setting.
OF_PLACE = ("output_dir", "resume", "seed", "script", "save_every", "report_to", "record_tokens")


class NoRun(Exception):
    """One line for the user."""


@functools.cache
def pyplot():
    """matplotlib.pyplot, loaded where something is drawn: an error in the runs comes first."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a run may be called a$b$
    import matplotlib.pyplot

    return matplotlib.pyplot


@dataclasses.dataclass
class Run:
    """The rows of a run's metrics.jsonl, and what its folder says of it."""

    name: str  # in the picture; seeds of one setting share it
    options: dict  # of args.json; {} where there is none, as beside a file of lab/unpack.py
    rows: list

    @property
    def script(self):
        """The name of the script, without .py; None where args.json does not say it."""
        return self.options.get("script")

    def curve(self, metric):
        """{step: value} of a metric, where it is a finite number."""
        points = {row["step"]: row.get(metric) for row in self.rows}
        return {
            step: x
            for step, x in points.items()
            if isinstance(x, (int, float)) and math.isfinite(x)
        }


# Reading


def files_of(names):
    """The files of these runs, each once; a folder is its metrics.jsonl.

    Patterns are expanded, which the shells of Windows leave to the program.
    """
    files = []
    for name in map(str, names):
        found = [name] if pathlib.Path(name).exists() else sorted(glob.glob(name)) or [name]
        for path in map(pathlib.Path, found):
            files.append(path / "metrics.jsonl" if path.is_dir() else path)
    return list(dict.fromkeys(files))


def names_of(files):
    """The names of runs: the parts of their paths that differ, without `-seedN`.

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


def read(file, name):
    """A Run. A ValueError, TypeError or AttributeError is a file that is not the metrics of one."""
    options = {}
    if file.name == "metrics.jsonl" and file.with_name("args.json").is_file():
        options = json.loads(file.with_name("args.json").read_text(encoding="utf-8"))
    text = file.read_text(encoding="utf-8", errors="replace")
    text = text[: text.rfind("\n") + 1]  # The run may be writing its next row.
    text = re.sub(
        r'"policy/clip_(low|high)":', r'"policy/clip_fraction_\1":', text
    )  # of older results
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [{printable(name): x for name, x in row.items()} for row in rows if "step" in row]
    if options and "accuracy" not in options.get("reward", ()):
        for metric in BY_RULE:
            if not any(row.get(metric) for row in rows):
                rows = [{name: x for name, x in row.items() if name != metric} for row in rows]
    return Run(name, options, rows)


def printable(text):
    """The text without what UTF-8 cannot write, such as half a character."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_runs(files):
    runs = []
    for file, name in zip(files, names_of(files), strict=True):
        if not file.is_file():
            raise NoRun(f"{file} is not there: RUN is the folder of a run")
        try:
            runs.append(read(file, printable(name)))
        except (ValueError, TypeError, AttributeError):
            raise NoRun(f"{file} is not the metrics.jsonl of a run") from None
    return named_by_script(runs)


def named_by_script(runs):
    """The runs under the names of their scripts, where each name has a script of its own."""
    pairs = {(run.name, run.script) for run in runs}
    scripts = {script for _, script in pairs}
    if len(pairs) > 1 and None not in scripts and len(scripts) == len(pairs):
        return [dataclasses.replace(run, name=run.script) for run in runs]
    return runs


# Choosing


def logged(runs, patterns):
    """The metrics that a run has and a pattern fits, in the order of the patterns."""
    names = {}  # as an ordered set
    for run in runs:
        for row in run.rows:
            names |= dict.fromkeys(row)
    names.pop("step", None)
    chosen = []
    for pattern in patterns:
        chosen += [pattern] if pattern in names else fnmatch.filter(names, pattern)
    return list(dict.fromkeys(chosen))


def of_two_scales(runs, metrics):
    """The metrics that one curve beside the other would compare wrongly, where an accuracy can."""
    dropping = [bool(run.curve("sampling/keep_rate")) for run in runs]
    if all(dropping) or not any(dropping) or "reward/accuracy" not in metrics:
        return []
    return [metric for metric in OF_DAPO if metric in metrics]


def curves_of(runs, metric):
    return [run.curve(metric) for run in runs]


def choose(runs):
    """The metrics of large panels, those of small ones, and a line on what is not drawn."""
    metrics = logged(runs, PANELS)
    left_out = of_two_scales(runs, metrics)
    metrics = [metric for metric in metrics if metric not in left_out]
    large = []
    for names in LARGE:
        large += [name for name in names if name in metrics][:1]
    drawn = {metric: curves_of(runs, metric) for metric in large}
    flat = []
    again = []
    for metric in metrics:
        curves = curves_of(runs, metric)
        values = []
        for points in curves:
            values += points.values()
        twins = [name for name in drawn if drawn[name] == curves]
        if metric in large or not values:
            continue
        if twins:
            again.append(f"{metric} = {twins[0]}")
        elif max(values) - min(values) <= FLAT:
            flat.append(f"{metric} {values[0]:.2g}")
        else:
            drawn[metric] = curves
    notes = []
    if flat:
        notes.append(f"Flat: {', '.join(flat)}.")
    if again:
        notes.append(f"Drawn already: {', '.join(again)}.")
    if left_out:
        why = "right is 1 and wrong -1 in dapo.py, whose reward is of the groups kept"
        notes.append(f"Not drawn: {', '.join(left_out)}, since {why}.")
    return large, [metric for metric in drawn if metric not in large], " ".join(notes)


# Drawing


def at_most_three(values):
    """The different ones of these names and paths, as text; "" where there are more or none."""
    short = {}
    for value in values:
        for path in value if isinstance(value, list) else [value]:
            if path:
                short["/".join(pathlib.PurePath(path).parts[-2:])] = None
    return ", ".join(short) if len(short) <= 3 else ""


def title_of(runs):
    """Script, model and data of the runs, as far as they are known."""
    script = at_most_three(run.script and f"{run.script}.py" for run in runs)
    model = at_most_three(run.options.get("model_name_or_path") for run in runs)
    data = at_most_three(run.options.get("dataset") for run in runs)
    texts = [script, model and f"model {model}", data and f"data {data}"]
    return "  ·  ".join(text for text in texts if text)


def differences(runs):
    """The options that differ between runs under different names: `kl_coef 0.04 | 0`, as the names are.

    Only options that all of them have are compared.
    """
    first = {}
    for run in runs:
        first.setdefault(run.name, run.options)
    options = list(first.values())
    found = []
    for name in options[0]:
        if name in OF_PLACE or not all(name in own for own in options):
            continue
        values = [as_text(own[name]) for own in options]
        if len(set(values)) > 1:
            found.append(f"{name} {' | '.join(values)}")
    shown = found[:MOST_DIFFERENT]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more")
    return "   ".join(shown)


def as_text(value):
    """The value of an option; of a list its parts."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def steps_of(run):
    """How far a run is, for the line below the title."""
    last = run.rows[-1]["step"]
    most = run.options.get("max_steps", 0)
    if last < most:
        return f"step {last} of {most}"
    return "1 step" if last == 1 else f"{last} steps"


def colours(runs):
    """{name: colour}: the first run of an algorithm has the algorithm's, so that all pictures agree."""
    names = dict.fromkeys(run.name for run in runs)
    own = {}
    for run in runs:
        colour = COLOURS.get(run.script or run.name)
        if colour and run.name not in own and colour not in own.values():
            own[run.name] = colour
    free = itertools.cycle(x for x in [*COLOURS.values(), *OTHERS] if x not in own.values())
    return {name: own.get(name) or next(free) for name in names}


def mean(curves):
    """The mean of the curves of seeds, over the steps that all of them have reached."""
    first = max(min(points) for points in curves)
    last = min(max(points) for points in curves)
    steps = sorted(set().union(*curves))
    steps = [step for step in steps if first <= step <= last]
    values = [np.interp(steps, list(points), list(points.values())) for points in curves]
    return steps, np.mean(values, axis=0)


def running_mean(values):
    """The mean of each value and its neighbours: 1 on either side from 100 values on, 2 from 200 on."""
    reach = len(values) // 100
    return [np.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def words_of(metric, runs=()):
    """What a metric of these runs is: the words of PANELS, with what stands for a star; else its name."""
    if metric == "reward/mean" and runs and all(run.curve("sampling/keep_rate") for run in runs):
        return "reward of the groups kept"  # of right and wrong answers, so it stays below the accuracy
    for pattern, words in PANELS.items():
        if fnmatch.fnmatchcase(metric, pattern):
            star = metric.removeprefix(pattern.removesuffix("*"))
            words = f"{words}: {star}" if star else words
            return words + how_sampled(runs) if metric == "eval/pass@1" else words
    return metric


def how_sampled(runs):
    """How the answers of an evaluation were sampled, where that is not from the model as it is."""
    ways = {}  # {name of a run: its way}
    for run in runs:
        temperature = run.options.get("eval_temperature", 1)
        top_p = run.options.get("eval_top_p", 1)
        parts = [f"temperature {temperature:g}"] if temperature != 1 else []
        parts += [f"top-p {top_p:g}"] if top_p != 1 and temperature else []
        ways[run.name] = " and ".join(parts)
    if len(set(ways.values())) == 1:
        (way,) = set(ways.values())
        return f", {way}" if way else ""
    return "".join(f"; {name}: {way}" for name, way in ways.items() if way)


def draw(axis, runs, metric, large):
    """The curves of one metric; runs without it are left out."""
    names = colours(runs)
    for name, colour in names.items():
        curves = curves_of([run for run in runs if run.name == name], metric)
        curves = [points for points in curves if points]
        for points in curves:
            axis.plot(list(points), list(points.values()), color=colour, linewidth=0.7, alpha=0.4)
        steps, values = mean(curves) if curves else ([], [])
        if steps:  # else no run has it, or one ends before another begins
            marker = "o" if len(steps) <= 12 else None  # A single point has no line.
            width = 2.4 if large else 1.6
            look = dict(color=colour, linewidth=width, marker=marker, markersize=4)
            axis.plot(steps, running_mean(values), **look)
            if large and len(names) == 1 and len(steps) > 1:
                ends = f"{values[0]:.3g} → {values[-1]:.3g}".replace("-", "−")  # as on the axis
                axis.set_title(ends, loc="right", color=colour, fontsize=13, pad=16)
    axis.set_title(words_of(metric, runs), loc="left", fontsize=13 if large else 9.5, pad=16)
    axis.text(
        0,
        1.02,
        metric,
        transform=axis.transAxes,
        fontsize=8 if large else 7,
        color=GREY,
        va="bottom",
    )
    style(axis, large)


def style(axis, large):
    """Whole steps, a zero where the curves come near it, and few lines beside the curves."""
    low, high = axis.dataLim.intervaly
    is_share = large and 0 <= low <= high <= 1
    is_near_zero = 0 <= low < high / 2
    if high > 0 and (is_share or is_near_zero):
        axis.set_ylim(0, 1.03 if 0.5 < high <= 1 else 1.05 * high)
    locator = pyplot().MaxNLocator(6, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
    axis.xaxis.set_major_locator(locator)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y", color="#e8e8e8")
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#aaaaaa")
    axis.tick_params(length=0, labelsize=10 if large else 8, colors=GREY)


def header(figure, runs, height, title):
    """Title, and below it the names of the runs, or of a single one how far it is."""
    names = colours(runs)
    place = {"x": 0.012, "ha": "left", "va": "top"}
    title = title or title_of(runs) or ", ".join(names)
    figure.text(y=1 - 0.12 / height, s=title, fontsize=15, fontweight="bold", **place)
    if len(runs) == 1:
        figure.text(
            y=1 - 0.45 / height, s=f"{runs[0].name}, {steps_of(runs[0])}", color=GREY, **place
        )
        return
    figure.text(y=1 - 0.42 / height, s=differences(runs), color=GREY, fontsize=9, **place)
    lines = []
    for name, colour in names.items():
        seeds = [run.name for run in runs].count(name)
        label = f"{name}, mean of {seeds} seeds" if seeds > 1 else name
        lines.append(pyplot().Line2D([], [], color=colour, linewidth=2.4, label=label))
    figure.legend(
        handles=lines,
        ncols=LEGEND_COLUMNS,
        loc="upper left",
        bbox_to_anchor=(0.005, 1 - (0.62 if differences(runs) else 0.42) / height),
        borderpad=0,
        frameon=False,
        labelcolor="linecolor",
    )


def rows_of(large, small):
    """The metrics of each row of panels, and how many panels have room in it."""
    columns = 3 if len(small) in (1, 2, 3, 5, 6, 9) else 4  # which leaves few gaps
    rows = [(large, len(large))] if large else []
    if not large:
        columns = min(columns, len(small))
    for start in range(0, len(small), columns):
        rows.append((small[start : start + columns], columns))
    return rows


def is_lowest(rows, i, j):
    """Whether no panel stands below the panel j of row i. The last row may have gaps on its right."""
    if i == len(rows) - 1:
        return True
    (_, columns), (below, columns_below) = rows[i : i + 2]
    return i == len(rows) - 2 and columns == columns_below and j >= len(below)


def picture(runs, large, small, notes="", title=None):
    """The figure: the header, a row of large panels, rows of small ones, and the notes."""
    rows = rows_of(large, small)
    heights = [LARGE_HEIGHT if metrics == large else SMALL_HEIGHT for metrics, _ in rows]
    notes = textwrap.wrap(notes, 180, break_on_hyphens=False)
    top = 0.55 + 0.22 * math.ceil(len(colours(runs)) / LEGEND_COLUMNS)
    if len(runs) > 1 and differences(runs):
        top += 0.2
    bottom = 0.1 + 0.17 * len(notes)
    height = top + sum(heights) + bottom
    figure = pyplot().figure(figsize=(WIDTH, height), layout="constrained")
    room = 0.005, bottom / height, 0.99, 1 - (top + bottom) / height
    figure.get_layout_engine().set(rect=room, hspace=0.07, wspace=0.04)
    grid = figure.add_gridspec(len(rows), 12, height_ratios=heights)
    steps = []
    for run in runs:
        steps += [row["step"] for row in run.rows]
    margin = max(0.5, (max(steps) - min(steps)) / 25)
    for i, (metrics, columns) in enumerate(rows):
        width = 12 // columns
        for j, metric in enumerate(metrics):
            axis = figure.add_subplot(grid[i, j * width : (j + 1) * width])
            draw(axis, runs, metric, metrics == large)
            axis.set_xlim(min(steps) - margin, max(steps) + margin)
            if is_lowest(rows, i, j):
                axis.set_xlabel("step", color=GREY, fontsize=9)
    header(figure, runs, height, title)
    figure.text(0.012, 0.08 / height, "\n".join(notes), fontsize=8, color=GREY, va="bottom")
    return figure


def draw_runs(names, output=None, patterns=None, title=None):
    """Draw runs; the line that says where and what. What cannot be drawn is a NoRun."""
    files = files_of(names)
    runs = read_runs(files)
    for pattern in patterns or ():
        if not logged(runs, [pattern]):
            raise NoRun(
                f"no row has the metric {pattern}; there are {', '.join(logged(runs, '*'))}"
            )
    large, small, notes = ([], logged(runs, patterns), "") if patterns else choose(runs)
    if not large + small:
        raise NoRun(f"{', '.join(map(str, files))}: no row has a metric that is drawn")
    if not output and (len(files) > 1 or files[0].name != "metrics.jsonl"):
        advice = "only the picture of one run has a place: name it with -o picture.png"
        raise NoRun(f"{len(files)} files, and {advice}")
    path = pathlib.Path(output) if output else files[0].with_name("metrics.png")
    try:
        figure = picture(runs, large, small, notes, title)
        figure.savefig(
            path, dpi=160, metadata={"Software": None} if path.suffix == ".png" else None
        )
        pyplot().close(figure)
    except ImportError:
        raise NoRun("matplotlib is not installed: pip install matplotlib") from None
    except (
        OSError,
        ValueError,
    ) as error:  # no such folder, no right to write, an unknown kind of picture
        raise NoRun(f"{path} cannot be written: {' '.join(str(error).split())}") from None
    return f"{path}: {', '.join(large + small)}. {notes}".strip()


def watch(args):
    """Draw whenever a run has new rows, until Ctrl-C. What cannot be drawn yet is waited for."""
    before = None
    while True:
        files = [file for file in files_of(args.runs) if file.is_file()]
        sizes = [file.stat().st_size for file in files]
        if sizes != before:
            try:
                print(draw_runs(args.runs, args.output, args.metrics, args.title), flush=True)
            except NoRun as error:
                print(f"plot.py: {error}", file=sys.stderr, flush=True)
        before = sizes
        time.sleep(SECONDS)


def main():
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN")
    add("-o", "--output", metavar="FILE", help="the picture [metrics.png in the folder of the run]")
    add("--metrics", nargs="+", metavar="NAME", help="draw these; `policy/*` is all of a kind")
    add("--watch", action="store_true", help="draw again with each new row, until Ctrl-C")
    add("--title", metavar="TEXT", help="in the place of script, model and data")
    args = parser.parse_args()
    try:
        if args.watch:
            watch(args)
        else:
            print(draw_runs(args.runs, args.output, args.metrics, args.title))
    except NoRun as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the end of --watch
        pass
    return 0


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main())
