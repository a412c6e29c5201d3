"""What PPO's lead is made of: the rules that decide registered_lead.json.

An effect is a paired difference: the mean of an arm's two runs on a base model less that of another
arm's, for each of the base models. The test is a paired t over these. All 96 runs that decide are
made, so the rules for missing ones have no code.
"""

import numpy as np
from scipy import stats

import decide
import registry

LEAD = registry.HERE / "registered_lead.json"


# --- which runs there are ---


def jobs_of(registered, base):
    """[(run, seed)] that decide on one base model."""
    return [(f"{arm}-{base}", seed) for seed in registered["seeds"][base] for arm in registered["arms"]]


def counting(registered):
    """{base model: the headers of its deciding runs that are there and count}"""
    return {base: [registry.read(*job)[0] for job in jobs_of(registered, base) if registry.counts(*job)]
            for base in registered["seeds"]}  # fmt: skip


def deciding(registered):
    """The base models, if all of their runs are there and count: those on a base model began with the same weights, and
    all are of one version of the code. None otherwise."""
    wanted = len(registered["arms"]) * registered["plan"]["seeds"]
    headers = counting(registered)
    whole = all(len(found) == wanted for found in headers.values())
    one_start = all(len({header["base"] for header in found}) == 1 for found in headers.values())
    versions = {(header["code"], header["torch"], header["transformers"])
                for found in headers.values() for header in found}  # fmt: skip
    return list(headers) if whole and one_start and len(versions) == 1 else None


# --- the statistics ---


def means(registered, arm, bases, effect):
    """The mean of an arm's runs on each of these base models."""
    runs = [[(f"{arm}-{base}", seed) for seed in registered["seeds"][base]] for base in bases]
    return np.array([np.mean([registry.outcome(*job, effect) for job in jobs]) for jobs in runs])


def paired(differences, margin, same):
    """A paired t of differences, one for each base model, and two one-sided ones against -same and +same.

    Without a deviation there is no test, nor with a run that has no value (nan): all ps are 1.
    """
    differences = np.asarray(differences, float)
    mean = float(differences.mean())
    if np.ptp(differences) == 0 or not np.isfinite(differences).all():
        return decide.Measured(mean, np.nan, np.nan, 1.0, 1.0, 1.0)
    test = stats.ttest_1samp
    interval = test(differences, 0).confidence_interval()
    return decide.Measured(
        effect=mean,
        low=float(interval.low),
        high=float(interval.high),
        p=float(test(differences, margin).pvalue),
        p_same=float(max(test(differences, same, alternative="less").pvalue,
                         test(differences, -same, alternative="greater").pvalue)),
        p_signs=decide.sign_flips(differences - margin),
    )  # fmt: skip


def difference(registered, effect, bases):
    mine, others = (means(registered, effect[side], bases, registered["outcome"]) for side in ("arm", "against"))
    return mine - others


def decisions(registered):
    """{effect: Decision}; open as long as a run is missing or does not count."""
    bases, effects = deciding(registered), {effect["name"]: effect for effect in registered["effects"]}
    found = dict.fromkeys(effects)
    if bases:
        found = {name: paired(difference(registered, effect, bases), effect["margin"], effect["same"])
                 for name, effect in effects.items()}  # fmt: skip
    return decide.corrected(found, effects, registered["statistics"]["level"])
