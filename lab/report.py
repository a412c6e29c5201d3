"""docs/claims.md and the counts in the READMEs, from registered.json and the rows: python lab/report.py [--figures]

Verdicts are those of decide.py, which needs scipy (pip install scipy); the figures need matplotlib. Nothing of a claim
is shown before all of its runs are there. The pilot, below on the page, is decided by pilot.py and counts for nothing.
"""

import argparse
import functools
import hashlib
import json
import re

import numpy as np

import lead
import pilot
import registry
import texts
from claims import CLAIMS
from registry import ABANDONED, FAILS, HOLDS, OPEN, ROOT, SAME, UNSEEN, UNTESTED

try:
    import afterwards
    import decide
except ImportError:  # without scipy nothing is decided; what the page is made from can be compared
    decide = None

PAGE, PILOT_PAGE, FIGURES = "docs/claims.md", "lab/results/pilot.md", ROOT / "docs" / "figures" / "claims"
NUMBERS = "Its numbers, and how the runs were made"
NUMBERS_PAGE = "lab/results/numbers.md"
MOVED = ("All statistics", "The commands of all runs", NUMBERS, "The tuning", "All of it")  # to that page
PILOT_FIGURES = "../../docs/figures/claims/pilot-"  # from its page
MEMORY = registry.HERE / "results" / "memory_of_ppo.json"
SECONDS = registry.HERE / "results" / "seconds.jsonl"
SEEN = registry.HERE / "results" / "seen.json"
AFTERWARDS = "Looked at afterwards, which decides nothing:"
NEEDED = "scipy is needed to write it (pip install scipy)"
ENGLISH = {word: word for word in (HOLDS, FAILS, SAME, UNSEEN, UNTESTED, ABANDONED, OPEN)}
CHINESE = {HOLDS: "成立", FAILS: "不成立", SAME: "等效", UNSEEN: "没有定论", UNTESTED: "未受检验", ABANDONED: "已放弃",
           OPEN: "尚未判定"}  # fmt: skip
READMES = {"README.md": (ENGLISH, ": ", ", "), "README.zh.md": (CHINESE, "：", "，")}
COUNTS = re.compile(rf"\*\*(?:{'|'.join([*ENGLISH, *CHINESE.values()])})[:：] ?\d+\b.*?\*\*")
DIGITS = {"cpu_seconds": 0, "completion/length": 1, "completion/length_incorrect": 2, "policy/entropy": 4,
          "policy/clipped_tokens": 4, "policy/token_clip_ratio": 5, "completion/truncated": 4}  # fmt: skip


# --- what is compared ---


def name(run, claim=None):
    """A run in words."""
    if found := re.fullmatch(r"best-([a-z_]+)(?:-(hard-\d))?", run):
        return f"{texts.ALGORITHMS[found[1]]}, best of six" + (f" on {found[2]}" if found[2] else "")
    return texts.IN_CLAIM.get(claim, {}).get(run) or texts.RUNS[run]


def metric_at(effect):
    """A metric in words, and where in a run it is taken."""
    over = {"late": "second half of the steps", "end": "at the end", "all": "all steps", "start": "steps 1 to 5"}
    over = over.get(effect["over"]) or f"at {effect['over']:,} completions"
    return texts.METRICS[effect["metric"]] + ("" if effect["metric"] == "cpu_seconds" else f", {over}")


def shown(number, metric, sign=""):
    return f"{number:{sign}.{DIGITS.get(metric, 3)}f}"


def values(effect, run, seeds):
    """One number for each seed."""
    return [registry.outcome(run, seed, effect) for seed in seeds]


def there(claim, effect):
    """How many of the runs of an effect are there, under the registered rules; and how many there have to be."""
    part = claim | {"primary": effect}
    out = set(registry.missing(part)) | set(registry.strangers(part))
    return len(set(registry.jobs_of(part))) - len(out), len(set(registry.jobs_of(part)))


def difference(claim, effect):
    """A row of the table of a claim: what is compared, both means with their deviations, and the difference."""
    metric, run, against = (effect[key] for key in ("metric", "run", "against"))
    made, wanted = there(claim, effect)
    codes = len(registry.versions(claim | {"primary": effect}))
    if made < wanted or codes > 1:
        why = f"{made} of {wanted} runs" if made < wanted else f"of {codes} versions of the code"
        return [metric_at(effect), name(run, claim["name"]), name(against, claim["name"]), why]
    mine, others = (values(effect, side, claim["seeds"]) for side in (run, against))
    sides = []
    for side, found in ((run, mine), (against, others)):
        mean, deviation = shown(np.mean(found), metric), shown(np.std(found, ddof=1), metric)
        sides.append(f"{name(side, claim['name'])}: {mean} ± {deviation}{failed(side, claim['seeds'])}")
    if run == against:
        return [metric_at(effect), sides[0], "", ""]
    found = decide.measure(mine, others, 0.0, 1.0)
    return [metric_at(effect), *sides, interval(found, metric)]


def interval(measured, metric):
    """The difference with its interval; without a deviation there is none, nor where a failed run has no value."""
    if np.isnan(measured.effect):
        return "a run has no value"
    if np.isnan(measured.low):
        return shown(measured.effect, metric, "+")
    low, high = shown(measured.low, metric, "+"), shown(measured.high, metric, "+")
    return f"{shown(measured.effect, metric, '+')} ({low} to {high})"


def failed(run, seeds):
    """How many of a run's seeds ended in a loss that was not finite, where there are any."""
    count = sum("failed" in registry.read(run, seed)[0] for seed in seeds)
    return f" ({count} of {len(seeds)} failed)" if count else ""


# --- claims ---


@functools.cache
def decisions():
    """{claim: (decision as registered, decision as amended)}"""
    registered = registry.load()
    old = decide.as_registered(registered)
    new = decide.as_amended(registered) if registry.AMENDMENTS.exists() else old
    return {claim: (old[claim], new[claim]) for claim in old}


def verdict(claim):
    """The verdict by the registered rule in words, or how many runs there are."""
    old, new = decisions()[claim["name"]]
    if old.verdict == OPEN:
        made, wanted = there(claim, claim["primary"])
        faults = [f"{run} seed {seed} is {why}" for (run, seed), why in registry.strangers(claim).items()]
        codes = len(registry.versions(claim))
        faults += [f"they are of {codes} versions of the code"] if codes > 1 else []
        return "; ".join([f"{OPEN}: {made} of {wanted} runs", *faults])
    said = in_words(claim, old)
    if any("primary" in amendment for amendment in registry.amendments(claim["name"])):
        said += f"; by a rule that was changed: {in_words(registry.amended(claim), new)}"
    return said


def in_words(claim, decision):
    """A verdict as the page has it: that of an equivalence with its margin."""
    return decision.verdict + (f": smaller than {claim['primary']['same']:g}" if decision.verdict == SAME else "")


def decided(claim):
    return decisions()[claim["name"]][0].measured is not None


def figure_of(claim):
    return "best" if claim["name"].startswith("best-") else claim["name"]


def line(claim):
    """The line of a claim in the first tables."""
    primary, (decision, _) = claim["primary"], decisions()[claim["name"]]
    effect = p = without = ""
    if decided(claim):
        effect, p = interval(decision.measured, primary["metric"]), f"{decision.p:.2g}"
        p = f"{decision.p_same:.2g} (of equivalence)" if decision.verdict == SAME else p
        without = f"{len(changed(claim))} of {len(set(registry.jobs_of(claim)))}"
    source = re.split("[,:;]", claim["paper"])[0] + ("; a replication" if "replication" in claim["kind"] else "")
    title = f"[{claim['title']}](#{anchor(claim['title'])})"
    return [title, source, f"**{verdict(claim)}**", effect, p, without, beside(claim)]


@functools.cache
def changes():
    """{claim: what afterwards.without_one_run finds}"""
    registered, found = registry.load(), {name: old for name, (old, _) in decisions().items()}
    level = registered["statistics"]["level"]
    return {claim["name"]: afterwards.without_one_run(claim, found, level) if testable(claim) else []
            for claim in registered["claims"]}  # fmt: skip


def changed(claim):
    return changes()[claim["name"]]


def testable(claim):
    """Whether a claim has p-values: it is decided, was tested, and no run is without a value."""
    decision = decisions()[claim["name"]][0]
    return decided(claim) and decision.verdict != UNTESTED and not np.isnan(decision.measured.low)


def without_one_run(claim):
    """The sentence on the runs without which the verdict would be another."""
    lines, found = [], changed(claim)
    for other in dict.fromkeys(verdict for _, _, verdict, *_ in found):
        runs = {}
        for run, seed, verdict_, p, p_same in found:
            if verdict_ == other:
                shown_p = p_same if decisions()[claim["name"]][0].verdict == SAME and other == UNSEEN else p
                runs.setdefault(name(run, claim["name"]), []).append(f"{seed} (p {shown_p:.2g})")
        lines.append(f"“{other}” without any one of " + "; ".join(f"{run} {', '.join(it)}" for run, it in runs.items()))
    return f"{AFTERWARDS} the verdict would be {', and '.join(lines)}; p is after Holm." if lines else ""


def beside(claim):
    """What a reader of the verdict has to know with it."""
    note = texts.NOTES.get(claim["name"], "")
    if not decided(claim) or not note:
        return ""
    said = {}
    if "{best}" in note:
        other = registry.claims(registry.load())["best-gspo"]
        said["best"] = verdict(other) + (f" ({interval(measured_of(other), 'accuracy')})" if decided(other) else "")
    if "{punished" in note:
        late = {"metric": "overlong/fraction", "run": claim["primary"]["run"], "over": "late"}
        said["punished"] = np.mean(values(late, late["run"], claim["seeds"]))
        seeds = ", ".join(str(seed) for _, seed, *_ in changed(claim))
        said["without"] = f"; inconclusive without the unpunished run of any one of the seeds {seeds}" if seeds else ""
    return note.format(**said)


def measured_of(claim):
    return decisions()[claim["name"]][0].measured


def numbers(claim):
    """What p-values say beyond the table of all statistics."""
    primary, (decision, _) = claim["primary"], decisions()[claim["name"]]
    if np.isnan(decision.measured.low):
        return "No test: no deviation, or a run without a value."
    mine, others = (values(primary, primary[side], claim["seeds"]) for side in ("run", "against"))
    deviations = [np.std(mine, ddof=1), np.std(others, ddof=1)]
    worth = worth_of_inconclusive(primary, deviations, len(claim["seeds"])) if decision.verdict == UNSEEN else ""
    return f"{interval_of_equivalence(claim, mine, others)}{worth}{without_one_run(claim)}".strip()


def statistics(claim):
    """A row of the table of all statistics: the tests, what the seeds were planned to see and what they see with the
    deviations as measured, and by which code the runs were made."""
    primary, found = claim["primary"], decisions()[claim["name"]][0]
    unit = {"policy/entropy": " nats", "completion/length_incorrect": " tokens"}.get(primary["metric"], "")
    smallest = f"{claim['power']['smallest_effect']:g}{unit}" + from_margin(primary)
    plan = [smallest, f"{chance_of_equivalent(claim):.2f} (within {primary['same']:g}{unit})"]
    row = [f"`{claim['name']}`", f"{min(claim['seeds'])} to {max(claim['seeds'])}", f"{primary['margin']:g}"]
    if not decided(claim) or np.isnan(found.measured.low):
        return [*row, *([""] * 4), *plan, "", made_by(claim) if decided(claim) else ""]
    mine, others = (values(primary, primary[side], claim["seeds"]) for side in ("run", "against"))
    ends = decide.stats.ttest_ind(mine, others, equal_var=False).confidence_interval(1 - first_level())
    row += [f"{found.measured.p:.2g}, {found.p:.2g}", f"{found.measured.p_signs:.2g}"]
    row += [" to ".join(shown(end, primary["metric"], "+") for end in ends)]
    row += [f"{found.measured.p_same:.2g}, {found.p_same:.2g}", *plan]
    deviations = [np.std(side, ddof=1) for side in (mine, others)]
    seen = decide.smallest_effect(deviations, len(claim["seeds"]), first_level())
    return [*row, shown(seen, primary["metric"]), made_by(claim)]


def made_by(claim):
    """How often its runs were started, and by which code they were made."""
    primary, jobs = claim["primary"], set(registry.jobs_of(claim))
    chosen = {run for side in ("run", "against") for run in best_of(primary[side])}
    tuning = {(run, seed) for run in chosen for seed in registry.load()["tuning"]["seeds"]}
    starts = sum((start["run"], start["seed"]) in jobs for start in registry.starts())
    [code] = registry.versions(claim)
    commits = ", ".join(sorted({registry.read(*job)[0]["commit"][:7] for job in jobs}))
    tries = sum((start["run"], start["seed"]) in tuning for start in registry.starts())
    tried = f", and {tries} for {len(tuning)} of the tuning" if tuning else ""
    older = [registry.read(*job)[0]["commit"][:7] for job in tuning if registry.read(*job)[0]["code"] != code]
    tried += f", {len(older)} of them of commit {', '.join(sorted(set(older)))}" if older else ""
    return f"{starts} starts for {len(jobs)} files{tried}; code {code[:8]}, commit {commits}"


def worth_of_inconclusive(primary, deviations, seeds):
    """What else this verdict could have been, with the deviations as measured, at Holm's first step."""
    same, level = primary["same"], first_level()
    seen = decide.power(same, deviations, seeds, level)
    equivalent = decide.power_of_equivalence(same, deviations, seeds, level)
    return (
        f"With the deviations as measured a true difference of {same:g} would be seen in {100 * seen:.0f} of 100 such "
        f"experiments, and none at all be called equivalent in {100 * equivalent:.0f}: “inconclusive” does not mean "
        f"that the two are the same. "
    )


def interval_of_equivalence(claim, mine, others):
    """The interval that lies within the margin where a claim is equivalent: at its step of Holm's, one-sided."""
    decision = decisions()[claim["name"]][0]
    if decision.verdict != SAME:
        return ""
    others_same = [other.measured.p_same for other, _ in decisions().values() if other.verdict == SAME]
    before = sum(p < decision.measured.p_same for p in others_same)
    level = 2 * registry.load()["statistics"]["level"] / (len(decisions()) - before)
    ends = decide.stats.ttest_ind(mine, others, equal_var=False).confidence_interval(1 - level)
    low, high = (shown(end, claim["primary"]["metric"], "+") for end in ends)
    return f"The interval of this test, at its step of Holm's, is that of {1 - level:.1%}: {low} to {high}. "


def known(claim):
    """What the pilot had seen of a claim."""
    before = claim["pilot"]
    return f"Known before: in the pilot {' less '.join(before['runs'])} was {before['effect']:+g} {before['words']}."


def from_margin(primary):
    return f" from the margin of {primary['margin']:g}" if primary["margin"] else ""


def chance_of_equivalent(claim):
    """The chance of that verdict where there is no difference. For a claim with a margin it is not what is registered,
    which is that of the two one-sided tests: there the claim's own test, which comes first, mostly decides."""
    primary, registered = claim["primary"], claim["power"]["equivalent_at_0"]
    if not primary["margin"]:
        return registered
    deviations = [0.018, 0.018] if primary["metric"] == "accuracy" else claim["pilot"]["deviations"]
    same, seeds = primary["same"], len(claim["seeds"])
    return decide.power_of_equivalence(same, deviations, seeds, first_level(), margin=primary["margin"])


def first_level():
    """The level at Holm's first step."""
    return registry.load()["statistics"]["level"] / len(registry.load()["claims"])


def folded(summary, lines):
    """Lines behind a click."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def section(claim, said):
    """What was found on one claim and what it does not show; behind a click the numbers, and how the runs were made.
    `said` are the sentences on runs that other claims share, which are said once."""
    primary, best = claim["primary"], claim["name"].startswith("best-")
    limits, _, later = texts.LIMITS[claim["name"]].partition(f" {AFTERWARDS} ")
    lines = [f"## {claim['title']}", "", f"**Verdict: {verdict(claim)}.**"]
    if decided(claim):
        effect = interval(measured_of(claim), primary["metric"])
        sides = (f"“{name(primary[side], claim['name'])}”" for side in ("run", "against"))
        what = metric_at(primary)
        lines[-1] += f" {what[0].upper()}{what[1:]}: {' less '.join(sides)} is {effect}."
    lines[-1] += f" The source ({claim['kind']}): {claim['paper']}."
    lines[-1] += f" [Its numbers](../{NUMBERS_PAGE}#{anchor(claim['title'])})."
    lines += ["", f"**What it does not show.** {limits}" + (f" {texts.BELOW}" if best else ""), ""]
    if decided(claim) and not best:
        lines += [f"![{claim['title']}](figures/claims/{figure_of(claim)}.png)", ""]
    note = [it for it in re.split(r"(?<=[.`]) (?=[A-Z0-9])", claim["note"]) if it not in said]
    said.update(note)
    more = [f"Seeds {min(claim['seeds'])} to {max(claim['seeds'])}. {' '.join([*note, known(claim)])}"]
    if decided(claim):
        first, *rest = [difference(claim, effect) for effect in (primary, *claim["reported"])]
        header = ["compared", "one", "the other", "difference (95 %)"]
        more = [*table(header, [[f"**{cell}**" for cell in first], *rest]), "", numbers(claim), "", *more]
        more += ["", f"{AFTERWARDS} {later}"] if later else []
        more += ["", texts.BESIDE[claim["name"]]] if claim["name"] in texts.BESIDE else []
    for amendment in registry.amendments(claim["name"]):
        date, what, why = (amendment[key] for key in ("date", "what", "why"))
        lines += [f"Changed on {date}, after the registration: {what} {why}"]
        if decided(claim) and "primary" in amendment:
            new = decisions()[claim["name"]][1]
            ps = f"p after Holm {new.p:.2g}, of equivalence {new.p_same:.2g}"
            lines[-1] += f" Under the changed rule: {new.verdict}, {ps}."
        lines += [""]
    return [*lines, *folded(NUMBERS, more)]


def commands():
    """The command of each run that a claim compares, once."""
    registered, lines = registry.load(), []
    for claim in registered["claims"]:
        effects = (claim["primary"], *claim["reported"])
        for run in dict.fromkeys(effect[side] for effect in effects for side in ("run", "against")):
            entry = registered["runs"][run]
            how = f"`{entry}`" if isinstance(entry, str) else at_best(run)
            lines.append(f"- {name(run, claim['name'])}: {how}")
    return list(dict.fromkeys(lines))


# --- each algorithm, best of six ---


def settings(algorithm):
    """{run of the tuning: its learning rate}"""
    found = {}
    for run in registry.load()["runs"][f"best-{algorithm}"]["best_of"]:
        found[run] = run.removeprefix(f"tune-{algorithm}-lr_")
    return found


def at_best(run):
    """The command of a run at its best, and the learning rate that the tuning chose once it is there."""
    algorithm = run.removeprefix("best-")
    first, rate = next(iter(settings(algorithm).items()))
    command = registry.load()["runs"][first].replace(f"--learning_rate {rate}", "--learning_rate RATE")
    found = f": {chosen_rate(algorithm)}" if tuned(algorithm) else ""
    return f"`{command}`, RATE the best of [six](#each-algorithm-best-of-six){found}"


def chosen_rate(algorithm):
    """The best of the six learning rates, and whether it is the first or the last of them."""
    rates = settings(algorithm)
    rate = rates[registry.best(registry.load(), list(rates))]
    first, *_, last = rates.values()
    return rate + (", at the edge of the six: a better one may lie beyond" if rate in (first, last) else "")


def tuned(algorithm):
    """{run of the tuning: the accuracies of its seeds}, once all of them are there."""
    rule = registry.load()["tuning"]
    runs = settings(algorithm)
    if not all(registry.counts(run, seed) for run in runs for seed in rule["seeds"]):
        return {}
    return {run: values(rule, run, rule["seeds"]) for run in runs}


def best_of(run):
    """The runs of the tuning that a run at its best is chosen from; none for others."""
    entry = registry.load()["runs"][run]
    return entry["best_of"] if isinstance(entry, dict) else []


def results_of(run, seeds):
    """The accuracy at 20,480 completions of each seed, once all of them count and are of one version of the code."""
    effect = {"metric": "accuracy", "over": registry.load()["tuning"]["over"]}
    if not all(registry.counts(run, seed) for seed in seeds):
        return None
    one_code = len({registry.read(run, seed)[0]["code"] for seed in seeds}) == 1
    return np.array(values(effect, run, seeds)) if one_code else None


def one_base(algorithms, base, seeds):
    """Whether all runs on a base model that was built here began with the same weights."""
    jobs = [(f"best-{algorithm}-{base}", seed) for algorithm in algorithms for seed in seeds]
    return len({registry.read(*job)[0].get("base") for job in jobs}) == 1


def at_equal_seconds(seeds):
    """The seconds of the shortest of the runs at their best, and {algorithm: mean over the seeds of the accuracy that
    its completions had after as many}; only of algorithms of which all seeds are there."""
    lines = map(json.loads, SECONDS.read_text(encoding="utf-8").splitlines()) if SECONDS.exists() else ()
    curves = {(line["run"], line["seed"]): line for line in lines}
    found = {name: [curves.get((f"best-{name}", seed)) for seed in seeds] for name in texts.ALGORITHMS}
    found = {name: lines for name, lines in found.items() if all(lines)}
    shortest = min((line["seconds"][-1] for lines in found.values() for line in lines), default=0)
    after = {name: [np.interp(shortest, line["seconds"], line["accuracy"]) for line in lines]
             for name, lines in found.items()}  # fmt: skip
    return shortest, {name: np.mean(accuracies) for name, accuracies in after.items()}


def best_section():
    registered = registry.load()
    seeds = registry.claims(registered)["best-dapo"]["seeds"]
    bases = {base: [seed for run, seed in registry.jobs(registered) if run == f"best-grpo-{base}"]
             for base in ("hard-1", "hard-2")}  # fmt: skip
    tuning, ends = [], []
    shortest, after = at_equal_seconds(seeds)
    for algorithm, title in texts.ALGORITHMS.items():
        found, words = tuned(algorithm), settings(algorithm)
        chosen = registry.best(registered, list(words)) if found else None
        cells = [f"{words[run]}: {np.mean(both):.3f}{failed(run, registered['tuning']['seeds'])}"
                 for run, both in found.items()]  # fmt: skip
        cells = [f"**{cell}**" if run == chosen else cell for run, cell in zip(found, cells, strict=True)]
        tuning.append([title, *(cells or [""] * len(words))])
        end = results_of(f"best-{algorithm}", seeds) if chosen else None
        if end is not None:
            seconds = [registry.read(f"best-{algorithm}", seed)[0]["cpu_seconds"] for seed in seeds]
            accuracy = f"{end.mean():.3f} ± {end.std(ddof=1):.3f}{failed(f'best-{algorithm}', seeds)}"
            row = [title, chosen_rate(algorithm), accuracy, f"{np.mean(seconds):.0f}"]
            row.append(f"{after[algorithm]:.3f}" if algorithm in after else "")
            for base, base_seeds in bases.items():
                mine = results_of(f"best-{algorithm}-{base}", base_seeds)
                others = results_of(f"best-grpo-{base}", base_seeds)
                both = mine is not None and others is not None and algorithm != "grpo"
                both = both and one_base((algorithm, "grpo"), base, base_seeds)
                row.append(interval(decide.measure(mine, others, 0.0, 1.0), "accuracy") if both else "")
            ends.append(row)
    lines = ["## Each algorithm, best of six", "", *texts.AT_BEST, ""]
    done = [row for row in tuning if row[1]]
    if ends:
        header = ["", "learning rate", "held-out accuracy, ± deviation across seeds", "seconds of one core"]
        header += ["accuracy in training at equal seconds" + (f", {shortest:.3g}" if after else "")]
        header += [f"less GRPO's on {base}, 3 seeds (95 %)" for base in bases]
        lines += [*table(header, ends), "", "![all algorithms, best of six](figures/claims/best.png)", ""]
    lines += [f"**What these five claims do not show.** {texts.BEST}", ""]
    if not done:
        return [*lines, "No tuning is done yet.", ""]
    tuned_by = ["![accuracy by learning rate, for each algorithm](figures/claims/tuning.png)", "", *texts.TUNING]
    return [*lines, *folded("The tuning", [*table(["tuning", *([""] * 6)], done), "", *tuned_by])]


# --- looked at afterwards ---


def signed(found, digits=3):
    return f"{found.effect:+.{digits}f} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


def findings():
    """What leads the page: the two findings that matter most to who compares algorithms, in numbers."""
    if not afterwards.complete():
        return []
    one_rate, _ = afterwards.at_1e_4("dr_grpo", "grpo")
    tuned_, ppo = (decisions()[name][0].measured for name in ("best-dr_grpo", "best-ppo"))
    on_bases = afterwards.leads("dr_grpo")[1:]
    mean, half = afterwards.lead_over_bases()
    said = {"one_rate": signed(one_rate), "p": f"{one_rate.p:.0e}".replace("e-0", "e-"), "tuned": signed(tuned_)}
    said |= {"bases": " and ".join(f"{lead:+.3f}" for lead in on_bases), "lead": f"{-ppo.effect:.3f}"}
    said |= {"low": f"{-ppo.high:.3f}", "high": f"{-ppo.low:.3f}", "mean": f"{mean:.3f}", "half": f"{half:.3f}"}
    return [texts.FINDINGS.format(**said), ""]


def seconds_shown():
    return afterwards.shortest(), 40, 50, 60


def lead_section():
    """What PPO's lead over GRPO is made of, as far as these rows tell."""
    if not afterwards.complete():
        return []
    rows = []
    for run, against in afterwards.AT_1E_4:
        found, seeds = afterwards.at_1e_4(run, against)
        rows.append([f"“{name(run)}” less “{name(against)}”", " and ".join(map(str, seeds)), signed(found)])
    by_clock = []
    for seconds in seconds_shown():
        grpo, ppo, less, low, high = afterwards.at_equal_seconds(seconds)
        by_clock.append([f"{seconds:.3g}", f"{grpo:.3f}", f"{ppo:.3f}", f"{less:+.3f} ({low:+.3f} to {high:+.3f})"])
    leads, (mean, half) = afterwards.leads(), afterwards.lead_over_bases()
    bases = ", ".join(f"{lead:.3f}" for lead in leads)
    header = ["seconds of training", "GRPO, in training", "PPO, in training", "GRPO less PPO (95 %)"]
    return [
        "## What PPO's lead is made of", "", "<!-- lead -->", "<!-- end of lead -->", "",
        *folded("What runs of other claims had shown", [
            *texts.LEAD, "",
            *table(["learning rate 1e-4, held-out accuracy at the end", "seeds", "difference (95 %)"], rows), "",
            *table(header, by_clock), "", texts.LEAD_ON_BASES.format(bases=bases, mean=mean, half=half),
        ]),
    ]  # fmt: skip


def seen_lines():
    """How many held-out problems the base model's own training had drawn; from seen.json, which seen.py writes."""
    found = json.loads(SEEN.read_text(encoding="utf-8"))
    four, said = found["four_terms"], {}
    for part in ("drawn", "not_drawn"):
        before, after = four[part]["before"], np.mean(four[part]["after"])
        said |= {f"{part}_before": f"{before:.2f}", f"{part}_after": f"{after:.2f}"}
    error = sum(part["before"] * (1 - part["before"]) / part["problems"] for part in four.values()) ** 0.5
    said |= {name: f"{drawn} of {of:,}" for name, (drawn, of) in found["counts"].items()}
    return [texts.SEEN.format(**said, seeds=len(four["drawn"]["after"]), error=error), ""]


# --- rules of thumb ---


def memory_table():
    """What PPO and GRPO take of memory, as memory_of_ppo.py found it, and how much less GRPO takes; with a reward model
    that is the sum of its two steps, as grpo.py has none of its own."""
    found = json.loads(MEMORY.read_text(encoding="utf-8"))
    units = {"measured": (20, "MiB"), "1.5B": (30, "GiB"), "7B": (30, "GiB")}
    rows = [
        [case, *(f"{sizes[key] / 2**power:,.0f} {unit}" for key, (power, unit) in units.items())]
        for case, sizes in found.items()
    ]
    scored, ppo, _, grpo, _ = found.values()
    less = {
        "GRPO against PPO, both with a reference": [grpo[key] / ppo[key] - 1 for key in units],
        "and with a reward model": [(grpo[key] + scored[key] - ppo[key]) / scored[key] - 1 for key in units],
    }
    rows += [[case, *(f"**{share:+.0%}**" for share in shares)] for case, shares in less.items()]
    return table(["", "measured, 15 million weights", "computed, 1.5B", "computed, 7B"], rows)


# --- the pilot ---


def pilot_effect(effect):
    """A deciding effect of the pilot as it was decided, and its interval by a paired t."""
    found = pilot.differences(effect)
    over = {"late": "second half of the steps", "end": "at the end"}[effect.over]
    against = (effect.against or "").replace(":start", " at the start")
    if effect.metric.startswith("logps/"):
        against = f"{effect.run}, mean of steps 1 to 5"
    what = f"`{effect.metric}`, {over}: {effect.run}" + (f" - {against}" if against else "")
    expected = f"> {effect.least:g}" if effect.least is not None else f"< {effect.most:g}"
    if len(found) < 5:
        return [what, expected, f"{len(found)} of 5 seeds", "", ""]
    low, high = pilot.interval(found)
    wide = decide.stats.t.interval(0.95, len(found) - 1, found.mean(), decide.stats.sem(found))
    as_decided = f"{found.mean():+.3g} ({low:+.3g} to {high:+.3g})"
    return [what, expected, as_decided, f"{wide[0]:+.3g} to {wide[1]:+.3g}", pilot.verdict(effect, found)]


@functools.cache
def pilot_decided():
    """{claim of the pilot: its verdict, and the rows of the effects that decided it}"""
    return {claim.name: (pilot.decide(claim) or "never decided",
                         [pilot_effect(effect) for effect in claim.effects if effect.decides])
            for claim in CLAIMS.values()}  # fmt: skip


def pilot_section():
    """What became of each claim of the pilot; other pages link to the rows."""
    registered, rows = registry.claims(registry.load()), []
    for claim in CLAIMS.values():
        became, why = texts.PILOT[claim.name]
        if isinstance(became, tuple):
            links = [f"[{new}](#{anchor(registered[new]['title'])})" for new in became]
            became = "; ".join(f"{link}: {verdict(registered[new])}" for link, new in zip(links, became, strict=True))
        place = f"../{PILOT_PAGE}#{anchor(f'Pilot: {claim.name}')}"
        title = f'<a id="pilot-{claim.name}"></a>[{claim.title}]({place})'
        rows.append([title, pilot_decided()[claim.name][0], became, why])
    header = ["claim of the pilot", "old verdict", "new verdict, or what became of it", "why they differ"]
    became = folded("Its 16 claims, and what became of each", table(header, rows))
    return ["## The pilot", "", *texts.PILOT_INTRO, "", *became]


def pilot_page():
    """What the pilot found, the effects that decided it and the history of its rules, on a page of their own."""
    lines = ["# The pilot", "", *texts.PILOT_PAGE, ""]
    lines += [f"![all algorithms at one learning rate]({PILOT_FIGURES}all.png)"]
    for claim in CLAIMS.values():
        why = claim.why.replace("](../lab/results/", "](")
        lines += ["", f"## Pilot: {claim.name}", ""]
        lines += [f"{claim.title}. {claim.paper}. **{pilot_decided()[claim.name][0].capitalize()}.** {why}".strip()]
        drawn = claim.name in texts.PILOT_FIGURES
        lines += ["", f"![{claim.title}]({PILOT_FIGURES}{claim.name}.png)"] if drawn else []
    effects = [[claim.name, *cells] for claim in CLAIMS.values() for cells in pilot_decided()[claim.name][1]]
    header = ["claim", "compared", "expected", "as decided, with a bootstrap interval"]
    header += ["interval by a paired t", "old verdict"]
    lines += ["", "## The effects that decided", "", *texts.PILOT_EFFECTS, "", *table(header, effects), ""]
    return "\n".join([*lines, "## The history of its rules", "", texts.PILOT_HISTORY]) + "\n"


# --- the page ---


def kinds():
    """{whether they are a paper's: the registered claims}"""
    claims = registry.load()["claims"]
    return {of_paper: [claim for claim in claims if is_papers(claim) == of_paper] for of_paper in (True, False)}


def is_papers(claim):
    return claim["kind"].startswith("a paper's")


def first_tables():
    """All claims, the papers' and the others apart, each below its counts."""
    header = ["claim", "source", "verdict", "effect (95 %)", "p after Holm", "runs that would flip it"]
    header += ["beside it"]
    lines = []
    for of_paper, claims in kinds().items():
        said = {"all": len(claims), "counts": counts(of_paper, *READMES["README.md"])}
        said["replications"] = sum("replication" in claim["kind"] for claim in claims)
        said["thumb"] = sum(claim["paper"] == "a rule of thumb" for claim in claims)
        lines += [texts.COUNTED[of_paper].format(**said), "", *table(header, map(line, claims)), ""]
    return lines + known_signs()


def known_signs():
    """How many of the effects that hold or do not hold have the sign that the pilot had seen."""
    found = {claim["name"]: decisions()[claim["name"]][0] for claim in registry.load()["claims"]}
    firm = [claim for claim in registry.load()["claims"] if found[claim["name"]].verdict in (HOLDS, FAILS)]
    same = [claim for claim in firm if claim["pilot"]["effect"] * measured_of(claim).effect > 0]
    return [texts.KNOWN.format(same=len(same), firm=len(firm)), ""] if firm else []


def table(header, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, *rows]]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def anchor(title):
    """The anchor that a repository host gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def fingerprint():
    """A digest of all that the page is made from: rows, rules, and the programs of this folder; lead.py's are not."""
    files = [*registry.HERE.glob("results/*/*.jsonl"), *registry.HERE.glob("results/*.json*"),
             *registry.HERE.glob("*.json"), *registry.HERE.glob("*.py")]  # fmt: skip
    files = [file for file in files if file.parent.name != "lead" and file.name != "registered_lead.json"]
    parts = [f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in sorted(files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def not_done():
    """What is registered and has no results, in the order of the queue."""
    lines, registered = ["## What is not done", "", *texts.NOT_DONE], registry.load()
    left, parts = [job for job in registry.jobs(registered) if not registry.result(*job).exists()], []
    for part in registered["order"]:
        if count := sum(run in part["runs"] and seed in part["seeds"] for run, seed in left):
            parts.append(f"{part['part']} ({count})")
    if left:
        how = f"of the {len(registry.jobs(registered))} registered runs (`python lab/run.py --registered` makes them)"
        lines.append(f"- {len(left)} {how}: {'; '.join(parts)}.")
    return [*lines, ""]


@functools.cache
def whole():
    """The text of the page and of what `numbers_page` takes out of it."""
    registered, told = registry.load(), set()
    said = {"digest": registry.digest(), "closing": registered["closing"], "claims": len(registered["claims"])}
    said |= {"seeds": " and ".join(map(str, registered["tuning"]["seeds"]))}
    rules = [text.format(**said) for text in texts.RULES]
    header = ["claim", "seeds", "margin", "p, after Holm", "p by sign flips", f"interval of {1 - first_level():.1%}"]
    header += ["p of equivalence, after Holm", "smallest effect seen in 80 of 100, planned"]
    header += ["chance of “equivalent” at 0, planned", "smallest effect seen, as measured", "the runs"]
    power = table(header, map(statistics, registered["claims"]))
    options = [f"- `{word}` is `{options}`" for word, options in registered["options"].items()]
    lines = ["# Claims", "", *texts.INTRO, "", *findings(), *first_tables()]
    lines += ["## How a claim is decided", "", *texts.TASK, "", *seen_lines()]
    lines += [*folded("The rules", rules), *folded("All statistics", [*texts.POWER, "", *power])]
    lines += folded("The commands of all runs", [*commands(), "", "In these", "", *options])
    for claim in registered["claims"]:
        lines += section(claim, told)
    thumb = [*texts.RULES_OF_THUMB, "", *memory_table(), "", *texts.REWARD_SCALE, ""]
    lines += [*best_section(), *lead_section(), *thumb, *pilot_section()]
    lines += ["## The history of the rules", "", *texts.HISTORY_SHORT, "", *folded("All of it", texts.HISTORY)]
    lines += not_done()
    lines.append(f"<!-- made from {fingerprint()} -->")
    return "\n".join(lines) + "\n"


FOLD = re.compile(rf"<details>\n<summary>({'|'.join(MOVED)})</summary>\n\n(.*?)\n\n</details>\n", re.DOTALL)


def build():
    """The text of the page, without the numbers behind it: links stand in their place, or with a claim's verdict."""
    parts = []
    for part in re.split(r"(?m)^(?=## )", whole()):
        title = part.partition("\n")[0].removeprefix("## ")
        for summary, _ in FOLD.findall(part):
            link = f"[{summary}](../{NUMBERS_PAGE}#{anchor(title)}).\n"
            part = FOLD.sub("" if summary == NUMBERS else link, part, count=1)
        parts.append(re.sub(r"\n{3,}", "\n\n", part))
    return "".join(parts)


def numbers_page():
    """What the page links to, under the headings that it has there."""
    lines = ["# The numbers behind the claims", "", *texts.NUMBERS_PAGE, ""]
    for part in re.split(r"(?m)^## ", whole())[1:]:
        if found := FOLD.findall(part):
            lines += [f"## {part.splitlines()[0]}", ""]
            for summary, text in found:
                lines += [f"**{summary}**", "", re.sub(r"\n{3,}", "\n\n", text).strip(), ""]
    text = re.sub(r"\]\((?=#|figures/)", lambda link: "](../../docs/", "\n".join(lines))
    text = text.replace("](../../docs/#", "](../../docs/claims.md#").replace("](../lab/results/", "](")
    return re.sub(r"\]\(\.\./(?!\.\.)", "](../../", text).rstrip() + "\n"


def counts(of_paper, words, colon, comma):
    """How many of the papers' claims, or of the others, have which verdict by their registered rules."""
    found = [decisions()[claim["name"]][0].verdict for claim in kinds()[of_paper]]
    return f"**{comma.join(f'{word}{colon}{n}' for verdict, word in words.items() if (n := found.count(verdict)))}**"


def refresh(tree):
    """Write the page and the counts; without scipy only say whether the page is of these rows and rules."""
    if decide is None:
        current = f"<!-- made from {fingerprint()} -->" in tree.read(PAGE)
        return [] if current else [f"{PAGE}: is not of these rows; {NEEDED}"]
    text = build()
    if there := lead.PART.search(tree.read(PAGE)):  # from rows that decide nothing here: lead.py writes it
        text = lead.PART.sub(lambda _: there[0], text)
    tree.write(PAGE, text)
    tree.write(PILOT_PAGE, pilot_page())
    tree.write(NUMBERS_PAGE, numbers_page())
    for page, signs in READMES.items():
        both = iter([counts(of_paper, *signs) for of_paper in kinds()])  # the papers' stand first
        tree.write(page, COUNTS.sub(lambda found, both=both: next(both, found[0]), tree.read(page)))
    figures = re.findall(r"figures/claims/[\w.-]+\.png", whole() + pilot_page())
    return [f"docs/{path}: python lab/report.py --figures draws it" for path in dict.fromkeys(figures)
            if not (ROOT / "docs" / path).exists()]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="draw the figures of docs/claims.md")
    args = parser.parse_args()
    if decide is None:
        raise SystemExit("scipy decides (pip install scipy)")
    if args.figures:
        import figures

        figures.write()
    for claim in registry.load()["claims"]:
        print(f"{claim['name']:30} {verdict(claim)}")


if __name__ == "__main__":
    main()
