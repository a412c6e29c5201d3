"""lab: what is registered, and that nothing is decided before its runs are there or by other rules."""

import hashlib
import json
import math
import random
import shutil
import subprocess

import numpy as np
import pytest

import by_class
import clock
import pilot
import registry
import report
import run
import tasks
import texts
from common.tiny_hard import build
from testbed import ROOT

pytestmark = pytest.mark.needs("scipy")
REGISTERED = registry.load()
DIGEST = "6a1570e7193b0fb074b10c204b193f031701a90fcb58a7573f4822473caa1b95"  # of registered.json: it is not edited
SCRIPTS = {entry for entry in REGISTERED["runs"].values() if isinstance(entry, str)}


def decide():
    import decide  # needs scipy

    return decide


@pytest.fixture
def commands():
    """{run: command} of the laboratory below."""
    return {name: f"{name}.py" for name in "abc"}


@pytest.fixture
def lab(commands, tmp_path, monkeypatch):
    """A laboratory of its own: two claims on the runs a, b and c, and functions that write results and amendments."""
    monkeypatch.setattr(registry, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(registry, "REGISTERED", tmp_path / "registered.json")
    monkeypatch.setattr(registry, "AMENDMENTS", tmp_path / "amendments.json")

    class Lab:
        def register(self, check=None, **primary):
            primary = dict(metric="m", run="a", against="b", over="end", direction=1, margin=0.0, same=0.1) | primary
            seeds = [10, 11, 12, 13, 14]
            claims = [dict(name="one", primary=primary, seeds=seeds, check=check)]
            claims += [dict(name="two", primary=primary | {"run": "c"}, seeds=seeds)]
            found = {"closing": "2026-12-31", "statistics": {"level": 0.05, "failed_is_0": ["m"]}, "claims": claims}
            text = json.dumps(found | {"runs": commands, "options": {}})
            registry.REGISTERED.write_text(text, encoding="utf-8")

        def amend(self, *entries):
            registry.AMENDMENTS.write_text(json.dumps(entries), encoding="utf-8")

        def write(self, name, ends, seeds=range(10, 15), **other):
            for seed, end in zip(seeds, ends, strict=False):
                rows = [{"step": 0, "completions": 0, "m": 0.0}, {"step": 5, "completions": 50, "m": end}]
                command = f"python {commands[name]} --seed {seed}"
                header = {"registered": registry.digest(), "command": command, "clean": True, "code": "one version"}
                header |= {"started": "2026-12-31T23:00:00+00:00"} | other
                run.write(registry.result(name, seed), [header, *rows])

        def verdicts(self):
            found = registry.load()
            both = decide().as_registered(found), decide().as_amended(found)
            return [[decision.verdict for decision in decisions.values()] for decisions in both]

    lab = Lab()
    lab.register()
    return lab


LOW, HIGH = (0.0, 0.1, 0.0, 0.1, 0.05), (1.0, 1.1, 1.0, 1.1, 1.05)


def test_nothing_is_decided_before_all_registered_runs_are_there(lab):
    d = decide()
    lab.write("a", HIGH)
    lab.write("b", LOW[:4])
    assert lab.verdicts() == [[d.OPEN, d.OPEN]] * 2
    lab.write("b", LOW)
    assert lab.verdicts() == [[d.HOLDS, d.OPEN]] * 2  # claim two still lacks the run c
    assert registry.missing(registry.load()["claims"][1]) == [("c", seed) for seed in range(10, 15)]


def test_nothing_is_decided_by_rules_that_were_changed_after_a_run(lab):
    d = decide()
    lab.write("a", HIGH)
    lab.write("b", LOW)
    lab.register(margin=-1.0)
    assert lab.verdicts() == [[d.OPEN, d.OPEN]] * 2
    lab.register()
    assert lab.verdicts() == [[d.HOLDS, d.OPEN]] * 2
    lab.register(margin=2.0)
    lab.write("a", HIGH[:1])  # one run made again under the new rule
    assert lab.verdicts() == [[d.OPEN, d.OPEN]] * 2


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"command": "python a.py --easier --seed 10"}, "of another command"),
        ({"registered": "another"}, "of other rules"),
        ({"clean": False}, "of code that is in no commit"),
        ({"started": "2027-01-01T00:00:00+00:00"}, "begun after the closing date"),
    ],
)
def test_a_run_that_is_not_what_was_registered_decides_nothing(lab, other, why):
    lab.write("a", HIGH)
    lab.write("b", LOW)
    lab.write("a", HIGH[:1], **other)
    assert registry.strangers(registry.load()["claims"][0]) == {("a", 10): why}
    assert lab.verdicts() == [[decide().OPEN] * 2] * 2


def test_a_command_cannot_be_amended_not_even_by_another_claim(lab):
    lab.write("a", HIGH, command="python a.py --easier --seed 10")
    lab.write("b", LOW)
    lab.amend({"claim": "two", "date": "2026-12-01", "what": "", "why": "", "runs": {"a": "a.py --easier"}})
    assert lab.verdicts() == [[decide().OPEN] * 2] * 2


def test_runs_by_two_versions_of_the_code_are_not_compared(lab):
    d = decide()
    lab.write("a", HIGH)
    lab.write("b", LOW, code="another")
    assert lab.verdicts() == [[d.OPEN, d.OPEN]] * 2
    lab.write("a", HIGH, code="another")
    assert lab.verdicts() == [[d.HOLDS, d.OPEN]] * 2


def test_a_claim_that_is_complete_cannot_be_given_up(lab):
    d = decide()
    lab.write("a", HIGH)
    lab.write("b", LOW[:-1])
    lab.amend({"claim": "one", "date": "2026-12-01", "what": "", "why": "", "abandoned": True})
    assert lab.verdicts() == [[d.ABANDONED, d.OPEN]] * 2
    lab.write("b", LOW)
    assert lab.verdicts() == [[d.HOLDS, d.OPEN]] * 2


def test_what_did_not_take_place_is_not_tested_and_counts_as_if_it_showed_nothing(lab):
    d = decide()
    for least, verdict in ((1.05, d.HOLDS), (1.06, d.UNTESTED)):  # the runs of a have a mean of 1.05
        lab.register(check={"metric": "m", "run": "a", "over": "end", "least": least})
        lab.write("a", HIGH)
        lab.write("b", LOW)
        assert lab.verdicts() == [[verdict, d.OPEN]] * 2
    lab.write("c", (0.05, 0.2, 0.1, 0.2, 0.15))  # p = 0.031 and, beside an untested claim, twice that after Holm
    assert lab.verdicts() == [[d.UNTESTED, d.UNSEEN]] * 2


def test_a_check_without_a_value_is_inconclusive(lab):
    d = decide()
    lab.register(check={"metric": "step", "run": "c", "over": "end", "least": 5})
    for name in "abc":
        lab.write(name, LOW if name == "b" else HIGH)
    assert [one for one, _ in lab.verdicts()] == [d.HOLDS] * 2
    lab.write("c", HIGH[:1], failed="the loss is not finite")  # no value in metrics other than m
    assert [one for one, _ in lab.verdicts()] == [d.UNSEEN] * 2


def test_a_metric_that_was_not_logged_has_no_value():
    assert math.isnan(registry.value([{"step": 1, "completions": 256}], "m", "end"))


def test_no_deviation_and_a_run_without_a_value_are_inconclusive():
    d = decide()
    for mine in ([1.0, 1.0], [1.0, np.nan]):
        found = d.measure(mine, [0.0, 0.0], 0.0, 0.1)
        assert found.p == found.p_same == found.p_signs == 1 and np.isnan(found.low)
        assert d.verdict(found, 0.0, 1, found.p, found.p_same, 0.05) == d.UNSEEN


def test_an_amended_claim_has_a_verdict_under_both_rules(lab):
    d = decide()
    lab.write("a", HIGH)
    lab.write("b", LOW)
    lab.amend({"claim": "one", "date": "2026-12-01", "what": "", "why": "", "primary": {"margin": 2.0}})
    assert lab.verdicts() == [[d.HOLDS, d.OPEN], [d.FAILS, d.OPEN]]


@pytest.mark.parametrize(
    ("mine", "primary", "expected"),
    [
        (HIGH, {}, "HOLDS"),
        (HIGH, {"direction": -1}, "FAILS"),
        (HIGH, {"margin": 2.0}, "FAILS"),
        (HIGH, {"margin": 2.0, "direction": -1}, "HOLDS"),
        (HIGH, {"margin": 1.0, "same": 0.1}, "UNSEEN"),
        ((0.01, 0.1, 0.0, 0.1, 0.05), {"same": 0.3}, "SAME"),
        ((0.01, 0.1, 0.0, 0.1, 0.05), {"same": 0.05}, "UNSEEN"),
        (HIGH, {"same": 5.0}, "HOLDS"),  # a difference that is seen comes before one that is small
    ],
)
def test_the_four_verdicts_and_which_comes_first(lab, mine, primary, expected):
    lab.register(**primary)
    lab.write("a", mine)
    lab.write("b", LOW)
    assert lab.verdicts()[0][0] == getattr(decide(), expected)


def test_other_claims_make_it_harder_also_those_without_results(lab):
    d = decide()
    ends = (0.05, 0.2, 0.1, 0.2, 0.15)  # p = 0.031: twice that is above 0.05
    lab.write("a", ends)
    lab.write("b", LOW)
    found = d.as_registered(registry.load())["one"]
    assert 0.025 < found.measured.p < 0.05 and found.p == 2 * found.measured.p
    assert found.verdict == d.UNSEEN


def test_welch_and_sign_flips_on_numbers_by_hand():
    d = decide()
    found = d.measure([1.0, 2.0, 3.0], [0.0, 0.0, 3.0], 0.0, 1.0)
    assert found.effect == 1.0
    # Variances 1 and 3: t = 1 / sqrt(4 / 3), with (4 / 3)^2 / ((1 / 9 + 9 / 9) / 2) degrees of freedom.
    t, freedom = 1 / (4 / 3) ** 0.5, (16 / 9) / ((1 / 9 + 1) / 2)
    assert found.p == pytest.approx(2 * d.stats.t.sf(t, freedom))
    assert found.p_same == pytest.approx(0.5)  # the effect is the margin of equivalence itself
    width = d.stats.t.isf(0.025, freedom) * (4 / 3) ** 0.5
    assert (found.low, found.high) == pytest.approx((1 - width, 1 + width))
    assert d.sign_flips(np.array([1.0, 2.0, 0.0])) == 0.5  # of 8 choices 4 have a sum of 3 or -3
    assert d.sign_flips(np.array([1.0] * 10)) == 2 / 1024


def test_holm_by_hand():
    d = decide()
    assert d.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 1.0}) == pytest.approx(
        {"b": 0.04, "c": 0.09, "a": 0.09, "d": 1}
    )


def test_power_is_what_simulated_experiments_have():
    d = decide()
    rng = np.random.default_rng(0)
    effect = d.smallest_effect([1.0, 2.0], 10, 0.01)
    assert d.power(effect, [1.0, 2.0], 10, 0.01) == pytest.approx(0.8)
    mine, others = rng.normal(effect, 1.0, (2000, 10)), rng.normal(0.0, 2.0, (2000, 10))
    seen = (d.stats.ttest_ind(mine, others, axis=1, equal_var=False).pvalue < 0.01).mean()
    assert seen == pytest.approx(0.8, abs=0.03)


def test_power_of_equivalence_is_that_of_a_normal_deviation_with_many_seeds():
    """(same sqrt(n / 2) / deviation) = z of the level + z of (1 + power) / 2."""
    d = decide()
    same = (d.stats.norm.isf(0.01) + d.stats.norm.isf(0.1)) * (2 / 200) ** 0.5
    assert d.power_of_equivalence(same, [1.0, 1.0], 200, 0.01, 2000) == pytest.approx(0.8, abs=0.03)
    chance = d.power_of_equivalence(same, [1.0, 1.0], 200, 0.01, 2000, margin=0.0)
    assert chance == pytest.approx(0.8 - 0.01, abs=0.03)
    assert d.power_of_equivalence(same, [1.0, 1.0], 200, 0.01, 2000, margin=3 * same) == 0  # its own test says it first


def test_what_the_design_takes_from_the_pilot():
    deviation, correlation, runs = pilot.deviations()
    assert (round(deviation, 3), round(correlation, 2), runs) == (0.020, 0.07, 42)
    assert round(decide().power(1.0437 - 1, [0.368, 0.288], 10, 0.05), 2) == 0.06  # of `length` against one token


def test_a_value_at_a_number_of_completions_is_between_two_evaluations():
    rows = [{"step": 10 * i, "completions": 100 * i, "m": float(i * i)} for i in range(4)]
    assert registry.value(rows, "m", "all") == 3.5 and registry.value(rows[1:], "m", "start") == 1
    rows[2].pop("m")
    assert registry.value(rows, "m", "end") == 9 and registry.value(rows, "m", "late") == 9
    assert registry.value(rows, "m", 200) == 5 and registry.value(rows, "m", 100) == 1
    assert registry.value(rows, "m", 1000) == 9


def test_accuracy_weighs_the_classes(lab):
    classes = {"eval/logged/easy": 1.0, "eval/logged/medium": 0.5, "eval/logged/hard": 0.25}
    rows = [{"step": 0, "completions": 0} | classes]
    run.write(registry.result("a", 10), [{}, *rows])
    assert registry.value(registry.rows("a", 10), "accuracy", "end") == 0.4375


@pytest.mark.parametrize("over", ["end", "late", 50])
def test_a_run_whose_loss_was_not_finite_counts_with_0_or_has_no_value(lab, over):
    lab.write("a", [0.75], failed="loss nan: not finite")
    assert registry.outcome("a", 10, {"metric": "m", "over": over}) == 0
    assert np.isnan(registry.outcome("a", 10, {"metric": "n", "over": over}))


def test_the_best_of_a_tuning_is_known_once_all_of_it_is_there(lab, commands):
    runs = {"s": "grpo.py {hard} --x", "t": "grpo.py {hard} --y", "best": {"best_of": ["s", "t"]}}
    runs["elsewhere"] = {"best_of": ["s", "t"], "task": "{hard-1}"}
    registered = registry.load() | {"runs": runs, "options": {"{hard}": "HERE", "{hard-1}": "THERE"}}
    registered["tuning"] = {"seeds": [10, 11], "metric": "m", "over": 50}
    registry.REGISTERED.write_text(json.dumps(registered), encoding="utf-8")
    commands.update(s="grpo.py HERE --x", t="grpo.py HERE --y")
    lab.write("s", [0.5, 0.5])
    lab.write("t", [0.2])
    assert registry.command(registered, "best") is None
    lab.write("t", [0.2, 0.9], clean=False)
    assert registry.command(registered, "best") is None  # of runs that do not count
    lab.write("t", [0.2, 0.9])
    assert registry.command(registered, "best") == "grpo.py HERE --y"
    assert registry.command(registered, "elsewhere") == "grpo.py THERE --y"
    lab.write("t", [0.2, 0.8])
    assert registry.command(registered, "best") == "grpo.py HERE --x"  # a tie: the first


def test_the_clock_of_a_run_stands_still_in_evaluations_and_its_accuracies_are_means_of_five_steps():
    rows = [{"step": 0, "eval/pass@1": 0.5}]
    rows += [{"time/rollout_s": 1, "time/update_s": 2, "time/eval_s": 9, "reward/accuracy": i / 10} for i in range(7)]
    # Sampled after 1, 4, 7, 10 and 13 seconds; the last two of seven steps make no five.
    assert clock.curve(rows) == {"seconds": [7], "accuracy": [0.2]}
    rounds = [{"time/pairs_s": 4, "time/update_s": 2, "pairs/accuracy": 0.5}, {"time/update_s": 2}]
    assert clock.curve(2 * rounds) == {"seconds": [4, 12], "accuracy": [0.5, 0.5]}


def test_accuracies_at_equal_seconds_are_those_at_the_end_of_the_shortest_run(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SECONDS", tmp_path / "seconds.jsonl")
    assert report.at_equal_seconds([10, 11]) == (0, {})
    lines = [{"run": "best-grpo", "seed": seed, "seconds": [10, 30], "accuracy": [0.2, 0.6]} for seed in (10, 11)]
    lines += [{"run": "best-ppo", "seed": seed, "seconds": [5, 5 * seed], "accuracy": [0, 1]} for seed in (4, 5)]
    lines += [{"run": "best-dapo", "seed": 10, "seconds": [5], "accuracy": [0.9]}]  # the other seed is not there
    run.write(report.SECONDS, lines)
    assert report.at_equal_seconds([10, 11]) == (30, {"grpo": pytest.approx(0.6)})
    run.write(report.SECONDS, [line | {"seed": 10 + line["seed"] % 2} for line in lines])
    assert report.at_equal_seconds([10, 11]) == (20, {"grpo": pytest.approx(0.4), "ppo": pytest.approx((1 + 0.75) / 2)})


def test_the_queue_runs_what_has_no_results_in_the_registered_order(lab, monkeypatch, capsys):
    registered = {"order": [{"runs": ["a", "b"], "seeds": [10, 11]}, {"runs": ["b", "c"], "seeds": [11]}]}
    ran = []
    monkeypatch.setattr(registry, "load", lambda: registered)
    monkeypatch.setattr(run, "run_registered", lambda registered, name, seed: ran.append((name, seed)))
    monkeypatch.setattr(run, "origin", lambda command: {"clean": True})
    run.write(registry.result("b", 10), [{}])
    run.run_all_registered(False)
    assert ran == [("a", 10), ("a", 11), ("b", 11), ("c", 11)]
    run.run_all_registered(False, workers=2)  # each once, and those of a seed one after the other
    assert sorted(ran[4:]) == sorted(ran[:4]) and [job for job in ran[4:] if job[1] == 11] == ran[1:4]
    monkeypatch.setattr(run, "origin", lambda command: {"clean": False})
    with pytest.raises(SystemExit, match="in no commit"):
        run.run_all_registered(False)


def test_what_stops_one_run_lets_no_other_begin(lab, monkeypatch):
    monkeypatch.setattr(registry, "load", lambda: {"order": [{"runs": ["a", "b"], "seeds": [10, 11, 12]}]})
    monkeypatch.setattr(run, "origin", lambda command: {"clean": True})
    began = []

    def stopped(registered, name, seed):
        began.append((name, seed))
        raise SystemExit("not the registered file")

    monkeypatch.setattr(run, "run_registered", stopped)
    with pytest.raises(SystemExit, match="not the registered file"):
        run.run_all_registered(False)
    assert began == [("a", 10)]


def test_a_registered_run_has_the_digest_of_the_rules_and_one_that_fails_has_no_results(lab, monkeypatch):
    monkeypatch.setattr(run, "ROOT", registry.RESULTS.parent)
    registered = {"runs": {"a": "a.py"}, "claims": [], "options": {}, "kept": ["policy/entropy"], "files": {}}
    (run.ROOT / "runs/lab/a-seed10").mkdir(parents=True)
    rows = [{"step": 0, "eval/logged/easy": 0.5}, {"step": 1, "policy/entropy": 0.25, "policy/other": 1.0}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.ROOT / "runs/lab/a-seed10/metrics.jsonl").write_text(text, encoding="utf-8")

    monkeypatch.setattr(run, "execute", lambda *arguments: (1, "error: no such option", 1.0))
    assert run.run_registered(registered, "a", 10).startswith("FAILED: python a.py --seed 10\n")
    assert not registry.result("a", 10).exists()

    monkeypatch.setattr(run, "execute", lambda *arguments: (0, "fine", 1.5))
    run.run_registered(registered, "a", 10)
    header, kept = registry.read("a", 10)
    assert header["registered"] == hashlib.sha256(registry.REGISTERED.read_bytes()).hexdigest()
    assert header["command"] == "python a.py --seed 10" and "failed" not in header
    assert header["code"] == registry.code_digest() and not header["clean"]  # this folder has no commit
    assert kept == [{"step": 0, "completions": 0, "eval/logged/easy": 0.5},
                    {"step": 1, "completions": 0, "policy/entropy": 0.25}]  # fmt: skip

    monkeypatch.setattr(run, "execute", lambda *arguments: (0, "a text with the words: not finite", 1.5))
    run.run_registered(registered, "a", 10)
    assert "failed" not in registry.read("a", 10)[0]

    monkeypatch.setattr(run, "execute", lambda *arguments: (1, "...\nerror: step 3: loss nan: not finite", 1.5))
    run.run_registered(registered, "a", 10)
    assert registry.read("a", 10)[0]["failed"] == "error: step 3: loss nan: not finite"
    assert [(start["run"], start["seed"]) for start in registry.starts()] == [("a", 10)] * 4  # each of them


def test_a_file_that_is_not_the_registered_one_stops_the_queue(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / "test.jsonl").write_bytes(b"{}")
    registered = {"files": {"test.jsonl": hashlib.sha256(b"{}").hexdigest(), "not made yet": ""}}
    run.prepare(registered, "grpo.py", 10)
    (tmp_path / "test.jsonl").write_bytes(b"{ }")
    with pytest.raises(SystemExit, match="test.jsonl: not the registered file"):
        run.prepare(registered, "grpo.py", 10)


def test_the_digest_of_the_code_is_that_of_names_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    (tmp_path / "common" / "tiny").mkdir(parents=True)
    digests = set()
    for name, text in [("grpo.py", "1"), ("grpo.py", "2"), ("dapo.py", "1"), ("common/tiny/test.jsonl", "{}")]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        digests.add(registry.code_digest())
    assert len(digests) == 4
    (tmp_path / "README.md").write_text("1", encoding="utf-8")
    assert registry.code_digest() in digests


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_commit_that_made_a_run_has_the_registration_among_its_ancestors(tmp_path):
    def git(*arguments):
        names = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    commits = []
    for name in ("code", "lab/registered.json", "more code"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
        git("add", "-A")
        git("commit", "-m", name)
        commits.append(git("rev-parse", "HEAD"))
    assert [registry.registered_before(commit, tmp_path) for commit in commits] == [False, True, True]


def test_accuracy_by_class_is_logged_and_an_answer_that_was_cut_is_wrong():
    logged = {}
    columns = dict(difficulty=["easy", "hard", "hard"], answer=["3", "4", "5"], truncated=[False, False, True])
    texts = ["#### 3", "#### 4", "#### 5"]
    assert by_class.log_classes(texts, log_metric=logged.__setitem__, **columns) == [0.0] * 3
    assert logged == {"easy": 1.0, "hard": 0.5}
    assert by_class.hard(texts, **columns) == [None, 1.0, 0.0]


# --- what is registered ---


def test_the_registration_is_not_edited():
    assert registry.digest() == DIGEST


def test_each_claim_has_its_runs_in_the_queue_and_seeds_that_no_one_has_seen():
    jobs, tuning = set(registry.jobs(REGISTERED)), set(REGISTERED["tuning"]["seeds"])
    assert REGISTERED["statistics"]["primaries"] == len(REGISTERED["claims"]) <= 20
    assert len({claim["name"] for claim in REGISTERED["claims"]}) == len(REGISTERED["claims"])
    for claim in REGISTERED["claims"]:
        assert set(registry.jobs_of(claim)) <= jobs, claim["name"]
        assert min(claim["seeds"]) >= 40 and not tuning & set(claim["seeds"]), claim["name"]
        assert claim["primary"]["direction"] in (1, -1) and claim["primary"]["same"] > 0
        if "check" in claim:
            assert claim["check"]["run"] in (claim["primary"]["run"], claim["primary"]["against"])
        for effect in claim["reported"]:
            assert {effect["run"], effect["against"]} <= set(REGISTERED["runs"]), claim["name"]
    assert {name for name, _ in jobs} == set(REGISTERED["runs"])


def test_each_algorithm_has_as_many_settings_and_the_same_tuning_seeds():
    settings, rates = {}, set()
    for name, entry in REGISTERED["runs"].items():
        if isinstance(entry, dict):
            settings[name] = entry["best_of"]
            assert set(entry["best_of"]) <= set(REGISTERED["runs"]) and len(set(entry["best_of"])) == 6
            rates.add(tuple(REGISTERED["runs"][it].split("--learning_rate ")[1].split()[0] for it in entry["best_of"]))
    assert len(rates) == 1
    assert {name.split("-")[1] for name in settings} == {"grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo"}
    tuned = {(name, seed) for name, seed in registry.jobs(REGISTERED) if name.startswith("tune-")}
    assert tuned == {(name, seed) for names in settings.values() for name in names for seed in (1100, 1101)}


def test_commands_name_files():
    for command in SCRIPTS:
        assert all((ROOT / word.partition(":")[0]).is_file() for word in command.split() if ".py" in word), command


def problems_of_results():
    """What is wrong with the files of results that are there: not as registered, or without a line in starts.jsonl."""
    jobs = {registry.result(*job).name: job for job in registry.jobs(registry.load())}
    started = {(start["run"], start["seed"], start["started"]) for start in registry.starts()}
    found = []
    for path in sorted(registry.RESULTS.glob("*-seed*.jsonl")):
        job = jobs[path.name]
        if why := registry.fault(*job):
            found.append(f"{path.name}: {why}")
        if (*job, registry.read(*job)[0]["started"]) not in started:
            found.append(f"{path.name}: its start is not in starts.jsonl")
    return found


def test_results_are_of_registered_runs_and_each_has_its_start():
    assert not problems_of_results()


def test_results_without_a_start_are_found(lab):
    found = registry.load() | {"order": [{"runs": ["a"], "seeds": [10, 11]}]}
    registry.REGISTERED.write_text(json.dumps(found), encoding="utf-8")
    lab.write("a", HIGH[:2])
    run.write_start({"run": "a", "seed": 10, "started": registry.read("a", 10)[0]["started"]})
    assert problems_of_results() == ["a-seed11.jsonl: its start is not in starts.jsonl"]


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs git and the history")
def test_results_are_of_commits_that_have_the_registration():
    commits = {registry.read(*job)[0]["commit"] for job in registry.jobs(REGISTERED) if registry.result(*job).exists()}
    assert all(map(registry.registered_before, commits))


def test_an_amendment_says_when_what_and_why():
    claims = registry.claims(REGISTERED)
    for entry in (it for claim in REGISTERED["claims"] for it in registry.amendments(claim["name"])):
        assert entry["date"] >= REGISTERED["written"] and entry["what"] and entry["why"]
        assert entry.keys() <= {"claim", "date", "what", "why", "primary", "abandoned"}
        assert entry.get("primary", {}).keys() <= claims[entry["claim"]]["primary"].keys()


def test_clipped_tokens_are_the_sum_of_both_sides_where_a_script_counts_tokens(lab):
    both = {"policy/clip_fraction_low": 0.25, "policy/clip_fraction_high": 0.5}
    rows = [{"step": 1} | both, {"step": 2, "policy/clipped_tokens": 0.125} | both]
    run.write(registry.result("a", 10), [{"cpu_seconds": 3.0}, *rows])
    assert [row["policy/clipped_tokens"] for row in registry.rows("a", 10)] == [0.75, 0.125]
    assert registry.value([row | {"completions": 0} for row in registry.rows("a", 10)], "cpu_seconds", "end") == 3


def test_the_power_that_is_registered_is_that_of_its_deviations():
    d = decide()
    level = REGISTERED["statistics"]["level"] / REGISTERED["statistics"]["primaries"]
    for claim in REGISTERED["claims"]:
        accuracy = claim["primary"]["metric"] == "accuracy"
        deviations, seeds = [0.018, 0.018] if accuracy else claim["pilot"]["deviations"], len(claim["seeds"])
        assert d.power(claim["primary"]["same"], deviations, seeds, level) == pytest.approx(
            claim["power"]["at_same"], abs=0.005
        )
        smallest = d.smallest_effect(deviations, seeds, level)
        assert smallest == pytest.approx(claim["power"]["smallest_effect"], rel=0.05)
        equivalent = d.power_of_equivalence(claim["primary"]["same"], deviations, seeds, level)
        assert equivalent == pytest.approx(claim["power"]["equivalent_at_0"], abs=0.01)


def test_the_registered_files_of_the_repository_are_there():
    for name, digest in REGISTERED["files"].items():
        assert name.startswith("runs/lab/") or run.sha256(ROOT / name) == digest, name


@pytest.mark.parametrize("task", ["embedded-hard", *tasks.BASES])
def test_held_out_problems_are_the_registered_ones_and_none_of_the_lists(monkeypatch, tmp_path, task):
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    folder = build.FOLDER
    if task in tasks.BASES:  # the lists come before the model, which takes minutes
        folder = tmp_path
        for name, rows in zip(("train", "test"), build.make_lists(random.Random(tasks.BASES[task])), strict=True):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
            assert run.sha256(folder / f"{name}.jsonl") == REGISTERED["files"][f"runs/lab/{task}/{name}.jsonl"]
    tasks.write_held_out(task, folder)
    made = (tmp_path / f"held_out-{task}.jsonl").read_bytes()
    assert hashlib.sha256(made).hexdigest() == REGISTERED["files"][f"runs/lab/held_out-{task}.jsonl"]
    rows = [json.loads(line) for line in made.decode().splitlines()]
    held_out = {row["question"] for row in rows}
    assert len(held_out) == len(rows) and not held_out & tasks.questions(folder)
    assert {name: sum(row["difficulty"] == name for row in rows) for name in tasks.HELD_OUT} == tasks.HELD_OUT
    assert registry.SHARES == {name: difficulty.share for name, difficulty in build.CLASSES.items()}


PPO_RUNS = ("ppo", "ppo-critic_still", "ppo-32x8")


def test_what_was_looked_at_afterwards_is_in_the_rows():
    d, effect = decide(), {"metric": "completion/length_incorrect", "over": "late"}
    runs = ("gspo-wide_band", "grpo")
    wide, grpo = ([registry.outcome(name, seed, effect) for seed in range(40, 53)] for name in runs)
    found = d.measure(wide, grpo, 0.0, 1.0)
    said = f"{-found.effect:.2f} tokens shorter than GRPO's ({-found.low:.2f} to {-found.high:.2f})"
    assert said in texts.LIMITS["sequence_ratio"]

    def explained(over):
        """The share of the variance of a held-out reward between the classes, a mean over the seeds of PPO."""
        shares = np.array(list(registry.SHARES.values()))
        found = []
        for seed in range(40, 53):
            classes = [registry.outcome("ppo", seed, {"metric": f"eval/logged/{name}", "over": over})
                       for name in registry.SHARES]  # fmt: skip
            mean = shares @ classes
            found.append(shares @ (np.array(classes) - mean) ** 2 / (mean * (1 - mean)))
        return np.mean(found)

    hard = {"metric": "eval/logged/hard", "over": "end"}
    mine, others = ([registry.outcome(name, seed, hard) for seed in range(40, 50)]
                    for name in ("dcpo-8_visits", "grpo-8_visits"))  # fmt: skip
    found = d.measure(mine, others, 0.0, 1.0)
    assert f"hard sums, {found.effect:+.3f} ({found.low:+.3f} to {found.high:+.3f})" in texts.LIMITS["dcpo"]

    end = {"metric": "eval/logged/hard", "over": 20480}
    found = d.measure(*([registry.outcome(run, seed, end) for seed in range(70, 80)]
                        for run in ("best-dapo", "best-grpo")), 0.0, 1.0)  # fmt: skip
    assert f"hard sums, {found.effect:+.3f} ({found.low:+.3f} to {found.high:+.3f})" in texts.LIMITS["best-dapo"]
    ends = [report.results_of(f"best-{name}", range(70, 80)).std(ddof=1) for name in texts.ALGORITHMS]
    assert f"vary by {min(ends):.3f} to {max(ends):.3f} across seeds" in texts.BEST

    signs = {name: set() for name in texts.ALGORITHMS if name != "grpo"}
    for name, found in signs.items():
        for base, seeds in (("", range(70, 80)), ("-hard-1", range(60, 63)), ("-hard-2", range(60, 63))):
            mine, others = (report.results_of(f"best-{run}{base}", seeds).mean() for run in (name, "grpo"))
            found.add(mine > others)
    assert {name for name, found in signs.items() if len(found) == 1} == {"ppo", "dapo", "dpo"}
    assert "PPO, DAPO and DPO differ from GRPO with the same sign on all three, the others" in " ".join(texts.AT_BEST)

    def in_training(run, over):
        return [registry.outcome(run, seed, {"metric": "reward/accuracy", "over": over}) for seed in range(70, 80)]

    steps = {run: registry.rows(run, 70) for run in ("best-dapo", "best-grpo")}
    halves = [next(row["completions"] for row in steps[run] if row["step"] == 40) for run in steps]
    dapo = [registry.rows("best-dapo", seed)[-1]["reward/accuracy"] for seed in range(70, 80)]  # its step 40
    assert [rows[-1]["step"] for rows in steps.values()] == [40, 80] and halves[1] == 10240
    found = d.measure(dapo, in_training("best-grpo", 10240), 0.0, 1.0)
    said = f"{found.effect:.3f} ahead in training ({found.low:.3f} to {found.high:.3f})"
    assert f"as many optimizer steps (160) DAPO was {said}" in texts.LIMITS["best-dapo"]
    measured = {name: old.measured for name, (old, _) in report.decisions().items()}
    order = sorted(measured, key=lambda name: measured[name].p)
    assert order.index("best-ppo") == 8 and "only at Holm's ninth step" in texts.LIMITS["best-ppo"]
    grpo = np.delete(report.results_of("best-grpo", range(70, 80)), 4)
    assert f"without it {grpo.std(ddof=1):.3f})" in texts.BEST

    lines = [json.loads(line) for line in report.SECONDS.read_text(encoding="utf-8").splitlines()]
    last = {name: [line["seconds"][-1] for line in lines if line["run"] == f"best-{name}"] for name in texts.ALGORITHMS}
    ratios = {name: max(found) / min(found) - 1 for name, found in last.items()}
    said = f"up to {max(ratios[name] for name in ratios if name != 'dpo'):.0%} (DPO's by {ratios['dpo']:.0%})"
    assert said.replace("%", " %") in " ".join(texts.TUNING) and min(last, key=lambda name: min(last[name])) == "dpo"

    learning, still = ([registry.outcome(name, seed, hard) for seed in range(40, 53)] for name in PPO_RUNS[:2])
    found = d.measure(learning, still, 0.0, 1.0)
    assert f"hard sums, {found.effect:+.3f} ({found.low:.3f} to {found.high:.3f})" in texts.LIMITS["critic"]
    assert f"explains {explained('start'):.2f} of the variance" in texts.LIMITS["critic"]
    assert f"and {explained('end'):.2f} at PPO's end" in texts.LIMITS["critic"]
    once, eight = (np.mean([registry.read(name, seed)[0]["cpu_seconds"] for seed in range(40, 53)])
                   for name in (PPO_RUNS[0], PPO_RUNS[2]))  # fmt: skip
    assert f"256 x 1 took {once:.0f} seconds of a core, one of 32 x 8 {eight:.0f}," in texts.LIMITS["batch_shape"]
