"""What was registered before the runs, and the rows that they left.

A registration was committed before its first run and is never edited. results/ has its runs, each
with a header: the command, the code and the digest of the registration that it ran under. A run
whose header says anything but what is registered decides nothing.
"""

import hashlib
import json
import math
import pathlib
import subprocess

import numpy as np

import unpack

HERE = pathlib.Path(__file__).resolve().parent
CLAIMS = HERE / "registered.json"
LEAD = HERE / "registered_lead.json"
KL = HERE / "registered_kl.json"
GSM8K = HERE / "registered_gsm8k.json"
GSM8K_LONGER = HERE / "registered_gsm8k_longer.json"

HOLDS = "holds"
FAILS = "does not hold"
SAME = "equivalent"
UNSEEN = "inconclusive"
UNTESTED = "not tested"
OPEN = "not decided"


class Registration:
    """The registration at `path`, and the rows of its runs."""

    def __init__(self, path, results=unpack.RESULTS):
        content = path.read_bytes()
        name = path.stem.removeprefix("registered_")
        self.path = path
        self.digest = hashlib.sha256(content).hexdigest()
        self.content = json.loads(content)
        self.runs = unpack.runs(results / f"{name}.jsonl")

    # --- runs ---

    def jobs(self):
        """Return [(run, seed)] of all registered runs, each once."""
        jobs = {}
        for part in self.content["order"]:
            for seed in part["seeds"]:
                for run in part["runs"]:
                    jobs[run, seed] = None
        return list(jobs)

    def made(self, run, seed):
        return run_name(run, seed) in self.runs

    def header(self, run, seed):
        return self.runs[run_name(run, seed)][0]

    def rows(self, run, seed):
        return self.runs[run_name(run, seed)][1:]

    def outcome(self, run, seed, effect):
        """Return the number of a run that an effect compares, given by its `metric` and `over`.

        A run that failed (a loss that was not finite) scores 0 in the metrics that the registration
        lists, and nan in all others, since its rows end early.
        """
        if self.header(run, seed).get("failed"):
            is_zero = effect["metric"] in self.content["statistics"]["failed_is_0"]
            return 0.0 if is_zero else math.nan
        return value(self.rows(run, seed), effect["metric"], effect["over"])

    # --- commands ---

    def command(self, run):
        """Return the registered command of a run, without its seed.

        It is None if a tuning chooses the command, and some of that tuning's runs are missing.
        """
        entry = self.content["runs"][run]
        if isinstance(entry, dict):
            chosen = self.best(entry["best_of"])
            if chosen is None:
                return None
            task = entry.get("task", "{hard}")
            entry = self.content["runs"][chosen].replace("{hard}", task)
        for word, text in self.content["options"].items():
            entry = entry.replace(word, text)
        return entry

    def best(self, runs):
        """Return the run with the highest mean over the tuning seeds, the first one at a tie."""
        tuning = self.content["tuning"]
        means = {}
        for run in runs:
            if not all(self.counts(run, seed) for seed in tuning["seeds"]):
                return None
            means[run] = np.mean([self.outcome(run, seed, tuning) for seed in tuning["seeds"]])
        return max(means, key=means.get)

    def fault(self, run, seed):
        """Return why a run does not count, in words, or "" if it does."""
        header = self.header(run, seed)
        if not self.digest.startswith(header["registered"]):
            return "run under other rules"
        if header["command"] != f"python {self.command(run)} --seed {seed}":
            return "run with another command"
        if not header["clean"]:
            return "run with uncommitted code"
        if header["started"][:10] > self.content["closing"]:
            return "started after the closing date"
        return ""

    def counts(self, run, seed):
        """Return whether a run was made as registered."""
        return self.made(run, seed) and not self.fault(run, seed)

    def was_before(self, commit):
        """Return whether the last change of the registration is an ancestor of a commit."""
        git = ["git", "-C", str(self.path.parent)]
        log = [*git, "log", "-1", "--format=%H", "--", self.path.name]
        last = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
        ancestor = [*git, "merge-base", "--is-ancestor", last, commit]
        return subprocess.run(ancestor, capture_output=True).returncode == 0


def run_name(run, seed):
    return f"{run}-seed{seed}.jsonl"


def value(rows, metric, over):
    """Return one number of a run, or nan if no row has the metric. `over` is one of:

    start, end    the first value, the last value
    all, late     the mean over all steps, over their second half
    a number      the value after that many sampled completions, interpolated linearly between
                  evaluations; a shorter run gives its last value
    """
    rows_with_it = [row for row in rows if metric in row]
    if not rows_with_it:
        return math.nan
    values = np.array([row[metric] for row in rows_with_it])
    if over == "start":
        return float(values[0])
    if over == "end":
        return float(values[-1])
    if over == "all":
        return float(values.mean())
    if over == "late":
        steps = np.array([row["step"] for row in rows_with_it])
        return float(values[steps > rows[-1]["step"] / 2].mean())
    completions = [row["completions"] for row in rows_with_it]
    return float(np.interp(over, completions, values))
