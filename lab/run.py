"""Runs what docs/claims.md reports, and keeps the deciding metrics in lab/results/claims.

python lab/run.py                         all claims, five seeds: about eight hours of one core
python lab/run.py clip_higher length      these claims only
python lab/run.py --seeds 10 --jobs 4     more seeds, so many runs at a time, each on one core
python lab/run.py length --again          also what has results

Else what is in lab/results/claims is not run again: stop it when you like, and start it again. `report.py` then
decides, and makes the page.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

from claims import ALL, CLAIMS, RUNS

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results" / "claims"
EVERY = 5  # steps that one line of a file of results is the mean of
KEPT = (
    "completion/length completion/length_incorrect completion/truncated reward/accuracy reward/mean policy/entropy "
    "policy/approx_kl policy/clip_fraction_low policy/clip_fraction_high policy/kl_ref policy/kl_old_ref "
    "policy/token_clip_ratio "
    "advantage/zero_groups sampling/rounds sampling/keep_rate dcpo/response_utilization value/explained_variance "
    "reward_part/easy reward_part/medium reward_part/hard rewards/margin logps/chosen logps/rejected pairs/accuracy"
).split()


def read_rows(path):
    """The rows of a JSONL file of results. They are not edited: metrics that had other names get those of today."""
    text = re.sub(r'"policy/clip_(low|high)":', r'"policy/clip_fraction_\1":', path.read_text(encoding="utf-8"))
    return [json.loads(line) for line in text.splitlines()]


def condense(rows):
    """The row before training, and the means of each EVERY steps; at the last of these, the evaluation and the
    completions sampled so far."""
    kept, completions = [], 0
    for part in (rows[:1], *(rows[start : start + EVERY] for start in range(1, len(rows), EVERY))):
        completions += sum(map(sampled, part))
        line = {"step": part[-1]["step"], "completions": completions}
        for name in (*KEPT, *(name for name in part[-1] if name.startswith("share/"))):
            if values := [row[name] for row in part if name in row]:
                line[name] = float(f"{statistics.mean(values):.5g}")
        kept.append(line | evaluation(part[-1]))
    return kept


def sampled(row):
    """Completions sampled in a step: 32 x 8 or 256 x 1 in each round, or 8 of each prompt in a round of pairs."""
    if row.get("pairs/made"):
        return 8 * round(row["pairs/made"] / row["pairs/yield"])
    return 256 * row.get("sampling/rounds", 1) if "completion/length" in row else 0


def evaluation(row):
    return {name: float(f"{value:.5g}") for name, value in row.items() if name.startswith("eval/")}


def run(name, seed):
    """Run one command in runs/claims, unless it has been run, and write its file of results."""
    folder = pathlib.Path("runs") / "claims" / f"{name}-seed{seed}"
    command = f"{RUNS[name].format(seed=seed)} --seed {seed} --output_dir {folder}"
    shutil.rmtree(ROOT / folder, ignore_errors=True)  # of a run that was stopped
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        arguments = [sys.executable, *command.split()]
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            output.seek(0)
            raise SystemExit(f"python {command}\n{output.read()[-2000:]}")
    # Seconds of one core: what else the machine does is not counted.
    header = {"command": f"python {RUNS[name]} --seed {seed}", "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)}
    lines = [header, *condense(read_rows(ROOT / folder / "metrics.jsonl"))]
    RESULTS.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    result(name, seed).write_text(text, encoding="utf-8", newline="\n")
    return header["cpu_seconds"]


def result(name, seed):
    return RESULTS / f"{name}-seed{seed}.jsonl"


def runs_of(claim, seeds):
    """[(name, seed)] of a claim, or of the figure of all algorithms."""
    if claim == "all":
        return [(name, seed) for seed in range(seeds) for name in ALL]
    first = CLAIMS[claim].first_seed
    return [(name, seed) for seed in range(first, first + seeds) for name in CLAIMS[claim].needs()]


def missing(claims, seeds, again):
    """[(name, seed)] of these claims without results, or of all their runs `again`: seed after seed."""
    wanted = {job for claim in claims for job in runs_of(claim, seeds) if again or not result(*job).exists()}
    return sorted(wanted, key=lambda job: (job[1], list(RUNS).index(job[0])))


def without_models(jobs):
    """(runs that make reward models which these jobs lack, the other jobs); results do not hold the models."""
    seeds = sorted({seed for name, seed in jobs if "reward_model" in RUNS[name]})
    lacking = [seed for seed in seeds if not (ROOT / f"runs/claims/reward_model-seed{seed}/model").is_dir()]
    first = {("reward_model", seed) for seed in lacking} | {job for job in jobs if job[0] == "reward_model"}
    return sorted(first), [job for job in jobs if job not in first]


def seconds_of(name):
    """What a run takes: what its other seeds took, or else 100 seconds."""
    headers = [read_rows(path)[0] for path in RESULTS.glob(f"{name}-seed*.jsonl")]
    return statistics.median([header["cpu_seconds"] for header in headers if "cpu_seconds" in header] or [100])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["all", *CLAIMS]  # all: the figure of all algorithms
    parser.add_argument("claims", nargs="*", choices=[[], *names], metavar="NAME", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    models, others = without_models(missing(args.claims or names, args.seeds, args.again))
    jobs = [*models, *others]
    left = sum(seconds_of(name) for name, _ in jobs)
    print(f"{len(jobs)} runs, about {left / 3600:.1f} hours of one core", flush=True)
    count = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for part in (models, others):
            futures = {pool.submit(run, *job): job for job in part}
            for future in concurrent.futures.as_completed(futures):
                name, seed = futures[future]
                took = future.result()
                count, left = count + 1, left - seconds_of(name)
                bar = "#" * (20 * count // len(jobs))
                rest = f"about {max(0, left) / 60 / args.jobs:.0f} min left"
                print(f"[{bar:20}] {count}/{len(jobs)} {name} seed {seed}: {took:.0f} s; {rest}", flush=True)


if __name__ == "__main__":
    main()
