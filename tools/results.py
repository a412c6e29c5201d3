"""The tables of the docs: runs their commands, keeps what they need in lab/results/pages, and prints them.

python tools/results.py grpo              run the commands of docs/grpo.md for five seeds, then print its tables
python tools/results.py grpo --seeds 0    only print them, from the files that are there

Each seed has one core, and as many run at a time as there are cores (`taskset -c 0,1 python tools/results.py dpo`;
where there is no `taskset`, as on Windows and macOS, the system places them). The runs themselves stay in runs/results;
one that ended is not run again. tools/refresh.py puts the tables into the pages.
"""

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import queue
import re
import shutil
import statistics
import subprocess
import sys

from tree import ROOT

RESULTS = ROOT / "lab" / "results" / "pages"
RUNS = pathlib.Path("runs") / "results"
MODEL = f"{RUNS}/reward_model-seed{{seed}}/model"


# {page: {name of the files: command}}
COMMANDS = {name: {name: f"{name}.py"} for name in ("grpo", "dr_grpo", "dapo", "gspo", "dcpo")}
COMMANDS["ppo"] = {
    "ppo": "ppo.py",
    "reward_model": "reward_model.py",
    "ppo-kl": f"ppo.py --reward_model_path {MODEL} --kl_coef 0.05 --gae_lambda 0.95",
    "ppo-no_kl": f"ppo.py --reward_model_path {MODEL}",
    "ppo-critic": f"ppo.py --reward_model_path {MODEL} --critic_path {MODEL} --kl_coef 0.05 --gae_lambda 0.95 "
    "--max_steps 25",
}
COMMANDS["reward_model"] = {"reward_model": "reward_model.py"}
COMMANDS["dpo"] = {
    "dpo": "dpo.py --rounds 4",
    "dpo-pairs": "dpo.py --dataset common/tiny/pairs --eval_dataset embedded",
    "dpo-nll": "dpo.py --dataset common/tiny/pairs --eval_dataset embedded --nll_coef 1",
}
PAGES = {"lora": "scale"}  # those that are not docs/<name>.md
COMMANDS["lora"] = {"lora": "grpo.py --lora_rank 8 --learning_rate 3e-4"}
PAIRS = COMMANDS["dpo"]["dpo-pairs"]
# Of docs/dpo.md, seed 0 alone
LOSSES = {
    "dpo-pairs": "",
    "dpo-smoothing": "--label_smoothing 0.1",
    "dpo-robust": "--loss robust --label_smoothing 0.1",
    "dpo-ipo": "--loss ipo",
    "dpo-ipo_per_token": "--loss ipo --ipo_per_token",
    "dpo-reference_free": "--reference_free",
    "dpo-nll": "--nll_coef 1",
}
FOUR_PASSES = "--num_epochs 4 --eval_every 20"
PASSES = {"dpo-passes": FOUR_PASSES, "dpo-passes_nll": f"{FOUR_PASSES} --nll_coef 1"}
# Of LoRA in docs/scale.md, seed 0 alone
RATES = {f"lora-{rate}": f"grpo.py --lora_rank 8 --learning_rate {rate}" for rate in ("1e-4", "1e-3")}
# What is kept of a row: what the pages and tools/plot.py need
KEPT = ("step", "eval/", "reward/", "rewards/", "logps/", "pairs/", "policy/", "sampling/", "dcpo/", "value/explained")
KEPT += ("completion/length", "time/total_s")


def run_seed(page, seed, cores):
    """Run the commands of a page one after the other on one free core, and keep their rows in lab/results/pages."""
    core, commands = cores.get(), dict(COMMANDS[page])
    if page == "dpo" and seed == 0:
        commands |= {name: f"{PAIRS} {options}" for name, options in (LOSSES | PASSES).items()}
    if page == "lora" and seed == 0:
        commands |= RATES
    for name, command in commands.items():
        folder = RUNS / f"{name}-seed{seed}"
        if not (ROOT / folder / "model").exists():
            command = f"{command.format(seed=seed)} --seed {seed} --output_dir {folder}"
            print(command, flush=True)
            pin = ["taskset", "-c", str(core)] if shutil.which("taskset") else []
            command = [*pin, sys.executable, *command.split()]
            ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows = [
                json.loads(line) for line in (ROOT / folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            ]
            rows[-1]["time/total_s"] = float(re.findall(r" steps, ([0-9.]+) s, in ", ended)[-1])
            kept = [{key: row[key] for key in row if key.startswith(KEPT)} for row in rows]
            lines = "".join(json.dumps(row) + "\n" for row in kept)
            (RESULTS / f"{name}-seed{seed}.jsonl").write_text(lines, encoding="utf-8", newline="\n")
    cores.put(core)


def load(name):
    """{seed: rows} of the files of this name."""
    files = sorted(RESULTS.glob(f"{name}-seed*.jsonl"))
    return {
        int(file.stem.split("-seed")[1]): [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
    }


def evaluations(rows, name="eval/pass@1"):
    return [row for row in rows if name in row]


def last_steps(rows, name, count, until=math.inf):
    """Mean of a training metric over the last steps up to step `until`."""
    return statistics.mean([row[name] for row in rows if name in row and row["step"] <= until][-count:])


def table(header, rows):
    """Lines of Markdown; none without rows. Numbers that are not strings yet get three digits."""
    cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [header, *cells]]
    return [lines[0], "|---" * len(header) + "|", *lines[1:]] if rows else []


def rollout_table(name):
    """The default run of a script that samples: pass@1 at each evaluation."""
    found = []
    for seed, rows in load(name).items():
        first, *later = evaluations(rows)
        scores = [row["eval/pass@1"] for row in (first, *later)]
        lengths = [f"{row['eval/length']:.1f}" for row in (first, later[-1])]
        found.append([seed, *scores, later[-1]["eval/pass@4"], *lengths, f"{rows[-1]['time/total_s']:.1f}"])
        steps = [f"after {row['step']}" for row in later]
    header = ["seed", "pass@1 before", *(steps if found else []), "pass@4 after", "tokens before", "after", "seconds"]
    if found:
        header[2] += " steps"
    return table(header, found)


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
        for rows in [load(name)[0]] if 0 in load(name) else []:
            last = evaluations(rows)[-1]
            logps = [f"{last_steps(rows, f'logps/{side}', 5):.1f}" for side in ("chosen", "rejected")]
            found.append([f"`{options}`" if options else "(none)", last["eval/pass@1"], last["eval/accuracy"], *logps])
    return table(["options", "pass@1 after", "held-out pairs right", "log p(chosen)", "log p(rejected)"], found)


def passes_table():
    """Many passes over the given pairs; the log-probs of an evaluation are those of the five steps up to it."""
    plain, nll, found = load("dpo-passes").get(0, []), load("dpo-passes_nll").get(0, []), []
    for row, other in zip(evaluations(plain), evaluations(nll), strict=False):  # none where one has no file
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
        for rows in [load(name)[0]] if 0 in load(name) else []:
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


def tables(page):
    """The tables of a page's section of results, in its order; those without files are left out."""
    made = {
        "ppo": lambda: [rollout_table("ppo"), learned_reward_table(), critic_table()],
        "dpo": lambda: [rounds_table(), given_pairs_table(), losses_table(), passes_table()],
        "reward_model": lambda: [reward_model_table()],
        "lora": lambda: [rollout_table("lora"), rates_table()],
    }
    return [lines for lines in made.get(page, lambda: [rollout_table(page)])() if lines]


SECTION = re.compile(r"\n## Results\n.*?(?=\n## |\Z)|\n### Results of LoRA\n.*?(?=\n##|\Z)", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def refresh(tree):
    found = []
    for name in COMMANDS:
        path, made = f"docs/{PAGES.get(name, name)}.md", ["\n".join(lines) + "\n" for lines in tables(name)]
        text = tree.read(path) if tree.exists(path) else ""
        section = SECTION.search(text)
        there = TABLE.findall(section[0]) if section else []
        if len(there) != len(made):
            found.append(f"{path}: its section of results has {len(there)} tables, lab/results/pages gives {len(made)}")
        elif made:
            rest = iter(made)
            new = TABLE.sub(lambda _, rest=rest: next(rest), section[0])
            tree.write(path, text[: section.start()] + new + text[section.end() :])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    cores = queue.Queue()
    for core in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count()):
        cores.put(core)
    with concurrent.futures.ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(lambda seed: run_seed(args.page, seed, cores), range(args.seeds)))
    print("\n\n".join("\n".join(lines) for lines in tables(args.page)))


if __name__ == "__main__":
    main()
