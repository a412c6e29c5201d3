"""What is registered: claims, their runs and the order of these, as `registered.json` has them; and its results.

`registered.json` was committed before the first of its runs, and is not edited afterwards. Each run's results name its
digest, and nothing is decided by results that name another digest, or that come from another command.

Another command is another registration, a file beside this one with results of its own; `using` takes it in the place
of `registered.json`. All runs of both registrations are made, and no claim was amended or given up.
"""

import contextlib
import functools
import hashlib
import json
import math
import pathlib
import subprocess

import numpy as np

import unpack

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results" / "registered"
SHARES = {"easy": 0.125, "medium": 0.375, "hard": 0.5}  # of the classes in the lists of the hard task
HOLDS, FAILS, SAME, UNSEEN = "holds", "does not hold", "equivalent", "inconclusive"
UNTESTED, OPEN = "not tested", "not decided yet"
REGISTERED = HERE / "registered.json"
# What the rows of a registered run depend on: the scripts, what they import, the embedded models and lists, and what
# the laboratory puts around them.
CODE = ("*.py", "common/**/*", "lab/patches/*.py", "lab/patched.py", "lab/by_class.py", "lab/random_rewards.py",
        "lab/tasks.py", "lab/run.py")  # fmt: skip


@contextlib.contextmanager
def using(path):
    """Another registration, registered_NAME.json with its results in results/NAME, for as long as the context lasts."""
    global REGISTERED, RESULTS
    before, path = (REGISTERED, RESULTS), pathlib.Path(path).resolve()
    REGISTERED, RESULTS = path, path.parent / "results" / path.stem.removeprefix("registered_")
    try:
        yield
    finally:
        REGISTERED, RESULTS = before


parsed = functools.lru_cache(maxsize=4)(json.loads)  # what is registered is asked for with each file of results


def load():
    return parsed(REGISTERED.read_text(encoding="utf-8"))


def digest():
    """SHA-256 of the registration."""
    return hashlib.sha256(REGISTERED.read_bytes()).hexdigest()


def code_digest():
    """SHA-256 of the files of CODE, their names and their bytes."""
    files = {path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def registered_before(commit, folder=ROOT):
    """Whether git has the last change of the registration among the ancestors of a commit."""
    git = ["git", "-C", str(folder)]
    log = [*git, "log", "-1", "--format=%H", "--", f"lab/{REGISTERED.name}"]
    registration = subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()
    ancestor = subprocess.run([*git, "merge-base", "--is-ancestor", registration, commit], capture_output=True)
    return ancestor.returncode == 0


def claims(registered):
    return {claim["name"]: claim for claim in registered["claims"]}


def jobs(registered):
    """[(run, seed)] in the registered order, each once."""
    return list(dict.fromkeys((run, seed) for part in registered["order"] for seed in part["seeds"]
                              for run in part["runs"]))  # fmt: skip


def jobs_of(claim):
    """[(run, seed)] that decide a claim."""
    return [(claim["primary"][side], seed) for seed in claim["seeds"] for side in ("run", "against")]


def command(registered, name):
    """The command of a run; of a run at its best, the one chosen by the tuning, or None as long as that is not done."""
    entry = registered["runs"][name]
    if isinstance(entry, dict):
        chosen = best(registered, entry["best_of"])
        if chosen is None:
            return None
        entry = registered["runs"][chosen]
        if "task" in registered["runs"][name]:
            entry = entry.replace("{hard}", registered["runs"][name]["task"])
    for word, text in registered["options"].items():
        entry = entry.replace(word, text)
    return entry


def best(registered, names):
    """The run with the highest mean over the tuning seeds, the first of them at a tie; None as long as not all of
    their results count."""
    rule = registered["tuning"]
    if not all(counts(name, seed) for name in names for seed in rule["seeds"]):
        return None
    means = {name: np.mean([outcome(name, seed, rule) for seed in rule["seeds"]]) for name in names}
    return max(means, key=means.get)


def result(name, seed):
    return RESULTS / f"{name}-seed{seed}.jsonl"


def made(name, seed):
    """Whether a run has results, in the pack or in a file of its own."""
    return result(name, seed).name in packed() or result(name, seed).exists()


def packed():
    """{name of a file of results: rows} of the runs that are packed."""
    return unpack.runs(RESULTS.with_suffix(".jsonl"))


def read(name, seed):
    """The header of a run's results, and its rows, as copies."""
    path = result(name, seed)
    lines = packed().get(path.name) or map(json.loads, path.read_text(encoding="utf-8").splitlines())
    header, *found = map(dict, lines)
    return header, found


def rows(name, seed):
    """The rows of a run; in those that evaluate, `accuracy` is that of the classes, weighted by their shares."""
    header, found = read(name, seed)
    found[-1] |= {"cpu_seconds": header["cpu_seconds"]} if "cpu_seconds" in header else {}
    for row in found:
        if "policy/clip_fraction_low" in row:  # of tokens; gspo.py's is of rows, and its patch logs that of tokens
            both = row["policy/clip_fraction_low"] + row["policy/clip_fraction_high"]
            row.setdefault("policy/clipped_tokens", both)
        if all(f"eval/logged/{name}" in row for name in SHARES):
            row["accuracy"] = sum(share * row[f"eval/logged/{name}"] for name, share in SHARES.items())
    return found


def outcome(name, seed, effect):
    """The number of a run that an effect compares. A run whose loss was not finite counts with 0 in the metrics that
    `registered.json` says, and has none (nan) in others: its rows end early."""
    if read(name, seed)[0].get("failed"):
        return 0.0 if effect["metric"] in load()["statistics"]["failed_is_0"] else math.nan
    return value(rows(name, seed), effect["metric"], effect["over"])


def value(rows, metric, over):
    """One number of a run. `over`: start, the first; end, the last one; all, the mean over the steps; late, that over
    their second half; a number, that at so many sampled completions, on straight lines between evaluations (of a run
    with fewer completions the last). nan where the metric is not in the rows."""
    points = [(row["step"], row["completions"], row[metric]) for row in rows if metric in row]
    if not points:
        return math.nan
    steps, completions, values = map(np.array, zip(*points, strict=True))
    if over in ("start", "end"):
        return float(values[0 if over == "start" else -1])
    if over == "all":
        return float(values.mean())
    if over == "late":
        return float(values[steps > rows[-1]["step"] / 2].mean())
    return float(np.interp(over, completions, values))


def missing(claim):
    """[(run, seed)] that decide a claim and have no results."""
    return [job for job in jobs_of(claim) if not made(*job)]


def fault(name, seed):
    """Why results that are there do not count, in words; empty if they do."""
    registered, header = load(), read(name, seed)[0]
    if header["registered"] != digest():
        return "of other rules"
    if header["command"] != f"python {command(registered, name)} --seed {seed}":
        return "of another command"
    if not header["clean"]:
        return "of code that is in no commit"
    return "begun after the closing date" if header["started"][:10] > registered["closing"] else ""


def counts(name, seed):
    """Whether the results of a run are there, and are what is registered."""
    return made(name, seed) and not fault(name, seed)


def strangers(claim):
    """{(run, seed): why} of a claim's results that do not count."""
    return {job: why for job in jobs_of(claim) if made(*job) and (why := fault(*job))}


def versions(claim):
    """The digests of the code that made the deciding runs of a claim; they can be compared if it is one."""
    return {read(*job)[0]["code"] for job in jobs_of(claim) if counts(*job)}


def starts():
    """Each start of a registered run, in order; run.py writes it down before the run, and nothing is taken out."""
    path = RESULTS / "starts.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
