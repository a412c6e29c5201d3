"""docs/monitoring.md and names in metrics.md: what they say in numbers, and in words, is what runs and scripts say."""

import json
import re

import pytest

import monitoring
import plot
from testbed import ROOT, metric_rows, script

TEXT = (ROOT / monitoring.PAGE).read_text(encoding="utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())
SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 1 --eval_samples 4".split()


def test_the_table_is_that_of_the_kept_rows():
    assert f"<!-- table: health -->\n{monitoring.table()}\n" in TEXT


def test_a_row_worked_by_hand(monkeypatch, tmp_path):
    """First row and the last five of each of two seeds, the range of all; an older name is read as today's."""
    monkeypatch.setattr(monitoring, "RESULTS", tmp_path)
    monitoring.rows_of.cache_clear()
    (tmp_path / "pages").mkdir()
    for seed, shares in enumerate(([8, 0, 1, 1, 1, 1, 1], [2, 3, 3, 3, 3, 3])):
        rows = [
            {"command": "x"},
            {"step": 0, "eval/pass@1": 0.25},
            *({"step": 1, "policy/clip_low": x} for x in shares),
        ]
        rows.append({"step": 9, "eval/pass@1": 0.5 + seed / 2})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "pages" / f"a-seed{seed}.jsonl").write_text(lines, encoding="utf-8")
    curve = monitoring.Curve("policy/clip_fraction_low", "healthy", "pages/a", "")
    assert monitoring.summary(curve) == (2, 5, 2, 0, 8) and monitoring.held_out("pages/a") == [0.25, 0.75]
    monitoring.rows_of.cache_clear()


def test_each_metric_has_a_healthy_curve_and_one_that_is_not():
    metrics = {curve.metric for curve in monitoring.CURVES}
    for metric in metrics:
        assert {curve.health for curve in monitoring.CURVES if curve.metric == metric} == {"healthy", "unhealthy"}
    drawn = [(curve.metric, curve.health) for curve in monitoring.CURVES if curve.drawn]
    assert len(drawn) == len(set(drawn)) == 2 * (len(monitoring.DRAWN) - 1)  # pass@1 is that of the runs of the reward
    assert {metric for metric, _ in drawn} == monitoring.DRAWN.keys() - {"eval/pass@1"}
    assert (ROOT / "docs" / "figures" / "monitoring.png").is_file() and "(figures/monitoring.png)" in TEXT


def test_what_is_said_of_the_rows():
    """Which of the runs learnt, and in which direction a curve goes."""
    ends = {}
    for curve in monitoring.CURVES:
        _, first, last, *_ = monitoring.summary(curve)
        before, after = monitoring.held_out(curve.runs)
        ends[curve.metric, curve.runs] = first, last
        if curve.health == "healthy":
            assert after > before + 0.2, curve
        elif not curve.runs.startswith("bugs/") and "clip-1" not in curve.runs and "kl_0.01" not in curve.runs:
            assert after < before + 0.03, curve
        for word, sign in (("rise", 1), ("grow", 1), ("fall", -1)):
            assert not curve.what.startswith(word) or sign * (last - first) > 0, curve
    wrong, right = (ends["advantage/zero_groups", name][1] for name in ("real_model/mix-grpo", "bugs/default"))
    rewards = [monitoring.mean_of_last(name, "reward/mean") for name in ("real_model/mix-grpo", "bugs/default")]
    assert wrong - rewards[0] > wrong / 2 and right - (1 - rewards[1]) > right / 2  # all right, all wrong: at most that
    still = ends["completion/length", "registered/grpo"]
    assert abs(still[1] / still[0] - 1) < 0.1
    for healthy, other in (
        ("claims/clip-0.2_0.2", "claims/clip-1_1000"),
        ("claims/learned-kl_0.05", "claims/learned-kl_0.01"),
    ):
        assert monitoring.held_out(healthy)[1] > monitoring.held_out(other)[1] + 0.1


def every(runs, metric):
    return [value for seed in monitoring.values(runs, f"policy/{metric}") for value in seed]


def test_a_clip_fraction_of_0_is_no_bug_and_a_ratio_of_1_is():
    """With several updates per rollout: healthy runs clip nothing in most steps, and their ratio is never 1."""
    clipped, ratios = (every("pages/dr_grpo", metric) for metric in ("clip_fraction_high", "ratio_max"))
    assert clipped.count(0) > 0.9 * len(clipped) and min(ratios) > 1
    for metric, value in (("ratio_max", 1), ("approx_kl", 0)):
        found = every("bugs/with-old_logprobs", metric)
        assert len(found) == 60 and set(found) == {value}
    firsts = [rows[0] for run in ("dr_grpo", "dapo", "dcpo", "ppo") for side in ("low", "high")
              for rows in monitoring.values(f"pages/{run}", f"policy/clip_fraction_{side}")]  # fmt: skip
    assert max(firsts) < 0.03 and "up to 3 % of the tokens in the first steps are normal" in WORDS


def test_no_kept_run_rises_in_entropy_and_in_accuracy():
    """Which the page says; with the means of three rows, as the entropy of a step jumps."""
    learnt = 0
    for file in [*monitoring.RESULTS.glob("*/*-seed*.jsonl")]:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        right = "eval/reward" if file.parent.name == "real_model" else "eval/pass@1"
        entropy = [row["policy/entropy"] for row in rows if "policy/entropy" in row]
        scores = [row[right] for row in rows if right in row and "step" in row]
        if len(entropy) > 6 and len(scores) > 1 and scores[-1] > scores[0]:
            learnt += 1
            assert sum(entropy[-3:]) < sum(entropy[:3]), file
    assert learnt > 400
    assert "No run that is kept here rises in entropy and in accuracy" in WORDS


def test_the_kl_of_verl_and_ours_is_that_of_the_table():
    """Which tools/refresh.py computes."""
    text = (ROOT / "docs" / "corrections.md").read_text(encoding="utf-8")
    row = re.search(r"\| `ppo_kl` \(k1\) \| (\S+) \| `policy/approx_kl` \(k3\) \| (\S+) \|", text)
    assert float(row[1]) < 0 and f"at times negative: [{row[1]} where k3 is {row[2]}](corrections.md)" in METRICS


def test_the_names_exist():
    documented = re.findall(r"^\| `(\S+)` \|", METRICS, re.MULTILINE)
    drawn = {curve.metric for curve in monitoring.CURVES}
    assert len(elsewhere("verl")) > 12 and drawn <= plot.PANELS.keys() and drawn <= set(documented)


def elsewhere(project):
    """The names in another project that the glossary gives, each after the project's."""
    return re.findall(rf"{project} `(.*?)`", METRICS)


@pytest.mark.needs("trl")
def test_the_names_of_trl_are_in_its_text():
    """trl is not imported: it takes seconds."""
    import importlib.util
    import pathlib

    folder = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "trainer"
    text = "".join((folder / f"{name}_trainer.py").read_text(encoding="utf-8") for name in ("grpo", "dpo"))
    names = set(elsewhere("TRL")) - {"grad_norm"}
    assert len(names) > 12  # that one is logged by transformers
    for name in names:
        assert f'"{name}"' in text or ("<name>" in name and 'f"rewards/{reward_func_name}/mean"' in text), name


@pytest.mark.parametrize(
    "options, symptom",
    [
        ("--num_minibatches 4", lambda row: row["policy/ratio_max"] > 1.05),
        ("--dtype bfloat16", lambda row: row["rollout/logprob_gap"] > 1e-5),
    ],
)
def test_what_is_said_of_a_command(options, symptom, tmp_path, monkeypatch):
    monkeypatch.setattr(script("grpo"), "evaluate", lambda *given: ({}, None))
    script("grpo").main([*SMALL, *options.split(), "--max_steps", "1", "--output_dir", str(tmp_path / "run")])
    assert symptom(metric_rows(tmp_path / "run")[-1])
