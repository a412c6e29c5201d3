"""Runs what is registered, and keeps the deciding metrics.

python lab/run.py                                 what registered.json lists and has no results, in its order
python lab/run.py lab/registered_lead.json        the same of another registration
python lab/run.py --list                          what is left of it; all runs of these two are made
python lab/run.py --jobs 2                        two runs at a time; start it again for those that wait for a tuning
python lab/run.py --again grpo 40                 a run that is made, once more, into runs/lab; its results stay

Results are written into a file for each run, lab/results/registered/NAME-seedN.jsonl; those of the runs that were made
up to now are packed (unpack.py). Stop it when you like, and start it again: a run that was cut off is begun again. Each
start is written down in starts.jsonl beside the results, and is committed with them. Make all runs of a claim in one
checkout: runs by two versions of the code decide nothing. `check.py` decides.
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading

import registry
from registry import ROOT

VERSIONS = ("torch", "transformers")
BUILT_HERE = re.compile(r"--model_name_or_path (runs/lab/\S+)")
PREPARING = threading.RLock()  # what several runs read is made once
EVERY = 5  # steps that one line of a file of results is the mean of


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def condense(rows, names):
    """The row before training, and the means of each EVERY steps; at the last of these, the evaluation and the
    completions sampled so far."""
    kept, completions = [], 0
    for part in (rows[:1], *(rows[start : start + EVERY] for start in range(1, len(rows), EVERY))):
        completions += sum(map(sampled, part))
        line = {"step": part[-1]["step"], "completions": completions}
        for name in names:
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


def execute(command, folder):
    """Run `python COMMAND` into a new folder; returns its exit status, its output and its seconds of one core."""
    shutil.rmtree(ROOT / folder, ignore_errors=True)  # of a run that was stopped
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        arguments = [sys.executable, *command.split(), "--output_dir", folder]
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        # Seconds of one core: what else the machine does is not counted.
        return status, output.read(), round(usage.ru_utime + usage.ru_stime, 1)


def write(path, lines):
    """Write a file of results at once: one that is there is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.with_suffix(".part").write_text(text, encoding="utf-8", newline="\n")
    path.with_suffix(".part").replace(path)


def run_registered(registered, name, seed):
    """Run one registered command in runs/lab, and write its file of results; returns what is said of it.

    A loss that is not finite is a result: its header says so, and registered.json how it counts.
    """
    command = registry.command(registered, name)
    if command is None:
        return f"waits for {registered['runs'][name]['best_of'][0]} and the others of its tuning"
    as_run = command.format(seed=seed)  # a reward model or a base model may be that of the seed
    with PREPARING:
        prepare(registered, as_run, seed)
    folder = f"runs/lab/{name}-seed{seed}"
    header = {"command": f"python {command} --seed {seed}", "registered": registry.digest()} | origin(as_run)
    check_weights(registered, as_run, header)
    write_start({"run": name, "seed": seed} | header)
    status, output, seconds = execute(f"{as_run} --seed {seed}", folder)
    failed = status and "not finite" in output
    if status and not failed:
        return f"FAILED: python {command} --seed {seed}\n{output[-2000:]}"
    header |= {"cpu_seconds": seconds} | ({"failed": output.splitlines()[-1]} if failed else {})
    rows = condense(read_rows(ROOT / folder / "metrics.jsonl"), registered["kept"])
    write(registry.result(name, seed), [header, *rows])
    return f"{seconds:.0f} s" + (", its loss was not finite" if failed else "")


def origin(command):
    """When, and by what: the digest of the code, its commit, whether that has all of it, and the base model if it is
    one that was built here."""

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    found = {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit}
    changed = git("status", "--porcelain", "--", *registry.CODE, str(registry.REGISTERED))
    found["clean"] = bool(commit) and changed == ""
    found |= {"code": registry.code_digest()} | {name: importlib.metadata.version(name) for name in VERSIONS}
    if base := BUILT_HERE.search(command):
        found["base"] = sha256(ROOT / base[1] / "model.safetensors")
    return found


def check_weights(registered, command, header):
    """All runs on a base model that was built here begin with the same weights; another machine may build others."""
    base = BUILT_HERE.search(command)
    for job in registry.jobs(registered) if base else ():
        if not registry.made(*job):
            continue
        other = registry.read(*job)[0]
        there = BUILT_HERE.search(other["command"].format(seed=job[1]))
        if there and there[1] == base[1] and other["base"] != header["base"]:
            raise SystemExit(f"{base[1]}: other weights than those of {registry.result(*job).name}; restore them")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_start(line):
    """Append to the list of starts, before the run: also one that is cut off, or is made again, leaves its line."""
    registry.RESULTS.mkdir(parents=True, exist_ok=True)
    with open(registry.RESULTS / "starts.jsonl", "a", encoding="utf-8", newline="\n") as starts:
        starts.write(json.dumps(line) + "\n")


def prepare(registered, command, seed):
    """Make what a command reads: held-out problems, base models, and the reward model of its seed. All registered files
    that are there have to be the registered ones."""
    for task in re.findall(r"runs/lab/held_out-(\S+)\.jsonl", command):
        path = ROOT / f"runs/lab/held_out-{task}.jsonl"
        if not path.exists():
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, "lab/tasks.py", task], cwd=ROOT, env=environment, check=True)
    for name, digest in registered["files"].items():
        if (ROOT / name).exists() and sha256(ROOT / name) != digest:
            raise SystemExit(f"{name}: not the registered file, its SHA-256 is {sha256(ROOT / name)}; restore it")
    if "reward_model-seed" in command and not (ROOT / f"runs/lab/reward_model-seed{seed}/model").is_dir():
        make = run_again if registry.made("reward_model", seed) else run_registered
        make(registered, "reward_model", seed)  # results do not hold models


def run_all_registered(only_list, workers=1):
    registered = registry.load()
    jobs = registry.jobs(registered)
    if not only_list and not origin("")["clean"]:
        raise SystemExit("the code is in no commit, so that its results would not count: commit it, or stash it")

    stopped = threading.Event()

    def run_chunk(chunk):
        try:
            for i, (name, seed) in chunk:
                if stopped.is_set() or registry.made(name, seed):
                    continue
                said = registry.command(registered, name) if only_list else run_registered(registered, name, seed)
                print(f"{i}/{len(jobs)} {name} seed {seed}: {said}", flush=True)
        except BaseException:
            stopped.set()  # nothing else begins
            raise

    # The runs of a seed one after the other: one of them may read what another has made.
    chunks = [list(chunk) for _, chunk in itertools.groupby(enumerate(jobs, 1), key=lambda numbered: numbered[1][1])]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(run_chunk, chunks))
        finally:
            stopped.set()  # by Ctrl-C, which ends what is running


def run_again(registered, name, seed):
    """Run a registered command once more in runs/lab; nothing is written into the results."""
    as_run = registry.command(registered, name).format(seed=seed)
    prepare(registered, as_run, seed)
    folder = f"runs/lab/{name}-seed{seed}"
    status, output, seconds = execute(f"{as_run} --seed {seed}", folder)
    if status:
        raise SystemExit(f"FAILED: python {as_run} --seed {seed}\n{output[-2000:]}")
    print(f"{seconds:.0f} s; its rows: {folder}/metrics.jsonl")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("registration", nargs="?", default=registry.REGISTERED, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--again", nargs=2, metavar=("NAME", "SEED"))
    args = parser.parse_args()
    with registry.using(args.registration):
        if args.again:
            name, seed = args.again
            run_again(registry.load(), name, int(seed))
        else:
            run_all_registered(args.list, args.jobs)


if __name__ == "__main__":
    main()
