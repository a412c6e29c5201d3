"""lab: the rules that decide, on made-up results; the page is what the results say."""

import json
import re
import sys

import numpy as np
import pytest

import patched
import report
import run
from claims import ALL, CLAIMS, RUNS, Claim, Effect
from run import condense
from testbed import ROOT
from tree import Tree


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that writes the results of a run: one list of rows for each seed."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)

    def write(name, *seeds):
        for seed, rows in enumerate(seeds):
            lines = [{"command": "", "cpu_seconds": 1.0}, *rows]
            (tmp_path / f"{name}-seed{seed}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
            )

    return write


def ending(x):
    """Rows whose metric m ends with x."""
    return [{"step": 0, "completions": 0, "m": 0.0}, {"step": 5, "completions": 50, "m": x}]


@pytest.mark.needs("matplotlib")
def test_a_pattern_is_expanded_where_the_shell_leaves_it_alone(tmp_path):
    """In PowerShell the documented command found no file `runs/*/metrics.jsonl`."""
    import plot

    for name in ("b", "a-seed0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    assert list(plot.read([f"{tmp_path}/*/metrics.jsonl"])) == ["a", "b"]
    assert list(plot.read([tmp_path / "b" / "metrics.jsonl"])) == ["b"]
    with pytest.raises(FileNotFoundError, match="none.jsonl"):
        plot.read(["none.jsonl"])


@pytest.mark.parametrize(
    ("ends", "least", "most", "expected"),
    [
        ((0.2, 0.3, 0.25, 0.2, 0.3), 0.1, None, report.HOLDS),
        ((0.2, 0.3, 0.25, 0.2, 0.3), 0.4, None, report.FAILS),
        ((0.2, 0.3, 0.25, 0.2, 0.3), 0.25, None, report.UNSEEN),
        ((0.2, 0.3, 0.25, 0.2, 0.3), None, 0.4, report.HOLDS),
        ((0.2, 0.3, 0.25, 0.2, 0.3), None, 0.1, report.FAILS),
        ((-1.0, 1.0, -1.0, 1.0, 0.0), 0.0, None, report.UNSEEN),
        ((0.2, 0.3, 0.25, 0.2), 0.1, None, None),  # four seeds
    ],
)
def test_the_rule(results, ends, least, most, expected):
    results("a", *map(ending, ends))
    claim = Claim("c", "", "", [Effect("m", "a", least=least, most=most, over="end")], (), ("a",))
    assert report.decide(claim) == expected


def test_a_claim_falls_with_one_of_its_effects_and_effects_beside_it_decide_nothing(results):
    results("a", *[ending(1.0)] * 5)
    results("b", *[ending(0.0)] * 5)
    more, less = Effect("m", "a", "b", least=0.5, over="end"), Effect("m", "b", "a", least=0.5, over="end")
    beside = Effect("m", "b", "a", least=0.5, over="end", decides=False)
    verdicts = [
        report.decide(Claim("c", "", "", effects, (), ())) for effects in ([more], [more, less], [more, beside])
    ]
    assert verdicts == [report.HOLDS, report.FAILS, report.HOLDS]


def test_differences_are_of_the_same_seed(results):
    results("a", ending(1.0), ending(2.0), ending(4.0))
    results("b", ending(1.0), ending(1.0))
    assert report.differences(Effect("m", "a", "b", over="end")).tolist() == [0.0, 1.0]
    assert report.differences(Effect("m", "a", "a:start", over="end")).tolist() == [1.0, 2.0, 4.0]
    assert report.differences(Effect("m", "a", over="end")).tolist() == [1.0, 2.0, 4.0]


def test_what_a_run_is_compared_by():
    rows = [{"step": 5 * i, "completions": 100 * i, "m": float(i)} for i in range(9)]
    assert report.value(rows, "m", "start") == 0 and report.value(rows, "m", "end") == 8
    assert report.value(rows, "m", "late") == 6.5  # 5, 6, 7, 8
    assert report.value(rows, "m", "equal_completions", 400) == 3.5  # 3, 4


def test_the_levels_are_means_over_the_seeds_of_runs_that_have_them_all(results):
    results("a", *map(ending, (1.0, 2.0, 3.0, 4.0, 5.0)))
    results("b", ending(1.0))
    claim = Claim("c", "", "", [Effect("m", "a", "b", least=0, over="end")], ("m", "other"), ("a",))
    assert report.levels(claim)[2:] == ["| a | 3 |  |  |"]


def test_the_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    low, high = report.interval(values)
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 20, abs=0.01)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 20, abs=0.01)


def test_a_file_of_results_has_the_means_of_five_steps():
    rows = [{"step": 0, "eval/pass@1": 0.5}]
    rows += [{"step": i, "completion/length": float(i * i), "time/rollout_s": 1.0} for i in range(1, 8)]
    rows[7] |= {"eval/pass@1": 0.75, "sampling/rounds": 3.0}
    assert condense(rows) == [
        {"step": 0, "completions": 0, "eval/pass@1": 0.5},
        {"step": 5, "completions": 1280, "completion/length": 11.0},
        {"step": 7, "completions": 2304, "completion/length": 42.5, "sampling/rounds": 3.0, "eval/pass@1": 0.75},
    ]


def test_a_learned_reward_waits_for_its_model(tmp_path, monkeypatch):
    """Also where its results are there and its model is not, as in a fresh clone: results do not hold models."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / "runs/claims/reward_model-seed1/model").mkdir(parents=True)
    learned = [("learned-kl_0", seed) for seed in (0, 1)]
    assert run.without_models(learned) == ([("reward_model", 0)], learned)
    assert run.without_models([("reward_model", 1), ("grpo", 0)]) == ([("reward_model", 1)], [("grpo", 0)])
    assert run.without_models([("grpo", 0)]) == ([], [("grpo", 0)])


def test_a_round_of_pairs_counts_what_it_sampled():
    """Also before the first step: pairs are made before the first evaluation."""
    row = {"step": 0, "eval/pass@1": 0.5, "pairs/made": 256.0, "pairs/yield": 0.5, "pairs/accuracy": 0.4}
    assert condense([row]) == [{"step": 0, "completions": 4096, "pairs/accuracy": 0.4, "eval/pass@1": 0.5}]
    given = {"step": 0, "eval/pass@1": 0.5}
    assert condense([given]) == [given | {"completions": 0}]


def test_a_claim_has_its_own_seeds():
    assert run.runs_of("all", 2) == [(name, seed) for seed in range(2) for name in ALL]
    assert {seed for _, seed in run.runs_of("length", 3)} == {0, 1, 2}
    assert {seed for _, seed in run.runs_of("hacking", 3)} == {5, 6, 7}
    assert {name for name, _ in run.runs_of("length", 1)} == CLAIMS["length"].needs()


def test_only_what_has_no_results_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    jobs = [("ladder-5", 0), ("ladder-6", 0), ("ladder-5", 1), ("ladder-6", 1)]
    assert run.missing(["dynamic_sampling"], 2, False) == jobs
    run.result("ladder-5", 0).touch()
    assert (
        run.missing(["dynamic_sampling"], 2, False) == jobs[1:] and run.missing(["dynamic_sampling"], 2, True) == jobs
    )


def test_patches_are_put_on_a_script_one_after_the_other(tmp_path, monkeypatch):
    (tmp_path / "patches").mkdir()
    script, one, two = tmp_path / "script.py", tmp_path / "patches" / "one.py", tmp_path / "patches" / "two.py"
    script.write_text(
        "import contextlib\nclean_exit, seen = contextlib.nullcontext, []\ndef f():\n    return 'f'\n"
        "def g():\n    return 'g'\ndef main(options):\n    seen.extend([f(), g(), *options])\n",
        encoding="utf-8",
    )
    one.write_text("def f():\n    return 'first'\ndef g():\n    return 'first'\n", encoding="utf-8")
    two.write_text("old = g\ndef g():\n    return old() + 'second'\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["patched.py", str(one), str(two), str(script), "--option"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    patched.main()
    assert sys.modules["script"].seen == ["first", "firstsecond", "--option"]


def test_claims_name_runs_and_runs_name_files():
    for claim in CLAIMS.values():
        assert claim.needs() <= set(RUNS), claim.name
        assert all((effect.least is None) != (effect.most is None) for effect in claim.effects), claim.name
    assert set(ALL) <= set(RUNS)
    for command in RUNS.values():
        assert all((ROOT / word.partition(":")[0]).is_file() for word in command.split() if ".py" in word), command


def test_the_readmes_get_the_counts_of_the_verdicts(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "CLAIMS", {name: Claim(name, f"Claim {name}", "", [], (), ()) for name in "abc"})
    monkeypatch.setattr(report, "decide", lambda claim: report.FAILS if claim.name == "b" else report.HOLDS)
    monkeypatch.setattr(report, "build", lambda: "the page")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("**Text**: **holds: 8, not decided yet: 9**, **more**.\n", encoding="utf-8")
    (tmp_path / "README.zh.md").write_text("**文字**：**还没有定论：4**，**更多**。\n", encoding="utf-8")
    tree = Tree(tmp_path)
    assert report.refresh(tree) == [] and tree.read("docs/claims.md") == "the page"
    assert tree.read("README.md") == "**Text**: **holds: 2, does not hold: 1**, **more**.\n"
    assert tree.read("README.zh.md") == "**文字**：**成立：2，不成立：1**，**更多**。\n"


@pytest.mark.parametrize("page", report.READMES)
def test_a_readme_counts_all_verdicts_and_its_findings_are_claims_that_do_not_hold(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert report.counts(*report.READMES[page]) in text
    claims = {report.anchor(claim.title): claim for claim in CLAIMS.values()}
    found = [place for place in re.findall(r"docs/claims\.md#([^)]+)", text) if place in claims]
    assert len(found) == 3 and {report.decide(claims[place]) for place in found} == {report.FAILS}
