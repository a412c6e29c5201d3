"""lab: docs/claims.md from made-up rows, the rules of the pilot, and what runs the runs."""

import json
import re
import sys

import numpy as np
import pytest

import bugs
import patched
import pilot
import registry
import report
import run
import seen
import tasks
import texts
from claims import ALL, CLAIMS, RUNS, Claim, Effect
from run import condense
from testbed import ROOT
from tree import Tree

try:
    import afterwards
except ImportError:  # without scipy
    afterwards = None
pytestmark = pytest.mark.needs("scipy")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that writes the results of a run: one list of rows for each seed."""
    monkeypatch.setattr(pilot, "RESULTS", tmp_path)

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
        ((0.2, 0.3, 0.25, 0.2, 0.3), 0.1, None, pilot.HOLDS),
        ((0.2, 0.3, 0.25, 0.2, 0.3), 0.4, None, pilot.FAILS),
        ((0.2, 0.3, 0.25, 0.2, 0.3), 0.25, None, pilot.UNSEEN),
        ((0.2, 0.3, 0.25, 0.2, 0.3), None, 0.4, pilot.HOLDS),
        ((0.2, 0.3, 0.25, 0.2, 0.3), None, 0.1, pilot.FAILS),
        ((-1.0, 1.0, -1.0, 1.0, 0.0), 0.0, None, pilot.UNSEEN),
        ((0.2, 0.3, 0.25, 0.2), 0.1, None, None),  # four seeds
    ],
)
def test_the_rule(results, ends, least, most, expected):
    results("a", *map(ending, ends))
    claim = Claim("c", "", "", [Effect("m", "a", least=least, most=most, over="end")], (), ("a",))
    assert pilot.decide(claim) == expected


def test_a_claim_falls_with_one_of_its_effects_and_effects_beside_it_decide_nothing(results):
    results("a", *[ending(1.0)] * 5)
    results("b", *[ending(0.0)] * 5)
    more, less = Effect("m", "a", "b", least=0.5, over="end"), Effect("m", "b", "a", least=0.5, over="end")
    beside = Effect("m", "b", "a", least=0.5, over="end", decides=False)
    verdicts = [pilot.decide(Claim("c", "", "", effects, (), ())) for effects in ([more], [more, less], [more, beside])]
    assert verdicts == [pilot.HOLDS, pilot.FAILS, pilot.HOLDS]


def test_differences_are_of_the_same_seed(results):
    results("a", ending(1.0), ending(2.0), ending(4.0))
    results("b", ending(1.0), ending(1.0))
    assert pilot.differences(Effect("m", "a", "b", over="end")).tolist() == [0.0, 1.0]
    assert pilot.differences(Effect("m", "a", "a:start", over="end")).tolist() == [1.0, 2.0, 4.0]
    assert pilot.differences(Effect("m", "a", over="end")).tolist() == [1.0, 2.0, 4.0]


def test_what_a_run_is_compared_by():
    rows = [{"step": 5 * i, "completions": 100 * i, "m": float(i)} for i in range(9)]
    assert pilot.value(rows, "m", "start") == 0 and pilot.value(rows, "m", "end") == 8
    assert pilot.value(rows, "m", "late") == 6.5  # 5, 6, 7, 8
    assert pilot.value(rows, "m", "equal_completions", 400) == 3.5  # 3, 4


def test_the_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    low, high = pilot.interval(values)
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


# --- the page ---


def forget():
    """Let the page be made again, of other rows."""
    for made in (report.decisions, report.changes, report.whole):
        made.cache_clear()


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A function that writes made-up rows of registered runs; nothing else is registered as run."""
    monkeypatch.setattr(registry, "RESULTS", tmp_path / "registered")
    monkeypatch.setattr(registry, "AMENDMENTS", tmp_path / "amendments.json")
    monkeypatch.setattr(report, "SECONDS", tmp_path / "seconds.jsonl")
    forget()

    def write(name, level, seeds):
        for seed in seeds:
            here = level + 0.001 * (seed * 7 % 5)
            names = "policy/entropy policy/clipped_tokens overlong/fraction completion/length completion/truncated"
            logged = dict.fromkeys(names.split(), here)
            lines = [{"step": step, "completions": 256 * step} | logged for step in (5, 80)]
            lines[-1] |= {f"eval/logged/{kind}": here for kind in registry.SHARES}
            header = {"command": f"python {registry.command(registry.load(), name)} --seed {seed}"}
            header |= {"registered": registry.digest(), "cpu_seconds": 100.0 + seed % 3, "clean": True}
            header |= {"code": "c0de", "commit": "0123456789", "started": "2026-12-01T00:00:00+00:00"}
            run.write(registry.result(name, seed), [header, *lines])

    yield write
    forget()


FIRST = registry.load()["claims"][0]


def line_of(claim):
    return next(line for line in report.whole().splitlines() if line.startswith(f"| [{claim['title']}]"))


def section_of(claim):
    return report.whole().split(f"\n## {claim['title']}\n")[1].split("\n## ")[0]


def test_without_results_no_claim_is_decided_and_the_page_has_the_digest(rows):
    claims = registry.load()["claims"]
    for claim in claims:
        assert f"**not decided yet: 0 of {2 * len(claim['seeds'])} runs**" in line_of(claim)
        assert "figures/claims" not in line_of(claim) + section_of(claim)
    assert registry.digest() in report.whole()
    page = report.whole()
    assert page.index(f"| [{claims[-1]['title']}]") < page.index("\n## ")  # the tables come first
    assert "A gain at one learning rate" not in page and "PPO's lead is made of\n" not in page


def test_a_claim_is_shown_once_all_of_its_runs_are_there(rows):
    rows("gspo-wide_band", 0.7, FIRST["seeds"])
    rows("grpo", 0.6, FIRST["seeds"][:-1])
    assert "**not decided yet: 25 of 26 runs**" in line_of(FIRST) and "0.7" not in section_of(FIRST).split("What it")[0]
    rows("grpo", 0.6, FIRST["seeds"])
    forget()
    assert "| **holds** | +0.100 (+0.099 to +0.101) |" in line_of(FIRST)
    section = section_of(FIRST)
    assert "](figures/claims/sequence_ratio.png)" in section
    said = "Held-out accuracy, at the end: “GSPO, ten times the paper's band” less “GRPO” is +0.100 (+0.099 to +0.101)."
    assert f"**Verdict: holds.** {said}" in section
    assert "**GSPO, ten times the paper's band: 0.702 ± 0.002** | **GRPO: 0.602 ± 0.002**" in section
    assert "| GSPO, the paper's band | GRPO | 13 of 26 runs |" in section
    assert "not decided yet: 0 of" in line_of(registry.load()["claims"][2])
    row = next(line for line in report.whole().splitlines() if line.startswith("| `sequence_ratio` | 40 to 52 | 0 |"))
    assert row.endswith("| 0 starts for 26 files; code c0de, commit 0123456 |")
    assert texts.BESIDE["sequence_ratio"] in section


@pytest.mark.parametrize(
    ("key", "other", "said"),
    [
        ("registered", "another", "25 of 26 runs; grpo seed 40 is of other rules"),
        ("command", "python grpo.py", "25 of 26 runs; grpo seed 40 is of another command"),
        ("clean", False, "25 of 26 runs; grpo seed 40 is of code that is in no commit"),
        ("code", "another", "26 of 26 runs; they are of 2 versions of the code"),
    ],
)
def test_rows_that_are_not_as_registered_are_named_and_decide_nothing(rows, key, other, said):
    rows("gspo-wide_band", 0.7, FIRST["seeds"])
    rows("grpo", 0.6, FIRST["seeds"])
    header, lines = registry.read("grpo", FIRST["seeds"][0])
    run.write(registry.result("grpo", FIRST["seeds"][0]), [header | {key: other}, *lines])
    assert f"**not decided yet: {said}**" in line_of(FIRST)


def test_what_is_reported_beside_is_of_one_version_of_the_code_too(rows):
    for run_, value in (("gspo-wide_band", 0.7), ("grpo", 0.6), ("gspo-paper_band", 0.5)):
        rows(run_, value, FIRST["seeds"])
    for seed in FIRST["seeds"]:
        header, lines = registry.read("gspo-paper_band", seed)
        run.write(registry.result("gspo-paper_band", seed), [header | {"code": "another"}, *lines])
    assert "| GSPO, the paper's band | GRPO | of 2 versions of the code |" in section_of(FIRST)


def test_a_claim_with_a_margin_has_its_own_chance_of_equivalence(rows):
    claims = registry.claims(registry.load())
    assert report.chance_of_equivalent(FIRST) == FIRST["power"]["equivalent_at_0"]
    assert report.chance_of_equivalent(claims["hacking"]) == 0  # its own test says "does not hold" there
    assert "| 0.06 from the margin of 0.3 | 0.00 (within 0.03) |" in report.whole()


def test_a_change_after_the_registration_is_printed_with_the_verdict_under_the_old_rule(rows):
    rows("gspo-wide_band", 0.7, FIRST["seeds"])
    rows("grpo", 0.6, FIRST["seeds"])
    entry = dict(claim="sequence_ratio", date="2026-12-01", what="Another margin.", why="A reason.")
    registry.AMENDMENTS.write_text(json.dumps([entry | {"primary": {"margin": 0.3}}]), encoding="utf-8")
    assert "| **holds; by a rule that was changed: does not hold** | +0.100" in line_of(FIRST)
    section = section_of(FIRST)
    assert (
        "Changed on 2026-12-01, after the registration: Another margin. A reason. Under the changed rule: " in section
    )
    registered, changed = report.decisions()["sequence_ratio"]
    assert f"| {registered.measured.p:.2g}, {registered.p:.2g} |" in report.whole() and registered.p != changed.p
    both = [report.counts(of_paper, *report.READMES["README.md"]) for of_paper in (True, False)]
    assert both == ["**holds: 1, not decided yet: 11**", "**does not hold: 1, not decided yet: 4**"]


def test_what_did_not_take_place_and_what_was_given_up_is_said(rows):
    claims = registry.claims(registry.load())
    rows("dapo-all_groups", 0.01, FIRST["seeds"])
    rows("dapo-all_groups-punished", 0.01, FIRST["seeds"])  # so is the share of punished answers: below 0.02
    entry = dict(claim="critic", date="2026-12-01", what="Given up.", why="A reason.", abandoned=True)
    registry.AMENDMENTS.write_text(json.dumps([entry]), encoding="utf-8")
    assert "| **not tested** | +0.000" in line_of(claims["overlong"])
    assert "share of answers that are punished, steps 1 to 5 | all groups, long answers punished: 0.012" in section_of(
        claims["overlong"]
    )
    assert "| **abandoned** |" in line_of(claims["critic"])
    assert "Given up. A reason." in section_of(claims["critic"])


def test_each_algorithm_at_its_best_appears_once_its_tuning_is_there(rows):
    assert "No tuning is done yet." in report.whole()
    for i, name in enumerate(report.settings("gspo")):
        rows(name, 0.5 + i / 100, (1100, 1101))
    report.whole.cache_clear()
    row = next(line for line in report.whole().splitlines() if line.startswith("| GSPO | 3e-5"))
    assert row.endswith("| 3e-4: 0.531 | 6e-4: 0.541 | **1e-3: 0.551** |")
    assert "| GRPO | 3e-5" not in report.whole() and "figures/claims/best.png" not in report.whole()
    rows("best-gspo", 0.6, range(70, 80))
    report.whole.cache_clear()
    edge = "1e-3, at the edge of the six: a better one may lie beyond"
    assert f"| GSPO | {edge} | 0.602 ± 0.001 | 101 |  |  |  |" in report.whole()
    command = "gspo.py {hard} {steps} --learning_rate RATE --clip_low 3e-3 --clip_high 4e-3"
    assert f"- GSPO, best of six: `{command}`, RATE the best of [six](#each-algorithm-best-of-six): {edge}" in (
        report.whole()
    )
    assert "--learning_rate RATE`, RATE the best of [six](#each-algorithm-best-of-six)\n" in report.whole()  # GRPO's
    for i, name in enumerate(report.settings("grpo")):
        rows(name, 0.4 + i / 100, (1100, 1101))
    for name, level in (("grpo", 0.5), ("gspo", 0.6)):
        rows(f"best-{name}-hard-2", level, (60, 61, 62))
    report.whole.cache_clear()
    assert "| 101 |  |  | +0.100 (+0.095 to +0.105) |" in report.whole()


def test_runs_that_failed_are_counted_where_they_are_shown(rows):
    rows("gspo-wide_band", 0.7, FIRST["seeds"])
    rows("grpo", 0.6, FIRST["seeds"])
    for i, name in enumerate(report.settings("gspo")):
        rows(name, 0.5 - i / 100, (1100, 1101))
    for name, seed in (("grpo", FIRST["seeds"][0]), ("tune-gspo-lr_2e-4", 1101)):
        header, rest = registry.read(name, seed)
        run.write(registry.result(name, seed), [header | {"failed": "loss nan: not finite"}, *rest])
    assert f"GRPO: 0.556 ± 0.167 (1 of {len(FIRST['seeds'])} failed)" in section_of(FIRST)
    assert "| 2e-4: 0.240 (1 of 2 failed) |" in report.whole()


def test_nothing_that_the_pilot_decided_is_gone(rows):
    page, pilots = report.whole(), report.pilot_page()
    for claim in CLAIMS.values():
        row = next(line for line in page.splitlines() if f'<a id="pilot-{claim.name}"></a>' in line)
        assert f"| {pilot.decide(claim) or 'never decided'} |" in row and f"## Pilot: {claim.name}\n" in pilots
        assert all(" | ".join(cells) in pilots for cells in report.pilot_decided()[claim.name][1])
    assert sum(effect.decides for claim in CLAIMS.values() for effect in claim.effects) == 32


def test_the_texts_are_of_what_is_registered_and_of_the_pilot():
    registered = registry.load()
    assert texts.PILOT.keys() == CLAIMS.keys() and {*texts.PILOT_FIGURES} <= CLAIMS.keys()
    successors = {name for became, _ in texts.PILOT.values() if isinstance(became, tuple) for name in became}
    assert successors <= registry.claims(registered).keys()
    for name in texts.PILOT_FIGURES:
        assert name == "deviation" or {*CLAIMS[name].runs} <= texts.PILOT_RUNS.keys()
    for claim in registered["claims"]:
        best = claim["name"].startswith("best-")
        assert claim["name"] in texts.LIMITS and (claim["name"] in texts.CURVES) == (not best), claim["name"]
        for effect in (claim["primary"], *claim["reported"]):
            names = [report.name(effect[side], claim["name"]) for side in ("run", "against")]
            assert len(set(names)) == len({effect["run"], effect["against"]}) and report.metric_at(effect)


@pytest.mark.needs("matplotlib", "scipy")
def test_only_what_is_decided_is_drawn(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FIGURES", tmp_path / "figures")
    import figures

    monkeypatch.setattr(figures, "write_pilot", lambda: None)
    rows("gspo-wide_band", 0.7, FIRST["seeds"])
    rows("grpo", 0.6, FIRST["seeds"][:-1])
    figures.write()
    assert not report.FIGURES.exists()
    rows("grpo", 0.6, FIRST["seeds"])
    rows("tune-dpo-lr_3e-5", 0.5, (1100, 1101))
    report.decisions.cache_clear()
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, name: drawn.update({name: figure}))
    figures.write()
    assert list(drawn) == ["sequence_ratio", "gspo_entropy"]
    axis = drawn["sequence_ratio"].axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["GSPO, ten times\nthe paper's band", "GRPO"]


@pytest.mark.needs("matplotlib")
def test_names_at_the_ends_of_curves_lie_apart_and_inside():
    import plot

    axis = plot.plt.subplots()[1]
    axis.set(xlim=(0, 1), ylim=(0, 14))
    plot.label_ends(axis, [[y, 1, name, "black"] for name, y in (("a", 14), ("b", 13.9), ("c", 13.8), ("d", 2))])
    heights = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert heights == pytest.approx({"d": 2, "c": 12, "b": 13, "a": 14})


@pytest.mark.needs("matplotlib")
def test_a_run_that_ends_before_another_begins_is_drawn_too():
    import plot

    axis, whole = plot.plt.subplots()[1], [{"step": step, "m": 1.0} for step in (5, 10)]
    plot.draw(axis, {"a": [whole, [{"step": 2, "m": 1.0}]]}, "m")
    assert len(axis.lines) == 3 and not axis.texts  # two seeds, a mean without points, no name


# --- refresh ---


def tree_of(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "claims.md").write_text("Old.\n", encoding="utf-8")
    (tmp_path / "lab" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("**Text**: **holds: 8**, **not decided yet: 9**, **more**.\n", encoding="utf-8")
    (tmp_path / "README.zh.md").write_text("**文字**：**没有定论：4**，**成立：1**，**更多**。\n", encoding="utf-8")
    return Tree(tmp_path)


def test_the_readmes_get_the_counts_of_the_verdicts(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)  # where no figure is drawn
    rows("gspo-wide_band", 0.7, FIRST["seeds"])
    rows("grpo", 0.6, FIRST["seeds"])
    (tmp_path / "copy").mkdir()
    tree = tree_of(tmp_path / "copy")
    found = report.refresh(tree)
    assert "docs/figures/claims/sequence_ratio.png: python lab/report.py --figures draws it" in found
    page, numbers = tree.read("docs/claims.md"), tree.read("lab/results/numbers.md")
    assert page == report.build() and numbers == report.numbers_page()
    place = f"../lab/results/numbers.md#{report.anchor(FIRST['title'])}"
    assert page.count(f"[Its numbers]({place}).\n") == 1 and "gspo.py {hard}" not in page
    section = numbers.split(f"\n## {FIRST['title']}\n")[1].split("\n## ")[0]
    assert "GRPO: 0.602 ± 0.002**" in section and texts.BESIDE["sequence_ratio"] in section
    links = re.findall(r"\]\((?!http)([^)#]*)", numbers)
    assert {"../../docs/claims.md"} <= set(links)
    assert [link for link in set(links) if not (ROOT / "lab/results" / link).exists()] == []
    assert tree.read("lab/results/pilot.md") == report.pilot_page()
    papers, others = "holds: 1, not decided yet: 11", "does not hold: 1, not decided yet: 4"
    assert tree.read("README.md") == f"**Text**: **{papers}**, **{others}**, **more**.\n"
    papers, others = "成立：1，尚未判定：11", "不成立：1，尚未判定：4"
    assert tree.read("README.zh.md") == f"**文字**：**{papers}**，**{others}**，**更多**。\n"


def test_without_scipy_the_page_stays_and_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "decide", None)
    tree = tree_of(tmp_path)
    assert report.refresh(tree) == [f"docs/claims.md: is not of these rows; {report.NEEDED}"]
    tree.write("docs/claims.md", f"Old.\n<!-- made from {report.fingerprint()} -->\n")
    new = dict(tree.new)
    assert report.refresh(tree) == [] and tree.new == new


@pytest.mark.parametrize("page", report.READMES)
def test_a_readme_has_the_counts(page):
    found = report.COUNTS.findall((ROOT / page).read_text(encoding="utf-8"))
    assert [sum(map(int, re.findall(r"\d+", counts))) for counts in found] == [12, 5]
    assert [len(claims) for claims in report.kinds().values()] == [12, 5]


def test_links_to_the_claims_are_to_their_headings():
    headings = re.findall(r"^##+ (.*)", (ROOT / report.PAGE).read_text(encoding="utf-8"), re.MULTILINE)
    ids = re.findall(r'<a id="([^"]+)">', (ROOT / report.PAGE).read_text(encoding="utf-8"))
    anchors, broken = {*map(report.anchor, headings), *ids}, []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("lab/results/*.md")):
        links = re.findall(r"\((?:[./]*docs/)?claims\.md#([^)]+)\)", page.read_text(encoding="utf-8"))
        if page.name == "claims.md":
            links = re.findall(r"\(#([^)]+)\)", page.read_text(encoding="utf-8"))
        broken += [f"{page.name}: {link}" for link in links if link not in anchors]
    assert not broken


FOUND = {"best-ppo": registry.FAILS, "dynamic_sampling-steps": registry.HOLDS,
         "dynamic_sampling-completions": registry.FAILS, "sequence_ratio": registry.SAME,
         "best-gspo": registry.UNSEEN, "best-dr_grpo": registry.UNSEEN}  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readmes_say_what_was_found(page):
    decided = {name: report.decisions()[name][1] for name in FOUND}
    assert {name: it.verdict for name, it in decided.items()} == FOUND
    ppo, steps, completions, _, _, tuned = (it.measured for it in decided.values())
    behind, low, high = (f"{-number:.2f}" for number in (ppo.effect, ppo.high, ppo.low))
    gained, lost, dpo = f"{steps.effect:.2f}", f"{-completions.effect:.2f}", at_best("grpo") - at_best("dpo")
    one_rate, seeds = afterwards.at_1e_4("dr_grpo", "grpo")
    first, *equal = (afterwards.at_equal_seconds(seconds)[2] for seconds in report.seconds_shown())
    assert seeds == (10, 10) and f"{afterwards.shortest():.3g}" == "30.5" and 5e-8 < one_rate.p < 1.5e-7
    _, *bases = afterwards.leads("dr_grpo")
    mean, half = afterwards.lead_over_bases()
    numbers = {"one": one_rate.effect, "from_": one_rate.low, "to": one_rate.high}
    numbers |= {"tuned": tuned.effect, "tuned_low": tuned.low, "tuned_high": tuned.high, "mean": mean, "half": half}
    said = {name: f"{number:.3f}" for name, number in numbers.items()}
    said |= {"hard_1": f"{bases[0]:+.3f}", "hard_2": f"{bases[1]:+.3f}", "tuned_high": f"{tuned.high:+.3f}"}
    said |= {"behind": behind, "low": low, "high": high, "gained": gained, "lost": lost, "dpo": f"{dpo:.2f}"}
    ends = (f"{end:.3f}" for end in afterwards.at_equal_seconds(afterwards.shortest())[3:])
    said |= dict(zip(("first_low", "first_high"), ends, strict=True))
    said |= {"first": f"{first:.3f}", "least": f"{min(equal):.2f}", "most": f"{max(equal):.2f}"}
    text = (report.ROOT / page).read_text(encoding="utf-8")
    missing = [words.format(**said) for words in SAID[page] if words.format(**said) not in text]
    assert not missing


SAID = {
    "README.md": (
        "GRPO ends {behind} of accuracy behind PPO** ({low} to {high})",
        "gains {gained} of accuracy",
        "loses {lost} in as many completions",
        "0.032 above GRPO ({from_} to {to}; p = 1e-7, uncorrected) at 1e-4",
        "ends {one} above GRPO",
        "({tuned}; {tuned_low} to {tuned_high}): inconclusive",
        "On two other base models, at 2e-4, it is {hard_1} and {hard_2}",
        "at equal times (by {first} after 30.5 seconds, {first_low} to {first_high}, and by {least} to {most} after 40",
        "the lead is {mean} ± {half}",
        "`dpo.py` ends {dpo} below",
    ),
    "README.zh.md": (
        "GRPO 的正确率最后比 PPO 低 {behind}**（{low} 至 {high}）",
        "正确率高 {gained}（",
        "反而低 {lost}，",
        "比 GRPO 高 {one}（{from_} 至 {to}；p = 1e-7，未校正）",
        "（{tuned}；{tuned_low} 至 {tuned_high}），没有定论",
        "在另外两个基座模型上，学习率 2e-4 时的差是 {hard_1} 和 {hard_2}",
        "（30.5 秒时 {first}，区间 {first_low} 至 {first_high}；40 至 60 秒时 {least} 至 {most}）",
        "PPO 的领先是 {mean} ± {half}",
        "`dpo.py` 比它低 {dpo}",
    ),
}


def at_best(name):
    return afterwards.values(f"best-{name}", afterwards.BEST_SEEDS, afterwards.MOST).mean()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "Seven of ten bugs"),
        ("README.zh.md", "十种 bug 里，有七种"),
        ("docs/claims.md", "Seven of ten bugs"),
    ],
)
def test_the_pages_say_how_many_bugs_the_reward_hides(page, words):
    assert [sum(abs(bugs.difference(bug)) < 0.02 for bug in bugs.BUGS), len(bugs.BUGS)] == [7, 10]
    text = (report.ROOT / page).read_text(encoding="utf-8")
    assert words in text and text.index("0.02") < text.index("0.032")


# --- looked at afterwards ---


@pytest.mark.parametrize(
    ("run", "against", "expected"),
    [
        ("ppo", "grpo", "+0.064 (+0.054 to +0.073)"),
        ("ppo-critic_still", "grpo", "+0.028 (+0.017 to +0.038)"),
        ("ppo-32x8", "dr_grpo", "+0.003 (-0.009 to +0.015)"),
        ("dr_grpo", "grpo", "+0.032 (+0.024 to +0.040)"),
    ],
)
def test_what_was_looked_at_afterwards_is_on_the_page(run, against, expected):
    """Welch's interval worked by hand from the rows; the page has the same words."""
    seeds = range(40, 50) if "dr_grpo" in (run, against) else range(40, 53)
    mine, others = ([registry.rows(name, seed)[-1]["accuracy"] for seed in part] for name, part in (
        (run, range(40, 53) if run.startswith("ppo") else seeds), (against, seeds)))  # fmt: skip
    variances = [np.var(side, ddof=1) / len(side) for side in (mine, others)]
    freedom = sum(variances) ** 2 / sum(
        v**2 / (len(side) - 1) for v, side in zip(variances, (mine, others), strict=True)
    )
    half = afterwards.stats.t.isf(0.025, freedom) * sum(variances) ** 0.5
    effect = np.mean(mine) - np.mean(others)
    assert f"{effect:+.3f} ({effect - half:+.3f} to {effect + half:+.3f})" == expected
    assert report.signed(afterwards.at_1e_4(run, against)[0]) == expected
    row = f"| “{report.name(run)}” less “{report.name(against)}” | {len(mine)} and {len(others)} | {expected} |"
    assert row in (ROOT / report.PAGE).read_text(encoding="utf-8")


def test_runs_without_which_a_verdict_differs():
    """Of `overlong` three, all of them unpunished; the page counts them for every claim."""
    claims, found = registry.claims(registry.load()), report.changes()
    assert {(run, seed, verdict) for run, seed, verdict, *_ in found["overlong"]} == {
        ("dapo-all_groups", seed, registry.UNSEEN) for seed in (43, 45, 50)
    }
    counts = {name: len(runs) for name, runs in found.items() if runs}
    assert counts == {"overlong": 3, "dcpo": 9, "best-dapo": 4, "best-ppo": 11}
    assert "“inconclusive” without any one of all groups 43 (p 0.062), 45 (p 0.051), 50 (p 0.062)" in (
        report.without_one_run(claims["overlong"])
    )
    assert report.beside(claims["overlong"]).startswith("0.5% of the answers were punished")


def test_what_the_base_model_had_drawn_is_a_share_of_the_held_out_problems():
    found = json.loads(report.SEEN.read_text(encoding="utf-8"))
    assert {name: of for name, (_, of) in found["counts"].items()} == tasks.HELD_OUT
    assert f"{found['counts']['medium'][0]} of 512 medium" in (ROOT / report.PAGE).read_text(encoding="utf-8")


def test_a_replay_of_one_batch_draws_what_the_training_draws(monkeypatch):
    monkeypatch.setattr(seen, "STEPS", 1)
    drawn = seen.drawn()
    test = {row["question"] for row in map(json.loads, open(seen.build.FOLDER / "test.jsonl", encoding="utf-8"))}
    assert 50 < len(drawn) <= seen.build.ROWS and not drawn & test


def test_the_page_leads_with_what_decides():
    """What is behind a click is not read first; the pilot's findings are on a page of their own."""
    page = (ROOT / report.PAGE).read_text(encoding="utf-8")
    visible = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    assert len(visible.split()) < 5_200 and len(page.split()) < 12_600
    assert page.count("<details>") == page.count("</details>") and "**inconclusive**" in visible


def test_the_note_on_the_punishment_names_the_runs_that_would_flip_it():
    claim = registry.claims(registry.load())["overlong"]
    found = report.changed(claim)
    assert {(run, verdict) for run, _, verdict, *_ in found} == {(claim["primary"]["against"], registry.UNSEEN)}
    assert "the unpunished run of any one of the seeds 43, 45, 50 |" in (ROOT / report.PAGE).read_text(encoding="utf-8")
    assert [seed for _, seed, *_ in found] == [43, 45, 50]


def test_where_a_claim_is_equivalent_its_interval_at_holms_step_lies_within_the_margin():
    found = [(report.decisions()[claim["name"]][0], claim) for claim in registry.load()["claims"]]
    same = sorted((it.measured.p_same, claim["name"]) for it, claim in found if it.verdict == registry.SAME)
    assert len(same) >= 3
    for i, (_, name) in enumerate(same):
        claim = registry.claims(registry.load())[name]
        primary = claim["primary"]
        mine, others = (report.values(primary, primary[side], claim["seeds"]) for side in ("run", "against"))
        said = report.interval_of_equivalence(claim, mine, others)
        assert f"that of {1 - 2 * 0.05 / (len(found) - i):.1%}: " in said  # two one-sided tests at Holm's level
        low, high = map(float, re.findall(r"[+-]\d\.\d+", said))
        assert -primary["same"] < low < high < primary["same"]
