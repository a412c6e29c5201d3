"""lab: what is registered stays, only rows of registered runs decide, and the page of the claims has what they say."""

import hashlib
import json
import math
import random
import re
import shutil
import types

import numpy as np
import pytest

import by_class
import registry
import run
import tasks
import unpack
from common.harness.command_line import parse_args
from common.tiny_hard import build
from testbed import ROOT, script

statistics = pytest.mark.needs("scipy")
LEAD = registry.HERE / "registered_lead.json"
DIGESTS = {
    registry.REGISTERED: "6a1570e7193b0fb074b10c204b193f031701a90fcb58a7573f4822473caa1b95",
    LEAD: "3416e0181176bd1c0429f1409495d732d0daeaa962ca5871696ee31019c48185",
}
BOTH = pytest.mark.parametrize("path", DIGESTS, ids=lambda path: path.stem)


# --- what is registered, and its rows ---


@BOTH
def test_the_registration_is_not_edited(path):
    with registry.using(path):
        assert registry.digest() == DIGESTS[path]


@BOTH
def test_every_registered_run_has_its_results_its_start_and_no_fault(path):
    with registry.using(path):
        started = {(start["run"], start["seed"], start["started"]) for start in registry.starts()}
        for job in registry.jobs(registry.load()):
            assert not registry.fault(*job) and (*job, registry.read(*job)[0]["started"]) in started, job


@BOTH
@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs git and the history")
def test_runs_were_begun_by_commits_that_have_the_registration(path):
    with registry.using(path):
        assert all(map(registry.registered_before, {start["commit"] for start in registry.starts()}))


@BOTH
def test_todays_scripts_take_the_options_of_registered_commands(path):
    with registry.using(path):
        registered = registry.load()
        for name in registered["runs"]:
            words = registry.command(registered, name).format(seed=1).split()
            [place] = [i for i, word in enumerate(words) if re.fullmatch(r"\w+\.py", word)]
            parse_args(script(words[place].removesuffix(".py")).Args, words[place + 1 :])
            assert all((ROOT / word.partition(":")[0]).is_file() for word in words if ".py" in word), name


def test_a_registered_command_starts(tmp_path):
    """A patched script, a reward of lab/ and the held-out problems; without a step, and with few of these problems."""
    registered = registry.load()
    command = registry.command(registered, "dapo-all_groups")
    run.prepare(registered, command, 40)
    assert command.startswith("lab/patched.py lab/patches/all_groups.py dapo.py ") and "lab/by_class.py" in command
    status, output, _ = run.execute(f"{command} --max_steps 0 --eval_prompts 2", str(tmp_path / "run"))
    assert status == 0, output


def lists(task, folder):
    """Write the lists of a hard task that is built with another seed; its model comes later, and takes minutes."""
    for name, rows in zip(("train", "test"), build.make_lists(random.Random(tasks.BUILT[task])), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        yield f"runs/lab/{task}/{name}.jsonl", folder / f"{name}.jsonl"


@pytest.mark.parametrize(
    ("task", "path"), [("embedded-hard", registry.REGISTERED), ("hard-1", registry.REGISTERED), ("hard-321", LEAD)]
)
def test_problems_are_the_registered_ones(monkeypatch, tmp_path, task, path):
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    files = dict(lists(task, tmp_path)) if task in tasks.BUILT else {}
    tasks.write_held_out(task, tmp_path if files else build.FOLDER)
    files[f"runs/lab/held_out-{task}.jsonl"] = tmp_path / f"held_out-{task}.jsonl"
    registered = json.loads(path.read_text(encoding="utf-8"))["files"]
    assert {name: run.sha256(file) for name, file in files.items()} == {name: registered[name] for name in files}


def test_every_old_file_of_results_comes_back_byte_for_byte(tmp_path):
    unpack.main(tmp_path)
    manifest = (tmp_path / "manifest.txt").read_text(encoding="utf-8")
    old = dict(line.split()[::-1] for line in manifest.splitlines())
    assert len(old) == 1102 and {name: run.sha256(tmp_path / name) for name in old} == old


# --- the page ---


@statistics
def test_the_page_of_the_claims_has_what_the_rows_say():
    """Each line of check.py with its verdict, effect, interval and p is a row of a table there."""
    import check

    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").replace("*", "")
    tables = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("|")]
    for name, *cells in check.of_claims() + check.of_lead():
        rows = [row for row in tables if all(cell in row for cell in cells if cell)]
        assert len(rows) == 1, (name, cells)


# --- what decides: rules, on a laboratory of its own ---

LOW, HIGH = (0.0, 0.1, 0.0, 0.1, 0.05), (1.0, 1.1, 1.0, 1.1, 1.05)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Two claims on the runs a, b and c; functions that register, write results and decide."""
    monkeypatch.setattr(registry, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(registry, "REGISTERED", tmp_path / "registered.json")
    runs = {name: f"{name}.py" for name in "abc"}  # their commands

    def register(check=None, **primary):
        primary = dict(metric="m", run="a", against="b", over="end", direction=1, margin=0.0, same=0.1) | primary
        seeds = [10, 11, 12, 13, 14]
        claims = [dict(name="one", primary=primary, seeds=seeds, check=check)]
        claims += [dict(name="two", primary=primary | {"run": "c"}, seeds=seeds)]
        found = {"closing": "2026-12-31", "statistics": {"level": 0.05, "failed_is_0": ["m"]}, "claims": claims}
        registry.REGISTERED.write_text(json.dumps(found | {"runs": runs, "options": {}}), encoding="utf-8")

    def write(name, ends, **other):
        for seed, end in enumerate(ends, 10):
            header = {"registered": registry.digest(), "command": f"python {runs[name]} --seed {seed}"}
            header |= {"clean": True, "code": "one version", "started": "2026-12-31T23:00:00+00:00"} | other
            rows = [{"step": 0, "completions": 0, "m": 0.0}, {"step": 5, "completions": 50, "m": end}]
            run.write(registry.result(name, seed), [header, *rows])

    def verdicts():
        import decide

        return [it.verdict for it in decide.decisions(registry.load()).values()]

    register()
    return types.SimpleNamespace(register=register, write=write, verdicts=verdicts, runs=runs)


@statistics
def test_incomplete_claims_are_not_decided(lab):
    lab.write("a", HIGH)
    lab.write("b", LOW[:4])
    assert lab.verdicts() == [registry.OPEN] * 2
    lab.write("b", LOW)
    assert lab.verdicts() == [registry.HOLDS, registry.OPEN]  # claim two still lacks the run c


@statistics
def test_nothing_is_decided_by_rules_that_were_changed_after_a_run(lab):
    lab.write("a", HIGH)
    lab.write("b", LOW)
    lab.register(margin=-1.0)
    assert lab.verdicts() == [registry.OPEN] * 2
    lab.register()
    assert lab.verdicts()[0] == registry.HOLDS


@statistics
@pytest.mark.parametrize(
    "other",
    [
        {"command": "python a.py --easier --seed 10"},
        {"registered": "another"},
        {"clean": False},
        {"started": "2027-01-01T00:00:00+00:00"},
        {"code": "another version"},
    ],
)
def test_a_run_that_is_not_what_was_registered_decides_nothing(lab, other):
    lab.write("a", HIGH)
    lab.write("b", LOW)
    lab.write("a", HIGH[:1], **other)
    assert lab.verdicts() == [registry.OPEN] * 2


@statistics
def test_what_did_not_take_place_is_not_tested_and_counts_as_if_it_showed_nothing(lab):
    for least, verdict in ((1.05, registry.HOLDS), (1.06, registry.UNTESTED)):  # the runs of a have a mean of 1.05
        lab.register(check={"metric": "m", "run": "a", "over": "end", "least": least})
        lab.write("a", HIGH)
        lab.write("b", LOW)
        assert lab.verdicts()[0] == verdict
    lab.write("c", (0.05, 0.2, 0.1, 0.2, 0.15))  # p = 0.031 and, beside an untested claim, twice that after Holm
    assert lab.verdicts() == [registry.UNTESTED, registry.UNSEEN]


@statistics
@pytest.mark.parametrize(
    ("mine", "primary", "expected"),
    [
        (HIGH, {}, registry.HOLDS),
        (HIGH, {"direction": -1}, registry.FAILS),
        (HIGH, {"margin": 2.0}, registry.FAILS),
        (HIGH, {"margin": 1.0, "same": 0.1}, registry.UNSEEN),
        ((0.01, 0.1, 0.0, 0.1, 0.05), {"same": 0.3}, registry.SAME),
        (HIGH, {"same": 5.0}, registry.HOLDS),  # a difference that is seen comes before one that is small
        ((0.05, 0.2, 0.1, 0.2, 0.15), {}, registry.UNSEEN),  # p = 0.031, and twice that for two claims
    ],
)
def test_the_four_verdicts_and_which_comes_first(lab, mine, primary, expected):
    lab.register(**primary)
    lab.write("a", mine)
    lab.write("b", LOW)
    assert lab.verdicts()[0] == expected


@pytest.mark.parametrize("over", ["end", "late", 50])
def test_a_run_whose_loss_was_not_finite_counts_with_0_or_has_no_value(lab, over):
    lab.write("a", [0.75], failed="loss nan: not finite")
    assert registry.outcome("a", 10, {"metric": "m", "over": over}) == 0
    assert math.isnan(registry.outcome("a", 10, {"metric": "n", "over": over}))


def test_the_best_of_a_tuning_is_known_once_all_of_it_is_there(lab):
    runs = {"s": "grpo.py {hard} --x", "t": "grpo.py {hard} --y", "best": {"best_of": ["s", "t"], "task": "{hard-1}"}}
    tuning = {"seeds": [10, 11], "metric": "m", "over": 50}
    registered = registry.load() | {"runs": runs, "options": {"{hard}": "HERE", "{hard-1}": "THERE"}, "tuning": tuning}
    registry.REGISTERED.write_text(json.dumps(registered), encoding="utf-8")
    lab.runs.update(s="grpo.py HERE --x", t="grpo.py HERE --y")
    lab.write("s", [0.5, 0.5])
    lab.write("t", [0.2])
    assert registry.command(registered, "best") is None
    lab.write("t", [0.2, 0.9], clean=False)
    assert registry.command(registered, "best") is None  # of runs that do not count
    lab.write("t", [0.2, 0.9])
    assert registry.command(registered, "best") == "grpo.py THERE --y"
    lab.write("t", [0.2, 0.8])
    assert registry.command(registered, "best") == "grpo.py THERE --x"  # a tie: the first


@statistics
def test_base_models_decide_together_or_not_at_all(lab, monkeypatch):
    import lead

    registered = {"arms": {"a": "", "b": ""}, "seeds": {"x": [1, 2], "y": [3, 4]}, "plan": {"seeds": 2}}
    headers = {}
    for base in registered["seeds"]:
        for job in lead.jobs_of(registered, base):
            headers[job] = {"base": f"weights of {base}", "code": "1", "torch": "2", "transformers": "5"}
    monkeypatch.setattr(registry, "counts", lambda name, seed: (name, seed) in headers)
    monkeypatch.setattr(registry, "read", lambda name, seed: (headers[name, seed], []))
    assert lead.deciding(registered) == ["x", "y"]
    for change in ({"base": "others"}, {"code": "2"}, {"torch": "3"}):
        monkeypatch.setitem(headers, ("b-y", 4), headers["b-y", 3] | change)
        assert lead.deciding(registered) is None
    monkeypatch.delitem(headers, ("b-y", 4))
    assert lead.deciding(registered) is None


# --- statistics by hand ---


@statistics
def test_welch_sign_flips_and_holm_by_hand():
    import decide

    found = decide.measure([1.0, 2.0, 3.0], [0.0, 0.0, 3.0], 0.0, 1.0)
    assert found.effect == 1.0
    # Variances 1 and 3: t = 1 / sqrt(4 / 3), with (4 / 3)^2 / ((1 / 9 + 9 / 9) / 2) degrees of freedom.
    t, freedom = 1 / (4 / 3) ** 0.5, (16 / 9) / ((1 / 9 + 1) / 2)
    assert found.p == pytest.approx(2 * decide.stats.t.sf(t, freedom))
    assert found.p_same == pytest.approx(0.5)  # the effect is the margin of equivalence itself
    width = decide.stats.t.isf(0.025, freedom) * (4 / 3) ** 0.5
    assert (found.low, found.high) == pytest.approx((1 - width, 1 + width))
    assert decide.sign_flips(np.array([1.0, 2.0, 0.0])) == 0.5  # of 8 choices 4 have a sum of 3 or -3
    ps = decide.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 1.0})
    assert ps == pytest.approx({"b": 0.04, "c": 0.09, "a": 0.09, "d": 1})
    for mine in ([1.0, 1.0], [1.0, np.nan]):  # no deviation, and a run without a value
        nothing = decide.measure(mine, [0.0, 0.0], 0.0, 0.1)
        assert nothing.p == nothing.p_same == 1 and np.isnan(nothing.low)


@statistics
def test_a_paired_t_by_hand():
    import lead

    found = lead.paired([1.0, 2.0, 6.0], 0.0, 4.0)
    error = 7**0.5 / 3**0.5  # the variance is 7
    assert found.effect == 3 and found.p == pytest.approx(2 * lead.stats.t.sf(3 / error, 2))
    assert found.p_same == pytest.approx(lead.stats.t.sf(1 / error, 2))  # the effect is 1 below the margin
    width = lead.stats.t.isf(0.025, 2) * error
    assert (found.low, found.high) == pytest.approx((3 - width, 3 + width)) and found.p_signs == 0.25


def test_a_value_at_a_number_of_completions_is_between_two_evaluations():
    rows = [{"step": 10 * i, "completions": 100 * i, "m": float(i * i)} for i in range(4)]
    assert registry.value(rows, "m", "all") == 3.5 and registry.value(rows[1:], "m", "start") == 1
    rows[2].pop("m")
    assert registry.value(rows, "m", "end") == registry.value(rows, "m", "late") == 9
    assert registry.value(rows, "m", 200) == 5 and registry.value(rows, "m", 1000) == 9


def test_accuracy_weighs_the_classes_and_clipped_tokens_are_those_of_both_sides(lab):
    row = {"step": 1, "completions": 0, "eval/logged/easy": 1.0, "eval/logged/medium": 0.5, "eval/logged/hard": 0.25}
    row |= {"policy/clip_fraction_low": 0.25, "policy/clip_fraction_high": 0.5}
    run.write(registry.result("a", 10), [{}, row])
    [found] = registry.rows("a", 10)
    assert (found["accuracy"], found["policy/clipped_tokens"]) == (0.4375, 0.75)


# --- the runner ---


def test_a_line_of_results_has_the_means_of_five_steps_and_what_was_sampled():
    rows = [{"step": 0, "eval/pass@1": 0.5, "pairs/made": 256.0, "pairs/yield": 0.5}]
    rows += [{"step": i, "completion/length": float(i * i), "time/rollout_s": 1.0} for i in range(1, 8)]
    rows[7] |= {"eval/pass@1": 0.75, "sampling/rounds": 3.0}
    assert run.condense(rows, ["completion/length"]) == [
        {"step": 0, "completions": 4096, "eval/pass@1": 0.5},
        {"step": 5, "completions": 4096 + 1280, "completion/length": 11.0},
        {"step": 7, "completions": 4096 + 2304, "completion/length": 42.5, "eval/pass@1": 0.75},
    ]


def test_a_run_has_the_digest_of_the_rules_and_one_that_fails_has_no_results(lab, monkeypatch):
    monkeypatch.setattr(run, "ROOT", registry.RESULTS.parent)
    registered = {"runs": {"a": "a.py"}, "claims": [], "options": {}, "kept": ["policy/entropy"], "files": {}}
    (run.ROOT / "runs/lab/a-seed10").mkdir(parents=True)
    rows = [{"step": 0, "eval/logged/easy": 0.5}, {"step": 1, "policy/entropy": 0.25, "policy/other": 1.0}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.ROOT / "runs/lab/a-seed10/metrics.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr(run, "execute", lambda *arguments: (1, "error: no such option", 1.0))
    assert run.run_registered(registered, "a", 10).startswith("FAILED: python a.py --seed 10\n")
    assert not registry.made("a", 10)
    monkeypatch.setattr(run, "execute", lambda *arguments: (1, "...\nerror: step 3: loss nan: not finite", 1.5))
    run.run_registered(registered, "a", 10)
    header, kept = registry.read("a", 10)
    assert header["registered"] == hashlib.sha256(registry.REGISTERED.read_bytes()).hexdigest()
    assert header["failed"] == "error: step 3: loss nan: not finite" and header["code"] == registry.code_digest()
    assert kept[1] == {"step": 1, "completions": 0, "policy/entropy": 0.25}
    assert [(start["run"], start["seed"]) for start in registry.starts()] == [("a", 10)] * 2  # each of them


def test_the_queue_runs_what_has_no_results_in_the_registered_order(lab, monkeypatch):
    registered = {"order": [{"runs": ["a", "b"], "seeds": [10, 11]}, {"runs": ["b", "c"], "seeds": [11]}]}
    ran = []
    monkeypatch.setattr(registry, "load", lambda: registered)
    monkeypatch.setattr(run, "run_registered", lambda registered, name, seed: ran.append((name, seed)))
    monkeypatch.setattr(run, "origin", lambda command: {"clean": True})
    run.write(registry.result("b", 10), [{}])
    run.run_all_registered(False)
    assert ran == [("a", 10), ("a", 11), ("b", 11), ("c", 11)]


def test_a_file_that_is_not_the_registered_one_stops_the_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / "test.jsonl").write_bytes(b"{ }")
    registered = {"files": {"test.jsonl": hashlib.sha256(b"{}").hexdigest()}}
    with pytest.raises(SystemExit, match="test.jsonl: not the registered file"):
        run.prepare(registered, "grpo.py", 10)


def test_accuracy_by_class_is_logged_and_an_answer_that_was_cut_is_wrong():
    logged = {}
    columns = dict(difficulty=["easy", "hard", "hard"], answer=["3", "4", "5"], truncated=[False, False, True])
    texts = ["#### 3", "#### 4", "#### 5"]
    assert by_class.log_classes(texts, log_metric=logged.__setitem__, **columns) == [0.0] * 3
    assert logged == {"easy": 1.0, "hard": 0.5} and by_class.hard(texts, **columns) == [None, 1.0, 0.0]
