"""The statistics of the registered claims: Welch's t, two one-sided tests, Holm, sign flips, and the verdict.

An effect is the mean of one run over its seeds less that of another. `registered.json` says which effect, which margin
and which level; docs/claims.md says it in words.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

import registry
from registry import FAILS, HOLDS, OPEN, SAME, UNSEEN, UNTESTED


@dataclass
class Measured:
    """An effect as measured: its size, interval and p-values, before the correction for the other claims."""

    effect: float
    low: float  # the interval of 95 %, of this effect alone
    high: float
    p: float  # that the effect is the margin: two-sided
    p_same: float  # that the effect is, in size, the equivalence margin or more: the greater of two one-sided ps
    p_signs: float  # that the effect is the margin, by all flips of the signs of the differences seed by seed


def measure(mine, others, margin, same):
    """Welch's t of two lists of numbers, one for each seed; `margin` is that of the claim, `same` of equivalence.

    Without a deviation there is no test, nor with a run that has no value (nan): all ps are 1.
    """
    mine, others = np.asarray(mine, float), np.asarray(others, float)
    if np.ptp(mine) == np.ptp(others) == 0 or not np.isfinite([*mine, *others]).all():
        return Measured(float(mine.mean() - others.mean()), np.nan, np.nan, 1.0, 1.0, 1.0)
    interval = stats.ttest_ind(mine, others, equal_var=False).confidence_interval()
    below = stats.ttest_ind(mine - same, others, equal_var=False, alternative="less").pvalue
    above = stats.ttest_ind(mine + same, others, equal_var=False, alternative="greater").pvalue
    return Measured(
        effect=float(mine.mean() - others.mean()),
        low=float(interval.low),
        high=float(interval.high),
        p=float(stats.ttest_ind(mine - margin, others, equal_var=False).pvalue),
        p_same=float(max(below, above)),
        p_signs=sign_flips(mine - others - margin),
    )


def sign_flips(differences):
    """The share of all 2^n choices of signs whose sum is, in size, at least that of the differences as they are."""
    signs = np.array(list(itertools.product((1, -1), repeat=len(differences))))
    sums = np.abs(signs @ differences)
    return float(np.mean(sums >= abs(differences.sum()) * (1 - 1e-12)))


def holm(ps):
    """Holm's adjusted p-values {name: p} of {name: p}; a claim without results has p = 1.

    What is missing so counts as if it showed nothing. An adjusted p can only fall when another p falls, so a claim that
    is decided by its p stays so whatever the runs still missing will show.
    """
    adjusted, worst = {}, 0.0
    for i, name in enumerate(sorted(ps, key=ps.get)):
        worst = max(worst, (len(ps) - i) * ps[name])
        adjusted[name] = min(1.0, worst)
    return adjusted


def verdict(measured, margin, direction, p, p_same, level):
    """The first of these four words that applies; `p` and `p_same` are those of `measured` after Holm's correction."""
    if p < level:
        return HOLDS if direction * (measured.effect - margin) > 0 else FAILS
    return SAME if p_same < level else UNSEEN


def measured(claim):
    """The primary effect of a claim as measured; None as long as a run is missing or does not count, and for good if
    its runs were made by more than one version of the code. Without a value of its check all ps are 1."""
    if registry.missing(claim) or registry.strangers(claim) or len(registry.versions(claim)) > 1:
        return None
    primary, seeds = claim["primary"], claim["seeds"]
    mine, others = ([registry.outcome(primary[side], seed, primary) for seed in seeds] for side in ("run", "against"))
    found = measure(mine, others, primary["margin"], primary["same"])
    return replace(found, p=1.0, p_same=1.0) if np.isnan(checked(claim)) else found


def checked(claim):
    """The mean over the seeds of a claim's check: whether what it is about took place. nan if a failed run has none."""
    check = claim.get("check")
    return np.mean([registry.outcome(check["run"], seed, check) for seed in claim["seeds"]]) if check else np.inf


def tested(claim):
    """Whether what a claim is about took place: its check's mean over the seeds is not below the registered least."""
    return not claim.get("check") or not checked(claim) < claim["check"]["least"]


@dataclass
class Decision:
    """A verdict, and what it comes from; without a verdict there is nothing else either."""

    verdict: str = OPEN
    measured: Measured | None = None
    p: float = 1.0  # after Holm
    p_same: float = 1.0


def corrected(found, rules, level):
    """{name: Decision} by these rules, corrected for all of `found`; without a `Measured` it is open."""
    ps = holm({name: it.p if it else 1.0 for name, it in found.items()})
    same = holm({name: it.p_same if it else 1.0 for name, it in found.items()})
    decided = {}
    for name, it in found.items():
        decided[name] = Decision()
        if it:
            word = verdict(it, rules[name]["margin"], rules[name]["direction"], ps[name], same[name], level)
            decided[name] = Decision(word, it, ps[name], same[name])
    return decided


def decisions(registered):
    """{name: Decision} of all registered claims."""
    claims = registry.claims(registered)
    found = {name: measured(claim) for name, claim in claims.items()}
    untested = {name for name, claim in claims.items() if found[name] and not tested(claim)}
    decisive = {name: None if name in untested else it for name, it in found.items()}
    rules = {name: claim["primary"] for name, claim in claims.items()}
    decided = corrected(decisive, rules, registered["statistics"]["level"])
    return decided | {name: Decision(UNTESTED, found[name]) for name in untested}
