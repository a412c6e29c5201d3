"""What was looked at after the verdicts, and decides nothing, from the rows of registered runs.

report.py puts it on docs/claims.md, and tests hold the READMEs to it.
"""

import functools
import json

import numpy as np
from scipy import stats

import decide
import registry

SECONDS = registry.HERE / "results" / "seconds.jsonl"
END, MOST = {"metric": "accuracy", "over": "end"}, {"metric": "accuracy", "over": 20480}
BEST_SEEDS, BASE_SEEDS = range(70, 80), range(60, 63)
SEEDS = {"grpo": range(40, 53), "ppo": range(40, 53), "ppo-critic_still": range(40, 53), "ppo-32x8": range(40, 53),
         "dr_grpo": range(40, 50)}  # fmt: skip
# At 1e-4: what is compared with what. GRPO has ten of its thirteen seeds where Dr. GRPO, which has ten, is compared.
AT_1E_4 = (("ppo", "grpo"), ("ppo-critic_still", "grpo"), ("ppo-32x8", "grpo"), ("ppo-32x8", "dr_grpo"),
           ("ppo", "ppo-32x8"), ("dr_grpo", "grpo"))  # fmt: skip
BASES = ("", "-hard-1", "-hard-2")


def values(run, seeds, effect):
    return np.array([registry.outcome(run, seed, effect) for seed in seeds])


def complete():
    """Whether all runs that are looked at are there."""
    jobs = [(run, seed) for run, seeds in SEEDS.items() for seed in seeds]
    for base, seeds in zip(BASES, (BEST_SEEDS, BASE_SEEDS, BASE_SEEDS), strict=True):
        jobs += [(f"best-{name}{base}", seed) for name in ("grpo", "dr_grpo", "ppo") for seed in seeds]
    return SECONDS.exists() and all(registry.counts(*job) for job in jobs)


def at_1e_4(run, against):
    """The difference in held-out accuracy at the end, as decide.py measures it, and both numbers of seeds."""
    seeds = SEEDS[run], SEEDS["dr_grpo"] if (run, against) == ("dr_grpo", "grpo") else SEEDS[against]
    mine, others = (values(name, part, END) for name, part in zip((run, against), seeds, strict=True))
    test = stats.ttest_ind(mine, others, equal_var=False)
    low, high = test.confidence_interval()
    found = decide.Measured(float(mine.mean() - others.mean()), float(low), float(high), float(test.pvalue), 1.0, 1.0)
    return found, tuple(map(len, seeds))


def leads(name="ppo"):
    """By how much an algorithm is ahead of GRPO on each of the three base models, at the best of six rates."""
    ends = [[values(f"best-{side}{base}", seeds, MOST).mean() for side in (name, "grpo")]
            for base, seeds in zip(BASES, (BEST_SEEDS, BASE_SEEDS, BASE_SEEDS), strict=True)]  # fmt: skip
    return [mine - other for mine, other in ends]


def lead_over_bases():
    """Mean of PPO's leads, and half of its 95 % interval with the base model as the unit."""
    found = leads()
    return np.mean(found), stats.t.isf(0.025, len(found) - 1) * stats.sem(found)


@functools.cache
def curves():
    lines = map(json.loads, SECONDS.read_text(encoding="utf-8").splitlines())
    return {(line["run"], line["seed"]): line for line in lines}


def shortest():
    return min(line["seconds"][-1] for line in curves().values())


def at_equal_seconds(seconds):
    """GRPO's and PPO's accuracy in training after so many seconds, and the difference with its interval."""
    after = [[np.interp(seconds, curves()[f"best-{name}", seed]["seconds"], curves()[f"best-{name}", seed]["accuracy"])
              for seed in BEST_SEEDS] for name in ("grpo", "ppo")]  # fmt: skip
    low, high = stats.ttest_ind(*after, equal_var=False).confidence_interval()
    grpo, ppo = map(np.mean, after)
    return grpo, ppo, grpo - ppo, low, high


def without_one_run(claim, decisions, level):
    """[(run, seed, verdict, p after Holm, of equivalence)] where leaving out this one run changes a claim's verdict;
    the p-values of the other claims stay as they are."""
    primary, changed = claim["primary"], []
    ps = {name: it.measured.p if it.measured else 1.0 for name, it in decisions.items()}
    same = {name: it.measured.p_same if it.measured else 1.0 for name, it in decisions.items()}
    sides = {side: values(primary[side], claim["seeds"], primary) for side in ("run", "against")}
    for side in sides:
        for i, seed in enumerate(claim["seeds"]):
            it = measured(*(sides | {side: np.delete(sides[side], i)}).values(), primary)
            p = decide.holm(ps | {claim["name"]: it.p})[claim["name"]]
            p_same = decide.holm(same | {claim["name"]: it.p_same})[claim["name"]]
            verdict = decide.verdict(it, primary["margin"], primary["direction"], p, p_same, level)
            if verdict != decisions[claim["name"]].verdict:
                changed.append((primary[side], seed, verdict, p, p_same))
    return changed


def measured(mine, others, primary):
    """An effect of unequal numbers of seeds, for which decide.py has no flips of signs."""
    margin, same = primary["margin"], primary["same"]
    below = stats.ttest_ind(mine - same, others, equal_var=False, alternative="less").pvalue
    above = stats.ttest_ind(mine + same, others, equal_var=False, alternative="greater").pvalue
    p = stats.ttest_ind(mine - margin, others, equal_var=False).pvalue
    return decide.Measured(mine.mean() - others.mean(), np.nan, np.nan, p, max(below, above), 1.0)
