"""What PPO's lead is made of: the rules that decide registered_lead.json.

For each base model, an effect compares the means of two arms, each over its two runs. The test is a
paired t-test over the base models. All 96 deciding runs exist, so the registered rules for missing
runs have no code.
"""

import numpy as np
from scipy import stats

import decide

# --- the runs ---


def jobs_of(registration, base):
    """Return the [(run, seed)] that decide on one base model."""
    jobs = []
    for seed in registration.content["seeds"][base]:
        for arm in registration.content["arms"]:
            jobs.append((f"{arm}-{base}", seed))
    return jobs


def all_count(registration):
    """Return whether all deciding runs exist, count and are comparable.

    Runs on one base model must start from the same weights, and all runs must share one version of
    the code and of the libraries.
    """
    versions = set()
    for base in registration.content["seeds"]:
        starts = set()
        for job in jobs_of(registration, base):
            if not registration.counts(*job):
                return False
            header = registration.header(*job)
            starts.add(header["base"])
            versions.add((header["code"], header["torch"], header["transformers"]))
        if len(starts) > 1:
            return False
    return len(versions) == 1


# --- the statistics ---


def means(registration, arm):
    """Return the mean of an arm's runs on each base model."""
    outcome = registration.content["outcome"]
    found = []
    for base, seeds in registration.content["seeds"].items():
        values = [registration.outcome(f"{arm}-{base}", seed, outcome) for seed in seeds]
        found.append(np.mean(values))
    return np.array(found)


def difference(registration, effect):
    """Return the difference between the two arms of an effect on each base model."""
    return means(registration, effect["arm"]) - means(registration, effect["against"])


def paired(differences, margin, same):
    """Return the paired t-test of differences, one per base model, and the equivalence tests.

    All p-values are 1 if the differences do not vary, or if a run has no value (nan).
    """
    differences = np.asarray(differences, float)
    effect = float(differences.mean())
    if np.ptp(differences) == 0 or not np.isfinite(differences).all():
        return decide.untestable(effect)
    interval = stats.ttest_1samp(differences, 0).confidence_interval()
    below = stats.ttest_1samp(differences, same, alternative="less")
    above = stats.ttest_1samp(differences, -same, alternative="greater")
    return decide.Measured(
        effect=effect,
        low=float(interval.low),
        high=float(interval.high),
        p=float(stats.ttest_1samp(differences, margin).pvalue),
        p_same=float(max(below.pvalue, above.pvalue)),
        p_signs=decide.sign_flips(differences - margin),
    )


def decisions(registration):
    """Return {effect: Decision}; all are open if a run is missing or does not count."""
    effects = {effect["name"]: effect for effect in registration.content["effects"]}
    found = dict.fromkeys(effects)
    if all_count(registration):
        for name, effect in effects.items():
            differences = difference(registration, effect)
            found[name] = paired(differences, effect["margin"], effect["same"])
    return decide.corrected(found, effects, registration.content["statistics"]["level"])


def reported(registration):
    """Return [(effect, Measured)] of the differences that are only reported."""
    found = []
    for effect in registration.content["reported"]:
        found.append((effect, paired(difference(registration, effect), margin=0, same=np.inf)))
    return found
