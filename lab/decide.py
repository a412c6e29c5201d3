"""Statistics of the registered claims: Welch's t, equivalence tests, Holm, sign flips, verdicts.

An effect is the difference between the means of two runs over their seeds. registered.json sets the
effects, margins and level; lab/verdicts.md explains them.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from registry import FAILS, HOLDS, OPEN, SAME, UNSEEN, UNTESTED


@dataclass
class Measured:
    """An effect and its p-values, before the correction for multiple claims."""

    effect: float
    low: float  # 95 % interval of this effect alone
    high: float
    p: float  # null hypothesis: the effect equals the margin (two-sided)
    p_same: float  # null hypothesis: |effect| is at least the equivalence margin
    p_signs: float  # as p, by an exact sign-flip test of the differences


@dataclass
class Decision:
    """A verdict and its basis; an open one has neither a measured effect nor p-values."""

    verdict: str = OPEN
    measured: Measured | None = None
    p: float = 1.0  # after Holm
    p_same: float = 1.0


# --- one effect ---


def measure(mine, others, margin, same):
    """Return Welch's t-test of two lists of one number per seed, and the equivalence tests.

    Equivalence is two one-sided tests against `same`, of which `p_same` is the larger p. All
    p-values are 1 if neither list varies, or if a run has no value (nan).
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
    """Return the share of all 2^n sign choices whose |sum| is at least that of the differences."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    sums = np.abs(signs @ differences)
    return float(np.mean(sums >= abs(differences.sum()) * (1 - 1e-12)))


# --- all effects together ---


def holm(ps):
    """Return Holm's adjusted p-values {name: p}. A missing or untested effect enters with p = 1."""
    adjusted = {}
    worst = 0.0
    for i, name in enumerate(sorted(ps, key=ps.get)):
        worst = max(worst, (len(ps) - i) * ps[name])
        adjusted[name] = min(1.0, worst)
    return adjusted


def verdict(measured, margin, direction, p, p_same, level):
    """Return the first of four verdicts that applies; `p` and `p_same` are corrected by Holm."""
    if p < level:
        return HOLDS if direction * (measured.effect - margin) > 0 else FAILS
    return SAME if p_same < level else UNSEEN


def corrected(found, rules, level):
    """Return {name: Decision}, corrected for all of `found`; an effect that is None stays open."""
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
    """Return the primary effect of a claim.

    It is None if a run is missing or does not count, or if the runs come from several versions of
    the code. All p-values are 1 if the claim's check has no value.
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
    """Return the mean over seeds of a claim's check, which asks whether the treatment took place.

    It is nan if a failed run has no value, and infinite for a claim without a check.
    """
    check = claim.get("check")
    if not check:
        return np.inf
    return np.mean([registration.outcome(check["run"], seed, check) for seed in claim["seeds"]])


def is_tested(registration, claim):
    """Return whether a claim's check reaches its registered minimum."""
    return not claim.get("check") or not checked(registration, claim) < claim["check"]["least"]


def decisions(registration):
    """Return {name: Decision} of all registered claims; an untested one enters Holm with p = 1."""
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
