"""Decides the claims, and writes docs/claims.md with its figures: python docs/claims/report.py [--write]

The rules, which were written before the runs:

- An effect is the mean over seeds of a difference of two runs of the same seed, with a bootstrap interval of 95 % (10,000
  draws of as many seeds, with replacement). It HOLDS if the whole interval is on the claimed side of the margin, it DOES
  NOT HOLD if the whole interval is on the other side, and else it CANNOT BE SEEN HERE.
- A claim holds if all the effects that decide it hold; it does not hold if one of them does not; and else it cannot be
  seen here. The other effects are reported and decide nothing.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
from claims import CLAIMS, Effect
from run import RESULTS, ROOT, read_rows

HOLDS, FAILS, UNSEEN = "holds", "does not hold", "cannot be seen here"


def load(name):
    """{seed: rows} of a run: step 0, and every five steps."""
    files = RESULTS.glob(f"{name}-seed*.jsonl")
    return {int(file.stem.rpartition("-seed")[2]): with_sums(read_rows(file)[1:]) for file in sorted(files)}


def with_sums(rows):
    """The rows with what is computed from them: clipped tokens of both sides, completions drawn so far."""
    drawn, last = 0, 0
    for row in rows:
        if "policy/clip_low" in row:
            row["policy/clipped"] = row["policy/clip_low"] + row["policy/clip_high"]
        drawn += 256 * row.get("sampling/rounds", 1) * (row["step"] - last)
        row["completions"], last = drawn, row["step"]
    return rows


def value(rows, metric, over):
    """One number of a run: the first or last value of a metric, or its mean over the second half of the steps."""
    values = [(row["step"], row[metric]) for row in rows if metric in row]
    if over == "start":
        return values[0][1]
    if over == "end":
        return values[-1][1]
    half = rows[-1]["step"] / 2
    return float(np.mean([x for step, x in values if step > half]))


def differences(effect):
    """The difference of each seed that both runs have."""
    runs, (against, _, start) = load(effect.run), (effect.against or "").partition(":")
    others = load(against) if against else {}
    found = []
    for seed in sorted(runs.keys() & others.keys() if against else runs):
        before = value(others[seed], effect.metric, start or effect.over) if against else 0.0
        found.append(value(runs[seed], effect.metric, effect.over) - before)
    return np.array(found)


def interval(values):
    """The bootstrap interval of the mean of `values`."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return np.quantile(draws.mean(axis=1), (0.025, 0.975))


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
