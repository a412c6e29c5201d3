"""docs/monitoring.md: what healthy and unhealthy runs that are kept look like.

python lab/monitoring.py        draws docs/figures/monitoring.png and docs/grpo.png (needs matplotlib)

tools/refresh.py writes the table of the page, from the same rows.
"""

import functools
import json
import pathlib
import re
import statistics
import sys
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS, PAGE = HERE.parent, HERE / "results", "docs/monitoring.md"
COLOURS = {"healthy": "#1f77b4", "unhealthy": "#d95f02"}
OLDER = {"policy/clip_fraction_low": "policy/clip_low", "policy/clip_fraction_high": "policy/clip_high"}


class Curve(NamedTuple):
    metric: str
    health: str  # healthy, unhealthy
    runs: str  # in lab/results, without the seed
    what: str
    drawn: bool = False


HELD_OUT = ("eval/pass@1", "eval/reward")  # what is right of held-out problems; SmolLM2's by its own reward
CURVES = [
    Curve("reward/mean", "healthy", "registered/learned_reward-kl_0.05", "a learned reward, KL 0.05", True),
    Curve("reward/mean", "unhealthy", "registered/learned_reward-kl_0", "the same without a KL: gamed", True),
    Curve("completion/length", "healthy", "registered/grpo", "stands still"),
    Curve("completion/length", "healthy", "real_model/sums", "falls, and the answers get better"),
    Curve(
        "completion/length", "healthy", "registered/learned_reward-kl_0.05", "grows, and the answers get better", True
    ),
    Curve("completion/length", "unhealthy", "registered/learned_reward-kl_0", "grows, and they get worse", True),
    Curve("completion/length", "unhealthy", "registered/coin-tight_below", "falls, by a random reward"),
    Curve("policy/entropy", "healthy", "registered/grpo", "falls slowly", True),
    Curve("policy/entropy", "unhealthy", "registered/coin-tight_below", "rises, by a random reward", True),
    Curve("policy/entropy", "unhealthy", "registered/tune-gspo-lr_1e-3", "rises: the rate is too large"),
    Curve("policy/entropy", "unhealthy", "real_model/ppo-reward_model", "falls, and nothing is learnt"),
    Curve("policy/approx_kl", "healthy", "claims/clip-0.2_0.2", "16 updates a rollout, clip 0.2", True),
    Curve("policy/approx_kl", "healthy", "real_model/sums", "4 updates a rollout, 135 million weights"),
    Curve("policy/approx_kl", "unhealthy", "claims/clip-1_1000", "the same without a clip", True),
    Curve("policy/approx_kl", "unhealthy", "bugs/with-old_logprobs", "0, with 4 updates: a bug"),
    Curve("policy/kl_old_ref", "healthy", "claims/learned-kl_0.05", "a learned reward, KL 0.05"),
    Curve("policy/kl_old_ref", "unhealthy", "claims/learned-kl_0.01", "KL 0.01: too little to hold it"),
    Curve("policy/clip_fraction_low", "healthy", "registered/tune-ppo-lr_2e-4", "4 updates a rollout", True),
    Curve("policy/clip_fraction_low", "unhealthy", "registered/tune-ppo-lr_1e-3", "five times the rate", True),
    Curve("policy/clip_fraction_high", "healthy", "registered/tune-ppo-lr_2e-4", "4 updates a rollout", True),
    Curve("policy/clip_fraction_high", "unhealthy", "registered/tune-ppo-lr_1e-3", "five times the rate", True),
    Curve("optim/grad_norm", "healthy", "bugs/default", "falls as the task is solved", True),
    Curve("optim/grad_norm", "healthy", "real_model/sums", "rises: at first nearly all groups are wrong"),
    Curve("optim/grad_norm", "unhealthy", "bugs/with-zero_grad", "does not: gradients are never cleared", True),
    Curve("rollout/logprob_gap", "healthy", "bugs/temperature", "rounding, 0.1 million weights", True),
    Curve("rollout/logprob_gap", "healthy", "real_model/sums", "rounding, 135 million weights"),
    Curve("rollout/logprob_gap", "unhealthy", "bugs/with-temperature", "another temperature in training", True),
    Curve("advantage/zero_groups", "healthy", "bugs/default", "many agree, most of them right", True),
    Curve("advantage/zero_groups", "unhealthy", "real_model/mix-grpo", "many agree, most of them wrong", True),
]
DRAWN = {  # the titles of the panels
    "reward/mean": "reward (a learned one)",
    "eval/pass@1": "held-out pass@1 of these runs",
    "completion/length": "tokens of a completion",
    "policy/entropy": "entropy (nats per token)",
    "policy/approx_kl": "KL to the old policy, per token",
    "policy/clip_fraction_low": "share of tokens clipped below",
    "policy/clip_fraction_high": "share of tokens clipped above",
    "optim/grad_norm": "gradient norm before clipping",
    "rollout/logprob_gap": "gap of log-probs",
    "advantage/zero_groups": "share of groups that agree",
}


@functools.cache
def rows_of(runs):
    """{seed: rows} of kept runs, with today's names of metrics."""
    found = {}
    for file in sorted((RESULTS / runs).parent.glob(f"{(RESULTS / runs).name}-seed*.jsonl")):
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        names = {old: new for new, old in OLDER.items()}
        rows = [{names.get(key, key): value for key, value in row.items()} for row in rows if "step" in row]
        found[int(file.stem.rpartition("-seed")[2])] = rows
    return found


def values(runs, metric):
    """A metric by seed and row."""
    return [[row[metric] for row in rows if metric in row] for rows in rows_of(runs).values()]


def held_out(runs):
    """The mean over seeds of what is right of held-out problems, before and after."""
    metric = HELD_OUT["real_model" in runs]
    if "reward_model" in runs:  # by the rule: its own evaluations are the reward model's
        metric = "eval/logged/sum"
    found = values(runs, metric)
    return [statistics.mean(scores[place] for scores in found) for place in (0, -1)]


def mean_of_last(runs, metric):
    return statistics.mean(statistics.mean(found[-5:]) for found in values(runs, metric))


def summary(curve):
    """What the table has of a curve: seeds, first row, mean of the last five, smallest and largest, over all seeds."""
    found = values(curve.runs, curve.metric)
    first, last = statistics.mean(x[0] for x in found), mean_of_last(curve.runs, curve.metric)
    return len(found), first, last, min(map(min, found)), max(map(max, found))


def short(value):
    return f"{value:.2g}" if abs(value) < 0.1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def table():
    header = ["metric", "healthy", "run, in lab/results", "seeds", "first", "last", "range", "right before, after"]
    lines = [header, ["---"] * len(header)]
    for curve in CURVES:
        seeds, *numbers = summary(curve)
        first, last, low, high = map(short, numbers)
        before, after = (f"{value:.2f}" for value in held_out(curve.runs))
        cells = [
            f"`{curve.metric}`",
            {"healthy": "yes", "unhealthy": "no"}[curve.health],
            f"`{curve.runs}`: {curve.what}",
            seeds,
        ]
        lines.append([*cells, first, last, f"{low} to {high}", f"{before}, {after}"])
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def refresh(tree):
    text = tree.read(PAGE)
    tree.write(PAGE, re.sub(r"(?<=<!-- table: health -->\n)(\|.*\n)*", lambda _: table(), text))
    return []


def draw():
    sys.path.append(str(ROOT / "tools"))
    import plot  # matplotlib is an extra

    figure, places = plot.plt.subplots(2, 5, figsize=(19, 6), layout="constrained")
    figure.supxlabel("step; a thin line is a seed, thick lines are means", fontsize=8, color="#666666")
    for axis, (metric, title) in zip(places.flat, DRAWN.items(), strict=True):
        of = "reward/mean" if metric == "eval/pass@1" else metric
        runs = {
            curve.health: list(rows_of(curve.runs).values()) for curve in CURVES if curve.metric == of and curve.drawn
        }
        plot.draw(axis, runs, metric, colours=COLOURS)
        axis.set(title=f"{title}\n{metric}", yscale="log" if metric == "rollout/logprob_gap" else "linear")
        axis.spines[["top", "right"]].set_visible(False)
    (ROOT / "docs" / "figures").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs" / "figures" / "monitoring.png", dpi=70, metadata={"Software": None})
    names = ("reward/accuracy", "eval/pass@1", "completion/length", "policy/entropy")
    runs = {"grpo": list(rows_of("pages/grpo").values())}
    plot.panels(runs, {name: plot.PANELS[name] for name in names}).savefig(ROOT / "docs" / "grpo.png", dpi=110)


if __name__ == "__main__":
    draw()
