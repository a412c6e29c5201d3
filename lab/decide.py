"""The statistics of the registered claims: Welch's t, two one-sided tests, Holm, sign flips, verdicts.

An effect is the mean of one run over its seeds less that of another. `registered.json` says which
effect, which margin and which level; docs/results.md says it in words.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from registry import FAILS, HOLDS, OPEN, SAME, UNSEEN, UNTESTED


@dataclass
class Measured:
    """An effect as measured, before the correction for the other claims."""

    effect: float
    low: float  # the interval of 95 %, of this effect alone
    high: float
    p: float  # that the effect is the margin: two-sided
    p_same: float  # that the effect is, in size, the margin of equivalence or more
    p_signs: float  # that the effect is the margin, by all flips of the differences' signs


@dataclass
class Decision:
    """A verdict, and what it comes from; without a verdict there is nothing else either."""

    verdict: str = OPEN
    measured: Measured | None = None
    p: float = 1.0  # after Holm
    p_same: float = 1.0


# --- one effect ---


def measure(mine, others, margin, same):
    """Welch's t of two lists with a number for each seed, and two one-sided tests against `same`.

    `p_same` is the greater of the two. Without a deviation there is no test, nor with a run that
    has no value (nan): all ps are 1.
    """
    mine = np.asarray(mine, float)
    others = np.asarray(others, float)
    effect = float(mine.mean() - others.mean())
    if np.ptp(mine) == np.ptp(others) == 0 or not np.isfinite([*mine, *others]).all():
        return untestable(effect)
    interval = stats.ttest_ind(mine, others, equal_var=False).confidence_interval()
    at_margin = stats.ttest_ind(mine - margin, others, equal_var=False)
    below = stats.ttest_ind(mine - same, others, equal_var=False, alternative="less")
    above = stats.ttest_ind(mine + same, others, equal_var=False, alternative="greater")
    return Measured(
        effect=effect,
        low=float(interval.low),
        high=float(interval.high),
        p=float(at_margin.pvalue),
        p_same=float(max(below.pvalue, above.pvalue)),
        p_signs=sign_flips(mine - others - margin),
    )


def untestable(effect):
    return Measured(effect, low=np.nan, high=np.nan, p=1.0, p_same=1.0, p_signs=1.0)


def sign_flips(differences):
    """The share of all 2^n choices of signs whose sum is, in size, at least that of the differences."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    sums = np.abs(signs @ differences)
    return float(np.mean(sums >= abs(differences.sum()) * (1 - 1e-12)))


# --- all effects together ---


def holm(ps):
    """Holm's adjusted p-values {name: p} of {name: p}; what is not there or not tested has p = 1."""
    adjusted = {}
    worst = 0.0
    for i, name in enumerate(sorted(ps, key=ps.get)):
        worst = max(worst, (len(ps) - i) * ps[name])
        adjusted[name] = min(1.0, worst)
    return adjusted


def verdict(measured, margin, direction, p, p_same, level):
    """The first of four words that applies; `p` and `p_same` are those of `measured` after Holm."""
    if p < level:
        return HOLDS if direction * (measured.effect - margin) > 0 else FAILS
    return SAME if p_same < level else UNSEEN


def corrected(found, rules, level):
    """{name: Decision} by these rules, corrected for all of `found`; without a `Measured` it is open."""
    ps = holm({name: it.p if it else 1.0 for name, it in found.items()})
    same = holm({name: it.p_same if it else 1.0 for name, it in found.items()})
    decided = {}
    for name, it in found.items():
        decided[name] = Decision()
        if it:
            margin = rules[name]["margin"]
            direction = rules[name]["direction"]
            word = verdict(it, margin, direction, ps[name], same[name], level)
            decided[name] = Decision(word, it, ps[name], same[name])
    return decided


# --- the claims of registered.json ---


def measured(registration, claim):
    """The primary effect of a claim as measured.

    It is None where a run is missing or does not count, and where the runs were made by more than
    one version of the code. Without a value of its check all ps are 1.
    """
    primary = claim["primary"]
    versions = set()
    values = {"run": [], "against": []}
    for side, numbers in values.items():
        for seed in claim["seeds"]:
            if not registration.counts(primary[side], seed):
                return None
            versions.add(registration.header(primary[side], seed)["code"])
            numbers.append(registration.outcome(primary[side], seed, primary))
    if len(versions) > 1:
        return None
    found = measure(values["run"], values["against"], primary["margin"], primary["same"])
    if np.isnan(checked(registration, claim)):
        return replace(found, p=1.0, p_same=1.0)
    return found


def checked(registration, claim):
    """The mean over the seeds of a claim's check: whether what it is about took place.

    It is nan if a failed run has none, and infinite for a claim without a check.
    """
    check = claim.get("check")
    if not check:
        return np.inf
    return np.mean([registration.outcome(check["run"], seed, check) for seed in claim["seeds"]])


def is_tested(registration, claim):
    """Whether the mean of a claim's check is not below the registered least."""
    return not claim.get("check") or not checked(registration, claim) < claim["check"]["least"]


def decisions(registration):
    """{name: Decision} of all registered claims. One that was not tested counts with p = 1."""
    claims = {claim["name"]: claim for claim in registration.content["claims"]}
    found = {name: measured(registration, claim) for name, claim in claims.items()}
    untested = []
    for name, claim in claims.items():
        if found[name] and not is_tested(registration, claim):
            untested.append(name)
    decisive = {name: None if name in untested else it for name, it in found.items()}
    rules = {name: claim["primary"] for name, claim in claims.items()}
    decided = corrected(decisive, rules, registration.content["statistics"]["level"])
    for name in untested:
        decided[name] = Decision(UNTESTED, found[name])
    return decided
