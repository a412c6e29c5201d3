"""What was registered before the runs, and the rows that the runs left.

A registration was committed before the first of its runs, and is not edited afterwards. The rows of
its runs are a pack in results/ (unpack.py). The first row of a run, its header, names the digest of
the registration and the command. Rows that name others decide nothing.
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

HOLDS = "holds"
FAILS = "does not hold"
SAME = "equivalent"
UNSEEN = "inconclusive"
UNTESTED = "not tested"
OPEN = "not decided"

SHARES = {
    "easy": 0.125,
    "medium": 0.375,
    "hard": 0.5,
}  # of the classes in the lists of the hard task


class Registration:
    """A registration, `path`, and the rows of its runs."""

    def __init__(self, path, results=unpack.RESULTS):
        content = path.read_bytes()
        name = path.stem.removeprefix("registered_")
        self.path = path
        self.digest = hashlib.sha256(content).hexdigest()  # the headers name it
        self.content = json.loads(content)
        self.runs = unpack.runs(results / f"{name}.jsonl")
        self.starts = unpack.rows_of(results / name / "starts.jsonl")

    # --- runs ---

    def jobs(self):
        """[(run, seed)] of all registered runs, each once."""
        jobs = {}
        for part in self.content["order"]:
            for seed in part["seeds"]:
                for run in part["runs"]:
                    jobs[run, seed] = None
        return list(jobs)

    def made(self, run, seed):
        return run_name(run, seed) in self.runs

    def header(self, run, seed):
        """What the first row of a run says of it."""
        return self.runs[run_name(run, seed)][0]

    def rows(self, run, seed):
        """The rows of a run. Where one evaluates, `accuracy` is that of the classes by their shares."""
        header, *rows = self.runs[run_name(run, seed)]
        found = [with_sums(row) for row in rows]
        if "cpu_seconds" in header:
            found[-1]["cpu_seconds"] = header["cpu_seconds"]
        return found

    def outcome(self, run, seed, effect):
        """The number of a run that an effect compares, by its `metric` and `over`.

        A run whose loss was not finite has 0 in the metrics that the registration says, and no
        number (nan) in others: its rows end early.
        """
        if self.header(run, seed).get("failed"):
            is_zero = effect["metric"] in self.content["statistics"]["failed_is_0"]
            return 0.0 if is_zero else math.nan
        return value(self.rows(run, seed), effect["metric"], effect["over"])

    # --- commands ---

    def command(self, run):
        """The registered command of a run, without its seed; None where a tuning is to choose it and
        has not all its runs."""
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
        """The run with the highest mean over the tuning seeds, the first of them at a tie."""
        tuning = self.content["tuning"]
        means = {}
        for run in runs:
            if not all(self.counts(run, seed) for seed in tuning["seeds"]):
                return None
            means[run] = np.mean([self.outcome(run, seed, tuning) for seed in tuning["seeds"]])
        return max(means, key=means.get)

    def fault(self, run, seed):
        """Why the rows of a run do not count, in words; empty if they do."""
        header = self.header(run, seed)
        if header["registered"] != self.digest:
            return "of other rules"
        if header["command"] != f"python {self.command(run)} --seed {seed}":
            return "of another command"
        if not header["clean"]:
            return "of code that is in no commit"
        if header["started"][:10] > self.content["closing"]:
            return "begun after the closing date"
        return ""

    def counts(self, run, seed):
        """Whether the rows of a run are there, and are what is registered."""
        return self.made(run, seed) and not self.fault(run, seed)

    def was_before(self, commit):
        """Whether git has the last change of the registration among the ancestors of a commit."""
        git = ["git", "-C", str(self.path.parent)]
        log = [*git, "log", "-1", "--format=%H", "--", self.path.name]
        last = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
        ancestor = [*git, "merge-base", "--is-ancestor", last, commit]
        return subprocess.run(ancestor, capture_output=True).returncode == 0


def run_name(run, seed):
    return f"{run}-seed{seed}.jsonl"


def with_sums(row):
    """A copy of a row with the two numbers that are sums of others."""
    row = dict(row)
    if "policy/clip_fraction_low" in row:
        # Of tokens. Those of gspo.py are of rows, and its runs logged the tokens beside them.
        both = row["policy/clip_fraction_low"] + row["policy/clip_fraction_high"]
        row.setdefault("policy/clipped_tokens", both)
    if all(f"eval/logged/{name}" in row for name in SHARES):
        row["accuracy"] = sum(share * row[f"eval/logged/{name}"] for name, share in SHARES.items())
    return row


def value(rows, metric, over):
    """One number of a run; nan where the metric is not in its rows. `over` says which:

    start, end    the first one, the last one
    all, late     the mean over the steps, over their second half
    a number      that at so many sampled completions, on straight lines between evaluations; the
                  last one of a run with fewer
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
