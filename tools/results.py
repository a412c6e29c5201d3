"""The tables of results in docs/*.md, from the rows of the runs behind them: python tools/results.py grpo

The rows are those of lab/results/pages.jsonl; each page says which command made them.
"""

import argparse
import math
import statistics
import sys

from tree import ROOT

sys.path.append(str(ROOT / "lab"))

import unpack

# Options beside the pairs of docs/dpo.md, seed 0 alone: {name of the files: options}
LOSSES = {
    "dpo-pairs": "",
    "dpo-smoothing": "--label_smoothing 0.1",
    "dpo-robust": "--loss robust --label_smoothing 0.1",
    "dpo-ipo": "--loss ipo",
    "dpo-ipo_per_token": "--loss ipo --ipo_per_token",
    "dpo-reference_free": "--reference_free",
    "dpo-nll": "--nll_coef 1",
}


def load(name):
    """{seed: rows} of the runs of this name."""
    runs = unpack.runs(unpack.RESULTS / "pages.jsonl")
    files = {file.removesuffix(".jsonl").rpartition("-seed"): rows for file, rows in runs.items()}
    return {int(seed): rows for (run, _, seed), rows in files.items() if run == name}


def evaluations(rows, name="eval/pass@1"):
    return [row for row in rows if name in row]


def last_steps(rows, name, count, until=math.inf):
    """Mean of a training metric over the last steps up to step `until`."""
    return statistics.mean([row[name] for row in rows if name in row and row["step"] <= until][-count:])


def table(header, rows):
    """Lines of Markdown. Numbers that are not strings yet get three digits."""
    cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [header, *cells]]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]]


def rollout_table(name):
    """The default run of a script that samples: pass@1 at each evaluation."""
    found = []
    for seed, rows in load(name).items():
        first, *later = evaluations(rows)
        scores = [row["eval/pass@1"] for row in (first, *later)]
        lengths = [f"{row['eval/length']:.1f}" for row in (first, later[-1])]
        found.append([seed, *scores, later[-1]["eval/pass@4"], *lengths, f"{rows[-1]['time/total_s']:.1f}"])
        steps = [f"after {row['step']}" for row in later]
    steps[0] += " steps"
    return table(["seed", "pass@1 before", *steps, "pass@4 after", "tokens before", "after", "seconds"], found)


def reward_model_table():
    found = []
    for seed, rows in load("reward_model").items():
        first, *later = evaluations(rows, "eval/accuracy")
        scores = [row["eval/accuracy"] for row in (first, *later)]
        last, training = later[-1], last_steps(rows, "rewards/accuracy", 20)
        margin, seconds = f"{last['eval/margin']:.1f}", f"{rows[-1]['time/total_s']:.1f}"
        found.append([seed, *scores, margin, last["eval/loss"], training, seconds])
    header = ["seed", "pair accuracy before", "after 25 steps", "50", "75", "93", "margin", "loss"]
    return table([*header, "training accuracy, last 20 steps", "seconds"], found)


def learned_reward_table():
    """PPO with the reward models, with and without the KL."""
    models, with_kl, without, found = load("reward_model"), load("ppo-kl"), load("ppo-no_kl"), []
    for seed in sorted(with_kl.keys() & without.keys()):
        row = [seed, evaluations(models[seed], "eval/accuracy")[-1]["eval/accuracy"]]
        row += [row["eval/pass@1"] for row in evaluations(with_kl[seed])]
        best = max(without[seed][1:], key=lambda row: row["reward/accuracy"])
        row += [f"{with_kl[seed][-1]['eval/reward']:.2f}", f"{best['reward/accuracy']:.3f}, {best['step']}"]
        row += [row["eval/pass@1"] for row in evaluations(without[seed])[1:]]
        found.append([*row, f"{without[seed][-1]['eval/reward']:.2f}"])
    header = ["seed", "pair accuracy of the reward model", "pass@1 before", "KL 0.05: after 25 steps", "after 50"]
    header += ["reward", "no KL: best training accuracy, at step", "after 25 steps", "after 50", "reward"]
    return table(header, found)


def critic_table():
    """PPO with the reward models and the KL: the critic starts from the reward model, or with a head of zeros."""
    from_model, zeros, found = load("ppo-critic"), load("ppo-kl"), []
    for seed in sorted(from_model.keys() & zeros.keys()):
        for start, rows in (("reward model", from_model[seed]), ("head of zeros", zeros[seed])):
            before, after = [row["eval/pass@1"] for row in evaluations(rows)[:2]]
            explained = [f"{row['value/explained_variance']:.2f}" for row in rows[1:5]]
            found.append([seed, start, *explained, rows[4]["reward/accuracy"], before, after])
    header = ["seed", "critic from", "explained variance, step 1", "2", "3", "4", "training accuracy, step 4"]
    return table([*header, "pass@1 before", "after 25 steps"], found)


def rounds_table():
    """DPO in rounds: an evaluation ends each."""
    found = []
    for seed, rows in load("dpo").items():
        scored = evaluations(rows)
        made = ", ".join(f"{row['pairs/made']:.0f}" for row in rows if "pairs/made" in row)
        lengths = [f"{row['eval/length']:.1f}" for row in (scored[0], scored[-1])]
        scores = [row["eval/pass@1"] for row in scored]
        found.append([seed, *scores, made, rows[-1]["step"], *lengths, f"{rows[-1]['time/total_s']:.1f}"])
    header = ["seed", "pass@1 before", "after round 1", "2", "3", "4", "pairs of the rounds", "steps"]
    return table([*header, "tokens before", "after", "seconds"], found)


def given_pairs_table():
    plain, nll = load("dpo-pairs"), load("dpo-nll")
    scores = {seed: [evaluations(rows)[0], evaluations(rows)[-1]] for seed, rows in plain.items()}
    found = [
        [seed, *(row["eval/pass@1"] for row in (*scores[seed], evaluations(nll[seed])[-1]))]
        for seed in sorted(plain.keys() & nll.keys())
    ]
    return table(["seed", "pass@1 before", "after", "after, with `--nll_coef 1`"], found)


def losses_table():
    found = []
    for name, options in LOSSES.items():
        rows = load(name)[0]
        last = evaluations(rows)[-1]
        logps = [f"{last_steps(rows, f'logps/{side}', 5):.1f}" for side in ("chosen", "rejected")]
        found.append([f"`{options}`" if options else "(none)", last["eval/pass@1"], last["eval/accuracy"], *logps])
    return table(["options", "pass@1 after", "held-out pairs right", "log p(chosen)", "log p(rejected)"], found)


def passes_table():
    """Many passes over the given pairs; the log-probs of an evaluation are those of the five steps up to it."""
    plain, nll, found = load("dpo-passes")[0], load("dpo-passes_nll")[0], []
    for row, other in zip(evaluations(plain), evaluations(nll), strict=True):
        step, cells = row["step"], []
        for rows, scores in ((plain, row), (nll, other)):
            cells.append(scores["eval/pass@1"])
            if rows is plain:
                cells += [scores["eval/accuracy"], f"{scores['eval/margin']:.2f}"]
            # Those of step 1 are the starting model's: they are taken before the update
            cells += [f"{last_steps(rows, f'logps/{side}', 5, max(step, 1)):.1f}" for side in ("chosen", "rejected")]
        found.append([step, *cells])
    header = ["step", "pass@1", "held-out pairs right", "margin", "log p(chosen)", "log p(rejected)"]
    return table([*header, "with `--nll_coef 1`: pass@1", "log p(chosen)", "log p(rejected)"], found)


def rates_table():
    """LoRA at several learning rates."""
    found = []
    for rate, name in (("1e-4", "lora-1e-4"), ("3e-4", "lora"), ("1e-3", "lora-1e-3")):
        rows = load(name)[0]
        scores = [row["eval/pass@1"] for row in evaluations(rows)]
        found.append([rate, *scores, *(last_steps(rows, f"policy/{what}", 10) for what in ("entropy", "kl_ref"))])
    header = [
        "learning rate",
        "pass@1 before",
        "after 25 steps",
        "after 50",
        "entropy, last 10 steps",
        "KL, last 10 steps",
    ]
    return table(header, found)


PAGES = {page: f"docs/{page}.md" for page in "grpo dr_grpo gspo dcpo dapo ppo dpo reward_model".split()}
PAGES["lora"] = "docs/scale.md"


def tables(page):
    """The tables of a page's section of results, in its order: lists of lines."""
    if page == "ppo":
        return [rollout_table("ppo"), learned_reward_table(), critic_table()]
    if page == "dpo":
        return [rounds_table(), given_pairs_table(), losses_table(), passes_table()]
    if page == "reward_model":
        return [reward_model_table()]
    return [rollout_table(page)] + ([rates_table()] if page == "lora" else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=PAGES)
    print("\n\n".join("\n".join(lines) for lines in tables(parser.parse_args().page)))


if __name__ == "__main__":
    main()
