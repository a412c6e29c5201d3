"""Draws the figures of docs/claims.md, of what is decided and of the pilot; needs matplotlib."""

import sys
import textwrap

import numpy as np

import pilot
import registry
import report
import texts
from claims import ALL, CLAIMS

sys.path.append(str(registry.ROOT / "tools"))
import plot

SAID_ONCE = "a dot or a thin line is one seed, thick lines are means"
SAID = SAID_ONCE + "; grey: within the margin of equivalence of the mean compared with; the test is in the text"
COLOURS = {title: plot.COLOURS[name] for name, title in texts.ALGORITHMS.items()}
TITLES = plot.TITLES | texts.METRICS


def new(count, width=4.4, said=SAID_ONCE):
    """A figure with so many panels beside each other."""
    figure, places = plot.plt.subplots(1, count, figsize=(width * count, 3.4), squeeze=False, layout="constrained")
    figure.supxlabel(said, fontsize=7.5, color="#666666")
    for place in places[0]:
        place.spines[["top", "right"]].set_visible(False)
    return figure, places[0]


def save(figure, name):
    report.FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.FIGURES / f"{name}.png", dpi=80, metadata={"Software": None})
    plot.plt.close(figure)


def dots(axis, runs, title):
    """A row of dots for each run {name: values of the seeds}, with their mean; the first run is on top."""
    colours = colours_of(runs)
    for i, (name, found) in enumerate(runs.items()):
        places = -i + np.linspace(-0.18, 0.18, len(found))
        axis.plot(found, places, ".", color=colours[name], alpha=0.6)
        axis.plot([np.mean(found)] * 2, [-i - 0.32, -i + 0.32], color=colours[name], linewidth=3)
    names = [textwrap.fill(name, 18) for name in runs]
    axis.set_yticks([-i for i in range(len(runs))], names, fontsize=9)
    axis.locator_params(axis="x", nbins=5)
    axis.set(title=title, ylim=(-len(runs) + 0.4, 0.6))
    axis.margins(x=0.1)


def colours_of(runs):
    """A colour for each name: an algorithm's own, or the next of the others."""
    others = iter(plot.OTHERS)
    return {name: COLOURS.get(name) or next(others) for name in runs}


def curves(axis, runs, metric, x="step"):
    """The curves {name: rows of the seeds} of a metric."""
    plot.draw(axis, runs, metric, x, colours_of(runs))
    axis.set(title=TITLES.get(metric, metric), xlabel={"step": "step", "completions": "sampled completions"}[x])
    axis.locator_params(axis="x", nbins=4)


def complete(claim, runs):
    """{name: run} of those whose seeds are all there, under the registered rules."""
    found = {}
    for run in runs:
        effect = claim["primary"] | {"run": run, "against": run}
        made, wanted = report.there(claim, effect)
        if made == wanted:
            found[report.name(run, claim["name"])] = run
    return found


def logged(rows):
    return {metric for seeds in rows.values() for seed in seeds for row in seed for metric in row}


def write_claim(claim):
    """What decides, seed by seed, and what is drawn beside it."""
    primary, name = claim["primary"], claim["name"]
    pairs = [(effect["run"], effect["against"]) for effect in (primary, *claim["reported"])]
    runs = complete(claim, dict.fromkeys(run for pair in pairs for run in pair))
    rows = {title: [registry.rows(run, seed) for seed in claim["seeds"]] for title, run in runs.items()}
    metrics = [metric for metric in texts.CURVES[name] if metric in logged(rows)]
    figure, places = new(1 + len(metrics), said=SAID)
    ends = {title: report.values(primary, run, claim["seeds"]) for title, run in runs.items()}
    dots(places[0], ends, "\n".join(report.metric_at(primary).rsplit(", ", 1)))
    against = np.mean(ends[report.name(primary["against"], name)])
    places[0].axvspan(against - primary["same"], against + primary["same"], color="#eeeeee", zorder=0)
    x = "completions" if name in texts.OVER_COMPLETIONS else "step"
    for place, metric in zip(places[1:], metrics, strict=True):
        curves(place, rows, metric, x)
        if x == "completions":
            place.axvline(primary["over"], color="#aaaaaa", linewidth=1, zorder=0)  # where it is decided
    save(figure, name)


def write_best():
    """All algorithms, each at the best of its six learning rates: the held-out accuracy of each seed, and training."""
    seeds = registry.claims(registry.load())["best-dapo"]["seeds"]
    ends = {name: report.results_of(f"best-{name}", seeds) for name in texts.ALGORITHMS}
    ends = {name: found for name, found in ends.items() if found is not None}
    if not ends:
        return
    rows = {name: [with_pairs(registry.rows(f"best-{name}", seed)) for seed in seeds] for name in ends}
    rows = {texts.ALGORITHMS[name]: found for name, found in rows.items()}
    figure, places = new(3)
    title = "held-out accuracy\nat 20,480 completions"
    dots(places[0], {texts.ALGORITHMS[name]: found for name, found in ends.items()}, title)
    curves(places[1], rows, "reward/accuracy", "completions")
    curves(places[2], rows, "policy/entropy", "completions")
    save(figure, "best")


def with_pairs(rows):
    """The rows with the accuracy of sampled pairs as the others name it."""
    return [row | ({"reward/accuracy": row["pairs/accuracy"]} if "pairs/accuracy" in row else {}) for row in rows]


def write_tuning():
    """Accuracy by learning rate: a line for each algorithm."""
    found = {name: report.tuned(name) for name in texts.ALGORITHMS}
    found = {name: runs for name, runs in found.items() if runs}
    if not found:
        return
    figure, (axis,) = new(1, 7, "a dot is a seed, a line their mean")
    ends = []
    for name, runs in found.items():
        colour, line = plot.COLOURS[name], {}
        for run, both in runs.items():
            rate = float(report.settings(name)[run])
            axis.plot([rate] * 2, both, ".", color=colour, alpha=0.6)
            line[rate] = np.mean(both)
        axis.plot(list(line), list(line.values()), color=colour, linewidth=2)
        ends.append([list(line.values())[-1], max(line), texts.ALGORITHMS[name], colour])
    axis.set_xscale("log")
    axis.set(title="held-out accuracy at 20,480 completions", xlabel="learning rate", xlim=(2.5e-5, 1.3e-3))
    plot.label_ends(axis, ends)
    save(figure, "tuning")


def write_pilot():
    """The pilot: all algorithms at one learning rate, and its claims that have no successor."""
    rows = {texts.ALGORITHMS[name]: list(pilot.load(name).values()) for name in ALL}
    figure, places = new(3)
    for place, metric in zip(places, ("reward/accuracy", "eval/pass@1", "policy/entropy"), strict=True):
        curves(place, rows, metric, "completions")
    places[2].set_title("entropy, nats a token (dpo.py logs none)")
    save(figure, "pilot-all")
    for name in texts.PILOT_FIGURES:
        claim = CLAIMS[name]
        if name == "deviation":
            write_deviation()
            continue
        titles = texts.PILOT_RUNS | texts.IN_CLAIM.get(name, {})
        rows = {titles[run]: list(pilot.load(run).values()) for run in claim.runs}
        figure, places = new(len(claim.curves))
        for place, metric in zip(places, claim.curves, strict=True):
            curves(place, rows, metric)
        if name == "kl_estimator":
            places[0].set_title("KL, each by its own estimator")
        if name == "sharpening":  # on one scale: pass@64 is at its ceiling
            for place in places:
                place.set_ylim(0, 1.05)
        save(figure, f"pilot-{name}")


def write_deviation():
    figure, places = new(2)
    for place, difficulty in zip(places, ("easy", "hard"), strict=True):
        runs = {"with the deviation": "gradient_share-std", "without": "gradient_share-no_std"}
        ends = {title: [pilot.value(rows, f"share/per_reward_{difficulty}", "end") for rows in pilot.load(run).values()]
                for title, run in runs.items()}  # fmt: skip
        dots(place, ends, f"weight of {difficulty} questions, medium: 1")
    save(figure, "pilot-deviation")


def write():
    for claim in registry.load()["claims"]:
        if report.decided(claim) and report.figure_of(claim) == claim["name"]:
            write_claim(claim)
    write_best()
    write_tuning()
    write_pilot()
