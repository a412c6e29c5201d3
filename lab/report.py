"""Decides the claims, for docs/claims.md and the READMEs; draws its figures: python lab/report.py [--figures]

The rules (docs/claims.md has their history):

- An effect is the mean over seeds of a difference of two runs of the same seed, with a bootstrap interval of 95 %
  (10,000 draws of as many seeds, with replacement). It holds if the whole interval is on the claimed side of the
  margin; it does not hold if the whole interval is on the other side; and else it inconclusive.
- A claim holds if all the effects that decide it hold; it does not hold if one of them does not; and else it cannot be
  seen here. The other effects are reported and decide nothing.
"""

import argparse
import functools
import re
import sys

import numpy as np

from claims import ALL, CLAIMS
from run import RESULTS, ROOT, read_rows

PAGE, FIGURES = "docs/claims.md", ROOT / "docs" / "figures" / "claims"
HOLDS, FAILS, UNSEEN, OPEN = "holds", "does not hold", "inconclusive", "not decided yet"
CHINESE = {HOLDS: "成立", FAILS: "不成立", UNSEEN: "在这里看不出来", OPEN: "还没有定论"}
READMES = {"README.md": ({word: word for word in CHINESE}, ": ", ", "), "README.zh.md": (CHINESE, "：", "，")}
COUNTS = re.compile(rf"\*\*(?:{'|'.join([*CHINESE, *CHINESE.values()])})[:：] ?\d+\b.*?\*\*")


def load(name):
    """{seed: rows} of a run: step 0, and every five steps."""
    files = RESULTS.glob(f"{name}-seed*.jsonl")
    return {int(file.stem.rpartition("-seed")[2]): with_sums(read_rows(file)[1:]) for file in sorted(files)}


def with_sums(rows):
    """The rows with what other metrics give: clipped tokens of both sides; accuracy of pairs as the others name it."""
    for row in rows:
        if "policy/clip_fraction_low" in row:
            row["policy/clipped"] = row["policy/clip_fraction_low"] + row["policy/clip_fraction_high"]
        if "pairs/accuracy" in row:
            row["reward/accuracy"] = row["pairs/accuracy"]
    return rows


def value(rows, metric, over, completions=None):
    """One number of a run, as `Effect.over` says; `completions`: those of the cheaper run."""
    if over in ("start", "end"):
        return [row[metric] for row in rows if metric in row][0 if over == "start" else -1]
    if over == "late":
        kept = [row for row in rows if row["step"] > rows[-1]["step"] / 2]
    else:
        kept = [row for row in rows if 0.75 * completions <= row["completions"] <= completions]
    return float(np.mean([row[metric] for row in kept if metric in row]))


def differences(effect):
    """The difference of each seed that both runs have."""
    runs, (against, _, start) = load(effect.run), (effect.against or "").partition(":")
    others = load(against) if against else {}
    found = []
    for seed in sorted(runs.keys() & others.keys() if against else runs):
        mine, other = runs[seed], others.get(seed, runs[seed])
        completions = min(mine[-1]["completions"], other[-1]["completions"])
        before = value(other, effect.metric, start or effect.over, completions) if against else 0.0
        found.append(value(mine, effect.metric, effect.over, completions) - before)
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


def evidence(effect):
    """A row of the table of a claim: what is compared, the expectation, the effect with its interval, the verdict."""
    values = differences(effect)
    over = {"late": "second half of the steps", "end": "at the end", "start": "at the start"}
    over = over.get(effect.over, "at equal completions")
    what = f"`{effect.metric}`, {over}: {effect.run}" + (f" - {effect.against}" if effect.against else "")
    expected = f"> {effect.least:g}" if effect.least is not None else f"< {effect.most:g}"
    if len(values) < 5:
        return [what, expected, f"{len(values)} of 5 seeds", ""]
    low, high = interval(values)
    decided = verdict(effect, values)
    return [what, expected, f"{values.mean():+.3g} ({low:+.3g} to {high:+.3g}), {len(values)} seeds",
            f"**{decided}**" if effect.decides else decided]  # fmt: skip


def table(header, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, *rows]]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def levels(claim):
    """A row for each run that has its seeds: means in the second half of the steps, and pass@1 at the end."""
    metrics = [*((metric, "late") for metric in claim.curves), ("eval/pass@1", "end")]
    rows = []
    for name in [*claim.runs, *sorted(claim.needs() - {*claim.runs})]:
        seeds = list(load(name).values())
        logged = {metric for run in seeds for row in run for metric in row}
        if len(seeds) >= 5:
            cells = (f"{np.mean([value(run, m, o) for run in seeds]):.3g}" if m in logged else "" for m, o in metrics)
            rows.append([name, *cells])
    return table(["mean of the seeds", *(f"`{m}`" + (" at the end" if o == "end" else "") for m, o in metrics)], rows)


def section(claim):
    """Half a screen on one claim."""
    rows = [evidence(effect) for effect in claim.effects]
    lines = [f"## {claim.title}", "", f"{claim.paper}.", ""]
    lines += [f"**Verdict: {decide(claim) or 'not decided yet: runs are missing'}.** {claim.why}".strip(), ""]
    lines += table(["compared", "expected", "measured", "verdict"], rows)
    lines += ["", *levels(claim)]
    drawn = claim.curves and any(load(name) for name in claim.runs)
    lines += ["", f"![{claim.title}](figures/claims/{claim.name}.png)", ""] if drawn else [""]
    lines += [
        "```bash",
        f"python lab/run.py {claim.name}    # runs of each seed: {len(claim.needs())}",
        "```",
        "",
    ]
    return lines + ([f"Try next: {claim.more}", ""] if claim.more else [])


INTRO = """# Claims

What the papers claim, measured with the scripts of this repository on the second embedded task, `embedded-hard`
([common/tiny_hard/build.py](../common/tiny_hard/build.py)): sums of two to eight terms, without those of five, learnt
from a careless teacher. (The claims on learned rewards and on DPO are measured on the first task.) A run is 80 steps of
32 prompts x 8 completions with four optimizer steps each, at learning rate 1e-4, if its command does not say otherwise;
[claims.py](../lab/claims.py) has the command of each name below, such as `grpo-noise`. A claim that does not hold here
may well hold for large models: the page says what a small one shows, and with which settings.

The claims and their runs are listed as data in that file, and [report.py](../lab/report.py) has the rules that decide
them. Some were changed after data: see [the history of the rules](#the-history-of-the-rules). An effect is the mean
over five seeds of the difference of two runs of the same seed, with a bootstrap interval of 95 %. It holds if the whole
interval is on the claimed side of the margin, it does not hold if the whole interval is on the other side, and else it
inconclusive. A claim holds if all effects in bold hold, and does not hold if one of them does not. With five
seeds such an interval is too narrow: of means of normal values it covers 84 %. So do not rely on an effect whose
interval ends near its margin, and run more seeds.

The second table of a claim has the means of its runs, over the second half of the steps and, for pass@1, at the end.

## The history of the rules

`git show` has each of these commits.

- `length`: before any data (d8f2897) two effects decided, grpo - dr_grpo, the paper's own comparison, and grpo -
  dr_grpo-std. The commit that brought the first data (a7dcc4b) made grpo - dr_grpo a number that is only reported. With
  +1.04 (+0.81 to +1.27) against its margin of 1 it is inconclusive. **Under the rule that stood, so is the claim: the
  table's "holds" rests on the changed rule.**
- `critic`: the same commit did the same to `value/explained_variance` > 0.3 (0.21). The verdict is the same under both.
- The same commit is the first that has report.py, whose text says that its rules were written before the runs.
- `deviation`: four rows were added after its seed 0 had run; they are only reported. Rungs of `ladder` too came after
  seeds of other rungs.
- `sequence_ratio`: a run with a wider band, gspo-wide, was planned (8d93c24) and dropped (5635a9f). So the verdict is
  about the paper's band, made for long completions, on these short ones; it says nothing about other bands.

```bash
python lab/run.py              # runs what is missing: a night on one core
python lab/run.py length --again --seeds 10     # one claim, also what has results
python lab/report.py --figures # draws the figures
python tools/refresh.py        # writes this page, and the verdicts in the READMEs
```
"""


@functools.cache
def build():
    """The text of the page."""
    verdicts = []
    for claim in CLAIMS.values():
        title = f"[{claim.title}](#{anchor(claim.title)})"
        verdicts.append([title, re.split("[,:;]", claim.paper)[0], decide(claim) or "runs are missing"])
    lines = [INTRO, *table(["claim", "paper", "verdict"], verdicts), ""]
    lines += ["![all algorithms on the hard task](figures/claims/all.png)", ""]
    seeds = ", ".join(f"{name} {len(load(name))}" for name in ALL)
    lines += [f"All algorithms on `embedded-hard`, by `python lab/run.py all`. Seeds: {seeds}.", ""]
    for claim in CLAIMS.values():
        lines += section(claim)
    return "\n".join(lines)


def anchor(title):
    """The anchor that a repository host gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def counts(words, colon, comma):
    """How many claims have which verdict, as a README says it."""
    found = [decide(claim) or OPEN for claim in CLAIMS.values()]
    return f"**{comma.join(f'{word}{colon}{n}' for verdict, word in words.items() if (n := found.count(verdict)))}**"


def refresh(tree):
    tree.write(PAGE, build())
    for page, signs in READMES.items():
        tree.write(page, COUNTS.sub(counts(*signs), tree.read(page)))
    return []


def write_figures():
    sys.path.append(str(ROOT / "tools"))
    import plot

    FIGURES.mkdir(exist_ok=True)
    runs = {name: seeds for name in ALL if (seeds := list(load(name).values()))}
    titles = {name: plot.TITLES[name] for name in ("reward/accuracy", "policy/entropy", "completion/length")}
    figure = plot.panels(runs, titles, ["completions"])
    figure.savefig(FIGURES / "all.png", dpi=80, metadata={"Software": None})
    for claim in CLAIMS.values():
        runs = {name: list(load(name).values()) for name in claim.runs}
        runs = {name: seeds for name, seeds in runs.items() if seeds}
        if claim.curves and runs:
            titles = {metric: plot.TITLES.get(metric, metric) for metric in claim.curves}
            figure = plot.panels(runs, titles, claim.axes)
            figure.savefig(FIGURES / f"{claim.name}.png", dpi=80, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="draw the figures of docs/claims.md")
    if parser.parse_args().figures:
        write_figures()
    for claim in CLAIMS.values():
        print(f"{decide(claim) or OPEN:20} {claim.title}")


if __name__ == "__main__":
    main()
