"""What is PPO's lead made of? What decides registered_lead.json; writes its part of docs/claims.md: python lab/lead.py

An effect is a paired difference: the mean of an arm's two runs on a base model less that of another arm's, for each of
the base models; the test is a paired t over these. Nothing of a deciding run is shown before all of them are there.
"""

import re

import numpy as np

import registry
from registry import ABANDONED, HOLDS, OPEN, SAME

try:
    import decide
except ImportError:  # without scipy nothing is decided
    decide = None

LEAD, PAGE = registry.HERE / "registered_lead.json", "docs/claims.md"
NAME = "ppo_lead"  # of its entries in amendments.json


# --- which runs there are ---


def jobs_of(registered, base):
    """[(run, seed)] that decide on one base model."""
    return [(f"{arm}-{base}", seed) for seed in registered["seeds"][base] for arm in registered["arms"]]


def tuning_jobs(registered):
    return [job for job in registry.jobs(registered) if job[0].startswith("tune-")]


def counting(registered):
    """{base model: the headers of its deciding runs that are there and count}"""
    return {base: [registry.read(*job)[0] for job in jobs_of(registered, base) if registry.counts(*job)]
            for base in registered["seeds"]}  # fmt: skip


def closed(registered):
    """Whether an entry of amendments.json, of a day after the closing date, says that no more runs are made."""
    entries = registry.amendments(NAME)
    return any(entry.get("closed") and entry["date"] > registered["closing"] for entry in entries)


def deciding(registered, headers):
    """The base models that decide: all of them, or, once it is closed, those with all of their runs, begun with the
    same weights. None as long as runs are to come, and where the runs are of more than one version of the code."""
    wanted = len(registered["arms"]) * registered["plan"]["seeds"]
    bases = [base for base, found in headers.items()
             if len(found) == wanted and len({header["base"] for header in found}) == 1]  # fmt: skip
    made = [header for base in bases for header in headers[base]]
    versions = {(header["code"], header["torch"], header["transformers"]) for header in made}
    return bases if len(versions) == 1 and (len(bases) == len(headers) or closed(registered)) else None


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
    test = decide.stats.ttest_1samp
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


def decisions(registered, bases):
    """{effect: Decision} on these base models; open without any, abandoned with too few."""
    effects = registered["effects"]
    if bases is None or len(bases) < registered["statistics"]["least_bases"]:
        word = OPEN if bases is None else ABANDONED
        return {effect["name"]: decide.Decision(word) for effect in effects}
    found = {effect["name"]: paired(difference(registered, effect, bases), effect["margin"], effect["same"])
             for effect in effects}  # fmt: skip
    ps = decide.holm({name: it.p for name, it in found.items()})
    same = decide.holm({name: it.p_same for name, it in found.items()})
    decided = {}
    for effect in effects:
        name = effect["name"]
        rule = effect["margin"], effect["direction"], ps[name], same[name], registered["statistics"]["level"]
        decided[name] = decide.Decision(decide.verdict(found[name], *rule), found[name], ps[name], same[name])
    return decided


def deviation(across_seeds, across_bases, seeds):
    """That of a difference on one base model: each arm has the mean of `seeds` runs, and the difference itself varies
    from base model to base model."""
    return float(np.sqrt(2 * across_seeds**2 / seeds + across_bases**2))


def power(effect, deviation, bases, level):
    """The chance that the paired t of this many base models is below `level` (two-sided) at this effect."""
    critical, shift = decide.stats.t.isf(level / 2, bases - 1), effect * np.sqrt(bases) / deviation
    tails = decide.stats.nct.sf(critical, bases - 1, shift), decide.stats.nct.sf(critical, bases - 1, -shift)
    return float(np.nan_to_num(tails[0], nan=1.0) + np.nan_to_num(tails[1]))  # scipy has no number far out


def power_of_equivalence(same, deviation, bases, level, draws=400_000):
    """The chance that both one-sided paired tests are below `level` where there is no difference, by simulation."""
    rng, freedom = np.random.default_rng(0), bases - 1
    effects = rng.normal(0, deviation / np.sqrt(bases), draws)
    errors = deviation * np.sqrt(rng.chisquare(freedom, draws) / freedom / bases)
    return float(np.mean(np.abs(effects) + decide.stats.t.isf(level, freedom) * errors < same))


def planned(registered):
    """The power that is registered: of the two effects together with Holm's first step, and of each alone."""
    plan, level = registered["plan"], registered["statistics"]["level"]
    bases, of_one = len(registered["seeds"]), deviation(plan["across_seeds"], plan["across_bases"], plan["seeds"])
    first = registered["effects"][0]
    return {
        "deviation": round(of_one, 4),
        "equivalent_at_0": round(power_of_equivalence(first["same"], of_one, bases, level / 2), 2),
        "equivalent_at_0_last_step": round(power_of_equivalence(first["same"], of_one, bases, level), 2),
        "seen": {str(size): round(power(size, of_one, bases, level / 2), 2) for size in plan["sizes"]},
    }


# --- its part of the page of the claims ---

PART = re.compile(r"(?<=<!-- lead -->\n).*?(?=<!-- end of lead -->\n)", re.DOTALL)
TEXT = """### An experiment of its own

Twelve base models, built for it with new seeds, two runs of each arm on each. It has a registration of its own,
[registered_lead.json](../lab/registered_lead.json), committed before its first run, with what was known by then, such
as the first table of the runs of other claims below. It decides nothing of the claims on this page, nor they of it.
**{made} of {wanted} deciding runs are made**, and {tuned} of {to_tune} of the tuning. {status}

{results}<details>
<summary>What is run, and what decides</summary>

| arm | prompts x completions | baseline | advantages | a token's weight in the loss |
|---|---|---|---|---|
| Dr. GRPO | 32 x 8 | the mean of the group | centred in the group | 1 / (rows x 128) |
| PPO, 32 x 8 | 32 x 8 | a critic | whitened over the tokens of the rollout | 1 / tokens |
| PPO, 256 x 1 | 256 x 1 | a critic | the same | 1 / tokens |
| PPO, 256 x 1, dead critic | 256 x 1 | none: values stay 0, by a rate of 1e-12 | the same | 1 / tokens |

- **The primary effect**, “{first}”: PPO 32 x 8 less
  Dr. GRPO, so what the critic does **together with** the other two differences. “Equivalent” may also be two of these
  that cancel. **The second**, “{second}”: PPO 256 x 1 less
  PPO 32 x 8, which differ in nothing else but the tuned rate. Three more differences are shown and decide nothing.
- **A run** has 80 steps of 256 completions with four optimizer steps each, on 512 prompts. All arms draw the same
  prompts as often: each is completed 40 times, in five steps by eight completions or in forty by one (a test counts).
- **The learning rate** is tuned for each arm: {rates}, one run on each of three further base models,
  whose medium and hard held-out problems are none of those that decide. The critic's stays at its preset.
- **The test**: held-out accuracy after step 80, on 1,582 problems of each base model ([tasks.py](../lab/tasks.py)), the
  mean of an arm's two runs; a paired t over the twelve differences, two-sided against 0, and two one-sided ones for
  “smaller than 0.02”, each with Holm's correction over both effects. The verdicts are called as above.
- **Power**, if accuracies vary by {across_seeds} across seeds, and a true difference by {across_bases:.3f} across base
  models, which is a guess: where there is no difference the test of equivalence says so in {equivalent} of 100
  experiments at Holm's first step ({last} at its last); 0.026 is seen in {seen} of 100, 0.02 in {less}.
- All deciding runs are made by one version of the code, of torch and of transformers, and the eight on a base model
  begin with the same weights. SHA-256: `{digest}`.

{runner}

</details>
"""

GOES_ON = """**Missing runs.** No value of a deciding run is shown before all {wanted} are there. Runs begun after
{closing} do not count. If some are missing then, the base models with all of their eight runs decide if they are at
least {least}; with fewer, both effects are abandoned. A run whose loss is not finite counts with 0; one that stops is
made again.

The runner makes what has no results, in {hours:.1f} hours of one core in all, and can be stopped and
started again. It runs in a checkout of the commit that began, because another version of the code decides nothing:

```bash
git worktree add --detach ../lead-runs {commit}
cp -r lab/results/lead ../lead-runs/lab/results/     # what is there
cd ../lead-runs
python lab/run.py --registered lab/registered_lead.json --list   # what is left; without --list it runs
```

Another kind of processor may build a base model with other weights: then the runner stops and asks for the old ones.
Where they are lost, the results on it go to `lab/results/lead/set_aside`, and its eight runs are begun again.
Afterwards `lab/results/lead` is copied back and committed, and `python lab/lead.py` writes this part of the page."""

MADE = """The runner (`python lab/run.py --registered lab/registered_lead.json`) made them, in a checkout of the commit
that began (`git worktree add --detach ../lead-runs {commit}`), because another version of
the code decides nothing; `python lab/lead.py` decides, and writes this part of the page."""


# After the results where both effects hold.
READ = """**PPO's lead over Dr. GRPO, {lead}, has two parts**: {more_prompts} for 256 distinct prompts in a step, and
{same_shape} for what is left with batches of the same shape, where PPO has a critic, other weights and whitening.
Counted the other way, the critic gives {critic}, and all without it {without}. Looked at afterwards: in the tuning PPO
32 x 8 and Dr. GRPO are close at 1e-4 ({at_1e_4}), as in the runs of other claims below, and apart at 1.5e-4
({at_15e_5}): PPO bears a higher rate. The best rate of Dr. GRPO is the lowest of the four; a better one may
lie below."""


def signed(number):
    return f"{number:+.3f}"


def interval(found):
    """An effect with its interval of 95 %, which needs a deviation."""
    if np.isnan(found.low):
        return signed(found.effect)
    return f"{signed(found.effect)} ({signed(found.low)} to {signed(found.high)})"


def in_words(effect, decision):
    """A verdict; that a difference is smaller than the margin of equivalence is said beside the others as well."""
    if decision.p_same >= registry.load()["statistics"]["level"]:
        return decision.verdict
    return f"{decision.verdict}{':' if decision.verdict == SAME else ', and'} smaller than {effect['same']:g}"


def tuning_table(registered):
    """The mean accuracies of the tuning, once all of an arm's runs are there; the chosen rate in bold."""
    rule, lines = registered["tuning"], []
    for arm, title in registered["arms"].items():
        names = [name for name in registered["runs"] if name.startswith(f"tune-{arm}-lr_")]
        if (chosen := registry.best(registered, names)) is None:
            continue
        cells = []
        for name in names:
            mean = np.mean([registry.outcome(name, seed, rule) for seed in rule["seeds"]])
            cell = f"{name.rpartition('_')[2]}: {mean:.3f}"
            cells.append(f"**{cell}**" if name == chosen else cell)
        lines.append(f"| {' | '.join([title, *cells])} |")
    header = ["| tuning | | | | |", "|---|---|---|---|---|"]
    return [*header, *lines, ""] if lines else []


def results(registered, bases, found):
    """The effects as they were decided, and the differences beside them."""
    lines = []
    for effect in registered["effects"]:
        it = found[effect["name"]]
        ps = [f"{p:.2g}" for p in (it.p, it.p_same, it.measured.p_signs)]
        cells = [effect["title"], f"**{in_words(effect, it)}**", interval(it.measured), *ps]
        lines.append(f"| {' | '.join(cells)} |")
    for effect in registered["reported"]:
        title = f"{registered['arms'][effect['arm']]}, less {registered['arms'][effect['against']]}"
        lines.append(f"| {title} | | {interval(paired(difference(registered, effect, bases), 0, 1))} | | | |")
    header = "| | verdict | difference (95 %) | p after Holm | p of equivalence after Holm | p of sign flips |"
    accuracies = [f"{title}: {means(registered, arm, bases, registered['outcome']).mean():.3f}"
                  for arm, title in registered["arms"].items()]  # fmt: skip
    return [f"Over {len(bases)} base models. Held-out accuracy: {'; '.join(accuracies)}.", "",
            header, "|---|---|---|---|---|---|", *lines, "", *in_parts(registered, bases, found)]  # fmt: skip


def tuned_at(registered, arm, rate):
    return np.mean([registry.outcome(f"tune-{arm}-lr_{rate}", seed, registered["tuning"])
                    for seed in registered["tuning"]["seeds"]])  # fmt: skip


def in_parts(registered, bases, found):
    """What the effects say together, where both hold."""
    if any(it.verdict != HOLDS for it in found.values()):
        return []
    said = {name: f"{it.measured.effect:.3f}" for name, it in found.items()}
    for name, effect in zip(("lead", "critic", "without"), registered["reported"], strict=True):
        said[name] = f"{difference(registered, effect, bases).mean():.3f}"
    for name, rate in (("at_1e_4", "1e-4"), ("at_15e_5", "1.5e-4")):
        said[name] = " and ".join(f"{tuned_at(registered, arm, rate):.3f}" for arm in ("ppo-32x8", "dr_grpo"))
    return [*READ.format(**said).split("\n"), ""]


STATUS = {
    OPEN: "Nothing is decided yet.",
    ABANDONED: "It was closed with too few base models, and both effects are abandoned.",
}


def build():
    """The text of this part of the page."""
    with registry.using(LEAD):
        registered = registry.load()
        tuning, starts, headers = tuning_jobs(registered), registry.starts(), counting(registered)
        bases = deciding(registered, headers)
        found = decisions(registered, bases)
        word = found[registered["effects"][0]["name"]].verdict
        wanted = sum(len(jobs_of(registered, base)) for base in registered["seeds"])
        plan, power = registered["plan"], registered["power"]
        rates = [name.rpartition("_")[2] for name in registered["runs"] if name.startswith("tune-dr_grpo-lr_")]
        shown = [*(results(registered, bases, found) if word not in STATUS else ()), *tuning_table(registered)]
        return TEXT.format(
            made=sum(map(len, headers.values())),
            wanted=wanted,
            tuned=sum(registry.counts(*job) for job in tuning),
            to_tune=len(tuning),
            status=STATUS.get(word, "The verdicts stand below."),
            results="".join(f"{line}\n" for line in shown),
            rates=", ".join(rates),
            first=registered["effects"][0]["title"],
            second=registered["effects"][1]["title"],
            across_seeds=plan["across_seeds"],
            across_bases=plan["across_bases"],
            equivalent=round(100 * power["equivalent_at_0"]),
            last=round(100 * power["equivalent_at_0_last_step"]),
            seen=round(100 * power["seen"]["0.026"]),
            less=round(100 * power["seen"]["0.02"]),
            digest=registry.digest(),
            runner=(GOES_ON if word == OPEN else MADE).format(
                wanted=wanted,
                closing=registered["closing"],
                least=registered["statistics"]["least_bases"],
                hours=plan["core_seconds"] / 3600,
                commit=starts[0]["commit"] if starts else "COMMIT",
            ),
        )


def refresh(tree):
    if decide is None:
        return []  # as it is with the verdicts of the claims, only scipy can write it
    tree.write(PAGE, PART.sub(lambda _: build(), tree.read(PAGE)))
    return []


def main():
    if decide is None:
        raise SystemExit("scipy decides (pip install scipy)")
    path = registry.ROOT / PAGE
    text = PART.sub(lambda _: build(), path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
