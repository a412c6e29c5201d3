"""What PPO's lead is made of: the rules that decide registered_lead.json.

An effect is a paired difference: the mean of an arm's two runs on a base model less that of another
arm's, for each of the base models. The test is a paired t over these. All 96 runs that decide are
made, so the rules for missing ones have no code.
"""

import numpy as np
from scipy import stats

import decide

# --- which runs there are ---


def jobs_of(registration, base):
    """[(run, seed)] that decide on one base model."""
    jobs = []
    for seed in registration.content["seeds"][base]:
        for arm in registration.content["arms"]:
            jobs.append((f"{arm}-{base}", seed))
    return jobs


def all_count(registration):
    """Whether all deciding runs are there and count, and can be compared: those on a base model
    began with the same weights, and all are of one version of the code and of the libraries."""
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
    """The mean of an arm's runs on each base model."""
    outcome = registration.content["outcome"]
    found = []
    for base, seeds in registration.content["seeds"].items():
        values = [registration.outcome(f"{arm}-{base}", seed, outcome) for seed in seeds]
        found.append(np.mean(values))
    return np.array(found)


def difference(registration, effect):
    """The difference between the two arms of an effect on each base model."""
    return means(registration, effect["arm"]) - means(registration, effect["against"])


def paired(differences, margin, same):
    """A paired t of differences, one for each base model, and two one-sided ones against `same`.

    Without a deviation there is no test, nor with a run that has no value (nan): all ps are 1.
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
    """{effect: Decision}; open where a run is missing or does not count."""
    effects = {effect["name"]: effect for effect in registration.content["effects"]}
    found = dict.fromkeys(effects)
    if all_count(registration):
        for name, effect in effects.items():
            differences = difference(registration, effect)
            found[name] = paired(differences, effect["margin"], effect["same"])
    return decide.corrected(found, effects, registration.content["statistics"]["level"])


def reported(registration):
    """[(effect, Measured)] of the differences that are reported beside the effects."""
    found = []
    for effect in registration.content["reported"]:
        found.append((effect, paired(difference(registration, effect), margin=0, same=np.inf)))
    return found
