"""Pairs of runs, one healthy and one with a bug that people write, behind the second half of docs/exercises.md:

python lab/bugs.py                  run what has no results in lab/results/bugs
python lab/bugs.py old_logprobs ... run these pairs again
python lab/bugs.py --figures        draw the figures; tools/refresh.py writes that half

A bug is a text of the script and what stands in its place. The edited script runs in this process, and nothing of it
is kept but its metrics. Both runs have the same seeds, options and data, and so the same model until the first update.
"""

import argparse
import contextlib
import difflib
import io
import json
import pathlib
import re
import shutil
import statistics
import sys
import textwrap
import time
import types
from typing import NamedTuple

import unpack

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS, FIGURES = HERE.parent, HERE / "results" / "bugs", HERE.parent / "docs" / "figures" / "which_curve"
PAGE, TITLE = "docs/exercises.md", "## Which curve has the bug?\n"
VISIBLE = 0.02  # a difference of pass@1 below this is not seen in the reward
SHORT = "--prompts_per_step 16 --max_steps 20 --eval_every 0 --eval_prompts 128"
KEPT = {  # the metrics that a file of results has, with their titles in the figures
    "reward/mean": "reward",
    "completion/length": "tokens of a completion",
    "policy/entropy": "entropy (nats per token)",
    "policy/mean_prob": "mean probability of a token",
    "policy/kl_ref": "KL to the reference, per token",
    "policy/approx_kl": "KL to the old policy, per token",
    "policy/ratio_max": "largest ratio",
    "policy/clip_fraction_low": "share of tokens clipped below",
    "policy/clip_fraction_high": "share of tokens clipped above",
    "optim/loss": "loss",
    "optim/grad_norm": "gradient norm before clipping",
    "advantage/zero_groups": "share of groups whose rewards agree",
    "rollout/logprob_gap": "rollout/logprob_gap",
}
COLOURS = {"A": "#1f77b4", "B": "#d95f02"}
WHEN = {  # of the rows of the steps of a run, the one number in a table
    "step 1": lambda values: values[0],
    "largest": max,
    "smallest": min,
    "mean of the steps": statistics.mean,
    "last five steps": lambda values: statistics.mean(values[-5:]),
}


class Bug(NamedTuple):
    name: str
    title: str
    setting: str  # a name of SETTINGS
    old: str  # stands once in the script
    new: str
    line: str  # a piece of exactly one line of the script: where it goes wrong
    panels: tuple[str, ...]  # metrics in the figure
    buggy: str  # the letter in the figure of the run with the bug, A or B
    tells: tuple[tuple[str, str], ...]  # (metric, when): where the two runs are apart in all seeds, the clearest first
    why: str
    test: str  # of tests/, which fails on the edited script

    @property
    def script(self):
        return SETTINGS[self.setting][0].partition(".py")[0]

    @property
    def seeds(self):
        return SETTINGS[self.setting][1]


SETTINGS = {  # {name: (command, seeds)}
    "default": (f"grpo.py {SHORT}", (0, 1, 6)),
    "default_b": (f"grpo.py {SHORT}", (2, 3, 7)),
    "default_c": (f"grpo.py {SHORT}", (4, 5, 8)),
    "kl": (f"grpo.py {SHORT} --kl_coef 0.2", (0, 1, 2)),
    "minibatches": (f"grpo.py {SHORT} --num_minibatches 4", (0, 1, 2)),
    "temperature": (f"grpo.py {SHORT} --temperature 0.7", (0, 1, 2)),
    "micro_batches": (f"ppo.py {SHORT.replace('16', '128')} --micro_batch_size 16", (0, 1, 2)),
}
MASK = 'batch["loss_mask"] = batch["completion_mask"]'
BUGS = [
    Bug(
        "zero_grad",
        "the gradients are never cleared",
        "default",
        "            optimizer.step()\n            optimizer.zero_grad()\n",
        "            optimizer.step()\n",
        "optimizer.zero_grad()",
        ("reward/mean", "policy/entropy", "policy/kl_ref", "optim/grad_norm"),
        "B",
        (("optim/grad_norm", "last five steps"),),
        "Each step adds its gradient to what is left of all steps before, a second momentum. AdamW does not care about "
        "the size, and the clip of the norm, which works in place, keeps the sum bounded. But the norm does not fall "
        "when the task is solved.",
        "test_suite.py::test_minibatches_are_equal_runs_of_whole_groups_in_draw_order[grpo]",
    ),
    Bug(
        "temperature",
        "the log-probs are taken at temperature 1",
        "temperature",
        "    policy = load_policy(args, tokenizer, accelerator)\n",
        "    policy = load_policy(args, tokenizer, accelerator)\n    policy.temperature = 1.0\n",
        "policy = load_policy(args, tokenizer, accelerator)",
        ("reward/mean", "policy/entropy", "policy/mean_prob", "rollout/logprob_gap"),
        "A",
        (("rollout/logprob_gap", "step 1"), ("policy/entropy", "step 1"), ("policy/mean_prob", "step 1")),
        "The completions are drawn at temperature 0.7, and the loss is that of the distribution at 1, which drew "
        "nothing. In step 1 both runs are the same model with the same samples: what differs there is the measure, "
        "not the policy. The first ratio is 1 all the same, as old and new log-probs come from one forward. The gap "
        "between the log-prob at sampling and in training needs no healthy twin: it is a rounding error, or there is "
        "a bug. At temperature 1, the default, there is nothing to see: the two runs compute the same.",
        "test_whole_updates.py::test_group_relative[grpo-GRPO-]",
    ),
    Bug(
        "order",
        "the advantages are in another order than the rows",
        "default_c",
        "advantages.masked_fill(zero, 0).view(-1, 1)",
        "advantages.masked_fill(zero, 0).T.reshape(-1, 1)",
        "advantages.masked_fill(zero, 0).view(-1, 1)",
        ("reward/mean", "completion/length", "policy/entropy", "optim/grad_norm"),
        "A",
        (("reward/mean", "last five steps"), ("completion/length", "last five steps")),
        "As if `repeat` had been written for `repeat_interleave`: a row gets the advantage of a row of another prompt, "
        "which is noise. This one everybody finds.",
        "test_grpo.py::test_each_group_has_its_own_mean_and_deviation",
    ),
    Bug(
        "old_logprobs",
        "the old log-probs are those of the moment",
        "minibatches",
        'old_logprobs = micro.get("old_logprobs", logprobs.detach())',
        "old_logprobs = logprobs.detach()",
        'old_logprobs = micro.get("old_logprobs", logprobs.detach())',
        ("reward/mean", "policy/approx_kl", "policy/ratio_max", "policy/clip_fraction_low"),
        "B",
        (
            ("policy/ratio_max", "largest"),
            ("policy/approx_kl", "largest"),
            ("policy/clip_fraction_low", "largest"),
            ("rollout/logprob_gap", "mean of the steps"),
            ("reward/mean", "mean of the steps"),
        ),
        "They are computed again in each update, so every ratio is 1, no clip ever acts, and the importance weight of "
        "the samples is gone. With one update for each rollout that is right; with four, all these metrics must move. "
        "A run that is never clipped is not a calm one: ask first whether it can be clipped at all. Here it learns "
        "faster for it.",
        "test_whole_updates.py::test_group_relative[grpo-GRPO-]",
    ),
    Bug(
        "eos",
        "the stop token is masked",
        "default",
        MASK,
        f'{MASK} & (batch["completions"] != tokenizer.eos_token_id)',
        MASK,
        ("reward/mean", "completion/length", "policy/entropy", "policy/mean_prob"),
        "A",
        (("policy/entropy", "step 1"), ("policy/mean_prob", "step 1"), ("optim/grad_norm", "step 1")),
        "What `completions != pad` does where pad and end are one token. The model knows how to stop, and nothing "
        "unlearns it here. Two settings made to show it, a reward for short answers, and one for stopping at all from "
        "a model that hardly ever does, did not (one seed each, not kept). The mask lacks a token of each completion, "
        "a sure one, so in step 1 the same model with the same samples has a higher entropy. Nobody sees that without "
        "a healthy twin. It takes a test.",
        "test_whole_updates.py::test_group_relative[grpo-GRPO-]",
    ),
    Bug(
        "kl_sign",
        "the KL term has the wrong sign",
        "kl",
        "losses = losses + args.kl_coef * kl",
        "losses = losses - args.kl_coef * kl",
        "losses = losses + args.kl_coef * kl",
        ("reward/mean", "policy/entropy", "policy/kl_ref", "optim/loss"),
        "B",
        (("optim/loss", "last five steps"), ("optim/loss", "smallest"), ("optim/grad_norm", "largest")),
        "The policy is paid for leaving the reference. At this coefficient and over so few steps that is little beside "
        "the reward, and the KL of a healthy run grows as well. With one update for each rollout and a mean over rows "
        "the rest of the loss is 0, so `optim/loss` is the coefficient times the KL: it cannot be negative. pass@1 "
        "ends higher with the bug, as this coefficient holds the healthy run back.",
        "test_grpo.py::test_oracle_values",
    ),
    Bug(
        "micro_batches",
        "a mean over each micro-batch, and the mean of these",
        "micro_batches",
        'weights = token_weights(mask, micro["totals"], args)',
        "weights = mask / mask.sum() / len(micro_batches)",
        'weights = token_weights(mask, micro["totals"], args)',
        ("reward/mean", "completion/length", "policy/entropy", "optim/grad_norm"),
        "B",
        (("optim/grad_norm", "step 1"), ("optim/loss", "step 1")),
        "Rows are sorted by length before they are cut into micro-batches, so a token of a short completion weighs "
        "more than one of a long completion, and another `--micro_batch_size` is another loss. Run one step with "
        "two sizes: `optim/grad_norm` must be the same but for rounding.",
        "test_suite.py::test_gradient_is_invariant_to_micro_batches[ppo-0.04-{'micro_batch_size': 4}]",
    ),
    Bug(
        "top_p",
        "sampled with top-p 0.9, scored with the whole distribution",
        "default_b",
        "args.group_size, args.temperature, 1.0, seed, args)",
        "args.group_size, args.temperature, 0.9, seed, args)",
        "batch = rollout(policy, prompts, args.group_size, args.temperature, 1.0, seed, args)",
        ("reward/mean", "completion/length", "policy/entropy", "rollout/logprob_gap"),
        "A",
        (
            ("rollout/logprob_gap", "mean of the steps"),
            ("rollout/logprob_gap", "step 1"),
            ("reward/mean", "last five steps"),
        ),
        "The gap is small, because top-p changes a probability only where it cuts something off, and a model that is "
        "sure leaves it little to cut. But it is no rounding error, as the healthy run shows. The curve of the reward "
        "is the better one because it is measured without the tail of the distribution; the evaluation, which samples "
        "all of it, finds no gain.",
        "test_suite.py::test_each_step_and_process_samples_with_a_seed_of_its_own[grpo]",
    ),
    Bug(
        "batch",
        "one mean and one deviation for the whole batch",
        "default_c",
        "groups = rewards.double().view(-1, args.group_size)",
        "groups = rewards.double().view(1, -1)",
        "groups = rewards.double().view(-1, args.group_size)",
        ("reward/mean", "policy/entropy", "advantage/zero_groups", "optim/grad_norm"),
        "B",
        (("optim/grad_norm", "last five steps"),),
        "A hard prompt gets negative advantages and an easy one positive ones, whatever the completion. As more and "
        "more groups agree, the gradient should become small, and here it does not. A check that needs no twin: a "
        "reward that depends on the prompt alone. Nothing can be learnt from it, and all advantages must be exactly 0.",
        "test_grpo.py::test_groups_are_adjacent_rows",
    ),
    Bug(
        "padding",
        "the padding is in the loss",
        "default_b",
        MASK,
        'batch["loss_mask"] = torch.ones_like(batch["completion_mask"])',
        MASK,
        ("reward/mean", "completion/length", "policy/entropy", "policy/mean_prob"),
        "B",
        (("policy/entropy", "step 1"), ("policy/mean_prob", "step 1"), ("optim/grad_norm", "step 1")),
        "The log-probs of padding are 0 here and have no gradient, so it only counts: each row is divided by the width "
        "of the tensor, and each metric per token is diluted. What reads as a policy that is surer is a mean over "
        "tokens that nobody sampled. In step 1 the two models are the same, and so must be their entropies.",
        "test_whole_updates.py::test_group_relative[grpo-GRPO-]",
    ),
]


def edited(bug, source):
    """The source of a script with the bug."""
    if (count := source.count(bug.old)) != 1:
        raise ValueError(f"{bug.name}: its old text must stand once in {bug.script}.py, and stands {count} times")
    return source.replace(bug.old, bug.new)


def load(script, source):
    """A script as a module, from the source given; `main` has not run."""
    module = sys.modules[script] = types.ModuleType(script)
    exec(compile(source, f"{script}.py", "exec"), vars(module))
    return module


def result(name, seed):
    return RESULTS / f"{name}-seed{seed}.jsonl"


def packed(name, seed):
    """The header of a run, and its rows."""
    return unpack.runs(RESULTS.with_suffix(".jsonl"))[result(name, seed).name]


def condensed(rows):
    """The metrics of KEPT and of the evaluations, in five digits."""
    names = [*KEPT, "eval/pass@1"]
    return [{"step": row["step"]} | {name: float(f"{row[name]:.5g}") for name in names if name in row} for row in rows]


def run(setting, seed, bug=None):
    """Run a setting, healthy or with a bug, and write its file of results; returns the seconds of one core."""
    from run import write

    options = f"{SETTINGS[setting][0]} --seed {seed}"
    script, *words = options.split()
    source = (ROOT / script).read_text(encoding="utf-8")
    module = load(script.removesuffix(".py"), edited(bug, source) if bug else source)
    folder = ROOT / "runs" / "bugs" / f"{bug.name if bug else setting}-seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        module.main([*words, "--output_dir", str(folder)])
    seconds = round(time.process_time() - start, 1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    header = {"command": f"python {options}", "bug": bug and bug.title, "cpu_seconds": seconds}
    write(result(f"with-{bug.name}" if bug else setting, seed), [header, *condensed(rows)])
    return seconds


def rows_of(name, seed):
    """The rows of a run without its header."""
    return packed(name, seed)[1:]


def twins(bug):
    """The names of the healthy run and of the one with the bug."""
    return bug.setting, f"with-{bug.name}"


def value(name, seed, metric, when):
    return WHEN[when]([row[metric] for row in rows_of(name, seed) if metric in row])


def final(name, seed):
    """pass@1 after the last step."""
    return rows_of(name, seed)[-1]["eval/pass@1"]


def mean_final(bug, name):
    return statistics.mean(final(name, seed) for seed in bug.seeds)


def difference(bug):
    """What the bug changes in the mean pass@1 of the seeds."""
    healthy, broken = (mean_final(bug, name) for name in twins(bug))
    return broken - healthy


def digits(values):
    return ", ".join("0" if value == 0 else f"{value:.3g}" for value in values)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]


def measured(bug):
    """The table of an answer: what gives the bug away, and pass@1; the values of all seeds."""
    rows = []
    for metric, when in bug.tells:
        values = ([value(name, seed, metric, when) for seed in bug.seeds] for name in twins(bug))
        rows.append([f"`{metric}`, {when}", *map(digits, values)])
    ends = (", ".join(f"{final(name, seed):.3f}" for seed in bug.seeds) for name in twins(bug))
    rows.append(["`eval/pass@1` at the end", *ends])
    return table(["by seed", "healthy", "with the bug"], rows)


def diff(bug):
    old, new = (textwrap.dedent(text).strip("\n").splitlines() for text in (bug.old, bug.new))
    return [line[0] + line[2:] for line in difflib.ndiff(old, new) if line[0] != "?"]


def named(test):
    """The function of a test, and its file."""
    file, _, function = test.partition("::")
    return f"`{function.partition('[')[0]}` (tests/{file})"


def of_its_own(setting):
    """What the command of a setting has that the short run of grpo.py has not."""
    words = SETTINGS[setting][0].removeprefix("grpo.py ")
    for option in re.findall(r"--\w+ \d+", SHORT):
        words = re.sub(rf"{option}\b", "", words)
    return " ".join(words.split())


def section(number, bug):
    """A pair of runs, its figure, and the answer behind a click."""
    options = of_its_own(bug.setting)
    return [
        f"### Pair {number}" + (f": `{options}`" if options else ""),
        "",
        f"![A and B of pair {number}: {', '.join(bug.panels)}](figures/which_curve/pair{number}.png)",
        "",
        "<details><summary>Answer</summary>",
        "",
        f"**{bug.buggy}: {bug.title}.** In [`{bug.line}`](../{bug.script}.py):",
        "",
        "```diff",
        *diff(bug),
        "```",
        "",
        *measured(bug),
        "",
        textwrap.fill(f"{bug.why} Caught by {named(bug.test)}.", 118, break_on_hyphens=False),
        "",
        "</details>",
        "",
    ]


def summary():
    """A row for each bug: pass@1 of both runs, their difference, and the metric that shows it."""
    rows = []
    for number, bug in enumerate(BUGS, 1):
        metric, when = bug.tells[0]
        cells = [number, bug.title, *(f"{mean_final(bug, name):.3f}" for name in twins(bug)), f"{difference(bug):+.3f}"]
        rows.append([*cells, f"`{metric}`, {when}"])
    return table(["pair", "bug", "pass@1 healthy", "with the bug", "difference", "seen in"], rows)


INTRO = (
    TITLE
    + """
**{hidden} of the {all} bugs below change pass@1 by less than {limit}.** They are bugs that people write, and by its
reward a run with one of these looks well. What gives it away is another curve, or a test. (The task is easy: healthy
runs end at {low:.2f} to {high:.2f}.)

Each pair is two runs of one script with the same options, data and seeds: one as it stands here, the other with one
bug, of one or two lines. Thin lines are the three seeds, the thick line is their mean, and the first curve is the
reward. Say which run has the bug, A or B, and what the bug is; then open the answer, which has the edit, the numbers,
and the test of this project that fails on it.

Where a bug needs other options to act, they stand in the title of its pair; all else is as in the first command, which
takes some ten seconds. [bugs.py](../lab/bugs.py) has the pairs as data:

```bash
python {short}
python lab/bugs.py                  # runs what has no results in lab/results/bugs
python lab/bugs.py --figures        # draws the figures; tools/refresh.py writes this section
```
"""
)

END = """### What the reward shows

<details><summary>All answers in one table, and what follows from them</summary>

{table}

pass@1 is the mean of three seeds, on 128 held-out problems with eight completions each; two seeds of a healthy setting
differ by up to {spread:.3f}. {hidden} of the {all} bugs change it by less than {limit}, and {ruined} ruins it: on a
task that can be learnt, it is enough that the gradient points roughly the right way.

What to look at, in a script of your own:

- **Numbers that have a known value.** `rollout/logprob_gap` is a rounding error. With one update for each rollout
  `policy/ratio_max` is 1, and with several it is not. A loss that is a KL is not negative. A gradient without an
  advantage is 0.
- **Step 1.** Before the first update two versions of a script have the same model, and the same samples and rewards
  unless sampling was changed. Whatever else differs in the first row of `metrics.jsonl` is due to the change.
- **Two sizes of a micro-batch, or one process and two.** Nothing in that row may depend on it.
- **A test,** where no number tells: the stop token. [Here](corrections.md#known-failures-and-our-tests) are such tests.

</details>
"""


def build():
    """The text of that half of the page."""
    lines = []
    for number, bug in enumerate(BUGS, 1):
        lines += section(number, bug)
    ends = [[final(name, seed) for seed in seeds] for name, (_, seeds) in SETTINGS.items()]
    spread = max(max(values) - min(values) for values in ends)
    hidden = sum(abs(difference(bug)) < VISIBLE for bug in BUGS)
    ruined = sum(difference(bug) < -0.1 for bug in BUGS)
    numbers = dict(short=f"grpo.py {SHORT}", spread=spread, hidden=hidden, all=len(BUGS), limit=VISIBLE, ruined=ruined)
    numbers |= dict(low=min(map(min, ends)), high=max(map(max, ends)))
    return "\n".join([INTRO.format(**numbers), *lines, END.format(table="\n".join(summary()), **numbers)])


def refresh(tree):
    tree.write(PAGE, tree.read(PAGE).partition(TITLE)[0] + build())
    return []


def draw():
    sys.path.append(str(ROOT / "tools"))
    import plot  # matplotlib is an extra

    FIGURES.mkdir(parents=True, exist_ok=True)
    plot.COLOURS |= COLOURS
    for number, bug in enumerate(BUGS, 1):
        names = dict(zip("AB" if bug.buggy == "B" else "BA", twins(bug), strict=True))
        runs = {letter: [rows_of(names[letter], seed) for seed in bug.seeds] for letter in "AB"}
        figure = plot.panels(runs, {metric: KEPT[metric] for metric in bug.panels})
        for axis in figure.axes:
            axis.set_xticks(range(0, 21, 5))
            for line in axis.lines:
                line.set_linestyle("--" if line.get_color() == COLOURS["B"] else "-")  # A shows where B lies on it
            for letter in axis.texts:
                letter.set(fontsize=12, fontweight="bold")
        figure.savefig(FIGURES / f"pair{number}.png", dpi=70, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs whose pairs are run again [what is missing]")
    parser.add_argument("--figures", action="store_true", help="draw the figures")
    args = parser.parse_args()
    if args.figures:
        return draw()
    sys.path.insert(0, str(ROOT))
    chosen = [bug for bug in BUGS if not args.names or bug.name in args.names]
    if len(chosen) < len(args.names):
        parser.error(f"the bugs are {', '.join(bug.name for bug in BUGS)}")
    jobs = [(setting, None) for setting in SETTINGS if any(bug.setting == setting for bug in chosen)]
    for setting, bug in jobs + [(bug.setting, bug) for bug in chosen]:
        for seed in SETTINGS[setting][1]:
            name = f"with-{bug.name}" if bug else setting
            if args.names:
                print(f"{name} seed {seed}: {run(setting, seed, bug):.0f} s", flush=True)


if __name__ == "__main__":
    main()
