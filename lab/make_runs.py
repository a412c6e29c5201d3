"""Make the runs of a registration, and pack their rows into results/.

    python lab/make_runs.py registered_kl.json             # all runs, or
    python lab/make_runs.py registered_gsm8k.json grpo 0   # one run with one seed

A run that is packed already is not made again, and one with checkpoints goes on, so the command
continues where it was stopped. Start it in a clone without changes: the header of a run names the
commit, and whether it was clean.
"""

import datetime
import json
import subprocess
import sys
import time

import torch
import transformers

import registry
import unpack

ROOT = registry.HERE.parent


def git(*words):
    command = ["git", "-C", ROOT, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def make(registration, run, seed, folder):
    """Make one run in `folder`; return its line of the pack."""
    command = f"python {registration.command(run)} --seed {seed}"
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commit, clean = git("rev-parse", "HEAD")[:12], not git("status", "--porcelain", "-uno")
    start = time.time()
    words = [sys.executable, *command.split()[1:], "--output_dir", str(folder)]
    words += ["--resume"] if folder.exists() else []  # a run that was stopped
    failed = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL).returncode != 0
    rows = [json.loads(line) for line in open(folder / "metrics.jsonl", encoding="utf-8")]
    header = {
        "run": registry.run_name(run, seed),
        "command": command,
        "registered": registration.digest[:12],
        "started": started,
        "commit": commit,
        "clean": clean,
        "code": commit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.time() - start, 1),
    } | ({"failed": True} if failed else {})
    kept = ["step", *registration.content["kept"]]
    columns = {name: [row.get(name) for row in rows] for name in kept}
    return header | {"columns": columns}


def main():
    registration = registry.Registration(registry.HERE / sys.argv[1])
    name = registration.path.stem.removeprefix("registered_")
    chosen = sys.argv[2:]
    for run, seed in registration.jobs():
        if registration.made(run, seed) or chosen not in ([], [run, str(seed)]):
            continue
        folder = ROOT / "runs" / "lab" / name / f"{run}-seed{seed}"
        line = make(registration, run, seed, folder)
        with open(unpack.RESULTS / f"{name}.jsonl", "a", encoding="utf-8") as pack:
            pack.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
