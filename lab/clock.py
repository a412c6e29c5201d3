"""Accuracy in training over seconds, of the runs at their best: python lab/clock.py

The results of registered runs have no clock, but their metrics.jsonl has: the seconds of each step's rollout and update
(of dpo.py's pairs and updates), without the start, evaluations and checkpoints. Run it where the runs were made, before
runs/lab is deleted. It adds to lab/results/seconds.jsonl, one line for each run that did not fail: the seconds until
completions were sampled, and the accuracy of these, as means of five steps (of dpo.py's rounds). report.py compares
them at equal seconds. Nothing is decided by them: the clock is the wall's, on cores that other work may have shared.
"""

import json

import numpy as np

import registry
from run import EVERY, ROOT, write

RESULTS = registry.HERE / "results" / "seconds.jsonl"


def curve(rows):
    """Seconds and accuracies of the completions of one run, from the rows of its metrics.jsonl."""
    seconds, points = 0.0, []
    for row in rows:
        seconds += row.get("time/rollout_s", 0) + row.get("time/pairs_s", 0)
        if "reward/accuracy" in row:
            points.append((seconds, row["reward/accuracy"]))
        if "pairs/accuracy" in row:  # dpo.py samples once a round
            points += [(seconds, row["pairs/accuracy"])] * EVERY
        seconds += row.get("time/update_s", 0)
    means = np.array(points[: len(points) // EVERY * EVERY]).reshape(-1, EVERY, 2).mean(axis=1)
    return {"seconds": means[:, 0].round(2).tolist(), "accuracy": means[:, 1].round(4).tolist()}


def main():
    lines = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()) if RESULTS.exists() else ()
    found = {(line["run"], line["seed"]): line for line in lines}
    for run, seed in registry.jobs(registry.load()):
        path = ROOT / "runs" / "lab" / f"{run}-seed{seed}" / "metrics.jsonl"
        if run.startswith("best-") and "hard" not in run and registry.counts(run, seed) and path.exists():
            if "failed" not in registry.read(run, seed)[0]:
                rows = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]
                found[run, seed] = {"run": run, "seed": seed} | curve(rows)
    write(RESULTS, [found[job] for job in sorted(found)])


if __name__ == "__main__":
    main()
