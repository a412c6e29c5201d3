"""The rules of the pilot: how the first laboratory decided its claims, from five seeds that all of it was built on.

They are kept as they were, so that its verdicts can be checked; docs/claims.md has their history, and why nothing
rests on them. An effect is the mean over seeds of a difference of two runs of the same seed, with a bootstrap interval
of 95 % (10,000 draws of as many seeds, with replacement; with five seeds it covers 84 %). It holds if the whole
interval is on the claimed side of the margin; it does not hold if the whole interval is on the other side; and else it
is inconclusive. A claim holds if all the effects that decide it hold; it does not hold if one of them does not; and
else it is inconclusive.
"""

import numpy as np

from claims import RUNS
from run import RESULTS, read_rows

HOLDS, FAILS, UNSEEN = "holds", "does not hold", "inconclusive"


def load(name):
    """{seed: rows} of a run: step 0, and every five steps."""
    files = RESULTS.glob(f"{name}-seed*.jsonl")
    return {int(file.stem.rpartition("-seed")[2]): with_sums(read_rows(file)[1:]) for file in sorted(files)}


def with_sums(rows):
    """The rows with what other metrics give: clipped tokens of both sides; accuracy of pairs as the others name it."""
    for row in rows:
        if "policy/clip_fraction_low" in row:
            row["policy/clipped"] = row["policy/clip_fraction_low"] + row["policy/clip_fraction_high"]
        if "pairs/accuracy" in row:
            row["reward/accuracy"] = row["pairs/accuracy"]
    return rows


def value(rows, metric, over, completions=None):
    """One number of a run, as `Effect.over` says; `completions`: those of the cheaper run."""
    if over in ("start", "end"):
        return [row[metric] for row in rows if metric in row][0 if over == "start" else -1]
    if over == "late":
        kept = [row for row in rows if row["step"] > rows[-1]["step"] / 2]
    else:
        kept = [row for row in rows if 0.75 * completions <= row["completions"] <= completions]
    return float(np.mean([row[metric] for row in kept if metric in row]))


def differences(effect):
    """The difference of each seed that both runs have."""
    runs, (against, _, start) = load(effect.run), (effect.against or "").partition(":")
    others = load(against) if against else {}
    found = []
    for seed in sorted(runs.keys() & others.keys() if against else runs):
        mine, other = runs[seed], others.get(seed, runs[seed])
        completions = min(mine[-1]["completions"], other[-1]["completions"])
        before = value(other, effect.metric, start or effect.over, completions) if against else 0.0
        found.append(value(mine, effect.metric, effect.over, completions) - before)
    return np.array(found)


def interval(values):
    """The bootstrap interval of the mean of `values`."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return np.quantile(draws.mean(axis=1), (0.025, 0.975))


def deviations():
    """What the registered design takes from the pilot: the pooled deviation across seeds of the last pass@1, and the
    mean correlation of two runs over the same seeds, both over the runs on the hard task that have five of them,
    and how many these are."""
    runs = [load(name) for name, command in RUNS.items() if "embedded-hard" in command]
    ends = np.array([[value(rows, "eval/pass@1", "end") for rows in run.values()] for run in runs if evaluated(run)])
    correlations = np.corrcoef(ends)[np.triu_indices(len(ends), 1)]
    return float(np.sqrt(ends.var(axis=1, ddof=1).mean())), float(correlations.mean()), len(ends)


def evaluated(run):
    return len(run) == 5 and all("eval/pass@1" in rows[-1] for rows in run.values())


def verdict(effect, values):
    low, high = interval(values)
    if effect.least is not None:
        return HOLDS if low > effect.least else FAILS if high < effect.least else UNSEEN
    return HOLDS if high < effect.most else FAILS if low > effect.most else UNSEEN


def decide(claim):
    """The verdict on a claim; None as long as a run that decides has fewer than five seeds."""
    verdicts = []
    for effect in claim.effects:
        values = differences(effect)
        if effect.decides:
            if len(values) < 5:
                return None
            verdicts.append(verdict(effect, values))
    return HOLDS if set(verdicts) == {HOLDS} else FAILS if FAILS in verdicts else UNSEEN
