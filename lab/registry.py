"""What is registered: claims, their runs and the order of these, as `registered.json` has them; and its results.

`registered.json` was committed before the first of its runs, and is not edited afterwards: each file of results names
its digest, and nothing is decided by results that name another. What must change all the same is an entry of
`amendments.json`, which is printed with the verdict, beside the verdict under the rules as they were registered:

    {"claim": "length", "date": "2026-12-01", "what": "...", "why": "...", "primary": {"margin": 0.5}}
    {"claim": "length", "date": "2026-12-01", "what": "...", "why": "...", "runs": {"grpo": "grpo.py ..."}}
"""

import hashlib
import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results" / "registered"
SHARES = {"easy": 0.125, "medium": 0.375, "hard": 0.5}  # of the classes in the lists of the hard task
HOLDS, FAILS, SAME, UNSEEN = "holds", "does not hold", "no difference larger than the margin", "inconclusive"
OPEN = "not decided yet"
REGISTERED, AMENDMENTS = HERE / "registered.json", HERE / "amendments.json"


def load():
    return json.loads(REGISTERED.read_text(encoding="utf-8"))


def digest():
    """SHA-256 of registered.json."""
    return hashlib.sha256(REGISTERED.read_bytes()).hexdigest()


def amendments(claim):
    """The amendments of a claim, in the order of their dates."""
    if not AMENDMENTS.exists():
        return []
    found = json.loads(AMENDMENTS.read_text(encoding="utf-8"))
    return sorted((entry for entry in found if entry["claim"] == claim), key=lambda entry: entry["date"])


def amended(claim):
    """The claim with its primary effect as amended."""
    for amendment in amendments(claim["name"]):
        claim = claim | {"primary": claim["primary"] | amendment.get("primary", {})}
    return claim


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
    for amendment in (it for claim in claims(registered) for it in amendments(claim)):
        entry = amendment.get("runs", {}).get(name, entry)
    for word, text in registered["options"].items():
        entry = entry.replace(word, text)
    return entry


def best(registered, names):
    """The run with the highest mean over the tuning seeds, the first of them at a tie; None without all results."""
    rule = registered["tuning"]
    if not all(result(name, seed).exists() for name in names for seed in rule["seeds"]):
        return None
    means = {name: np.mean([value(rows(name, seed), rule["metric"], rule["over"]) for seed in rule["seeds"]])
             for name in names}  # fmt: skip
    return max(means, key=means.get)


def result(name, seed):
    return RESULTS / f"{name}-seed{seed}.jsonl"


def read(name, seed):
    """The header of a file of results, and its rows."""
    header, *lines = map(json.loads, result(name, seed).read_text(encoding="utf-8").splitlines())
    return header, lines


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
    if header.get("failed"):  # its loss was not finite
        found = [*found, {"step": found[-1]["step"], "completions": found[-1]["completions"], "accuracy": 0.0}]
    return found


def value(rows, metric, over):
    """One number of a run. `over`: end, the last one; late, the mean over the second half of the steps; a number, that
    at so many sampled completions, on straight lines between evaluations (of a run with fewer completions the last)."""
    points = [(row["step"], row["completions"], row[metric]) for row in rows if metric in row]
    steps, completions, values = map(np.array, zip(*points, strict=True))
    if over == "end":
        return float(values[-1])
    if over == "late":
        return float(values[steps > rows[-1]["step"] / 2].mean())
    return float(np.interp(over, completions, values))


def missing(claim):
    """[(run, seed)] that decide a claim and have no results."""
    return [job for job in jobs_of(claim) if not result(*job).exists()]


def strangers(claim):
    """[(run, seed)] of a claim whose results name another digest than that of registered.json."""
    return [job for job in jobs_of(claim) if result(*job).exists() and read(*job)[0]["registered"] != digest()]
