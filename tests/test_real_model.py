"""lab/real_model.py: what it reads from the rows of a run."""

import importlib.util
import json
import re
import statistics

import pytest

import real_model
from testbed import ROOT


def test_the_share_of_right_answers_is_that_of_the_closing_line_where_all_problems_are_sums():
    header = real_model.read_rows(real_model.result("sums", 0))[0]
    share = f"before {real_model.start('sums', 0):.3f}, after {real_model.final('sums', 0):.3f}"
    assert header["said"].startswith(f"eval/reward {share};")


def test_the_pages_say_where_the_seeds_end():
    ends = [real_model.final("sums", seed) for seed in real_model.SEEDS + real_model.MORE_SEEDS]
    low, high = f"{min(ends):.2f}", f"{max(ends):.2f}"
    assert len(ends) == 8
    mean = f"{statistics.mean(ends):.2f}"
    assert sorted(ends, reverse=True)[1] == ends[0]  # the pages show seed 0
    said = f"Eight seeds end at {low} to {high} of right answers, {mean} on average; the second best of them at "
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{low} 到 {high}，平均 {mean}；其中第二好的一个：" in (ROOT / "README.zh.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "real_model.md").read_text(encoding="utf-8")
    ends_in = f"{100 * min(ends):.0f} to {100 * max(ends):.0f} after 24 steps"
    assert f"{ends_in} (eight seeds; {100 * float(mean):.0f} on average)" in page
    assert "(Seed 0, the second best of the eight;" in page


def test_the_page_says_what_greedy_answers_are_worth():
    shares = [real_model.curve(f"greedy-{tokens}", 0, "eval/reward")[0][1] for tokens in (24, 64)]
    headers = [real_model.read_rows(real_model.result("sums", seed))[0] for seed in (2, *real_model.MORE_SEEDS)]
    trained = [header["greedy"] for header in headers]
    short, longer, least, most = (f"{100 * value:.0f}" for value in (*shares, min(trained), max(trained)))
    page = " ".join((ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split())
    assert f"right for {short} of 100 problems within 24 tokens and for {longer} within 64" in page
    assert f"after training it is right for {least} to {most} (six seeds)" in page
    assert f"the start is at {shares[1]:.2f}, not at {real_model.start('sums', 0):.2f}" in page


def test_the_page_says_what_a_task_of_reasoning_gym_gave():
    header = real_model.read_rows(real_model.RESULTS / "reasoning_gym.jsonl")[0]
    before, after = re.match("eval/reward before (.*), after (.*);", header["said"]).groups()
    page = " ".join((ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split())
    assert f"96 held-out problems from {before} to {after} ([rows]" in page


def test_the_page_says_what_the_bare_model_gets_of_the_mix():
    kinds = [f"{real_model.final('mix-bare', 0, (kind,)):.2f}" for kind in real_model.PROBLEMS]
    page = " ".join((ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split())
    assert "{} of the sums, {} of the differences and no sum of three terms".format(*kinds) in page
    assert kinds[2] == "0.00"
    names = [f"mix-{name}" for name in ("grpo", "dapo", "ppo", "dpo", "grpo-long")]
    starts, most = {f"{real_model.start(name, 0):.2f}" for name in names}, max(map(real_model.final, names, [0] * 5))
    assert starts == {"0.21"} and f"at {starts.pop()}. None of five (`mix-*`) ended above {most:.2f}" in page


def test_the_page_says_what_the_reward_model_paid_for():
    name = "ppo-reward_model"
    scores = [real_model.curve(name, 0, metric) for metric in ("eval/reward", "policy/entropy")]
    ends = [value for points in scores for value in (points[0][1], points[-1][1])]
    ends[2:2] = [real_model.start(name, 0), real_model.final(name, 0)]
    page = " ".join((ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split())
    words = "rose from {:.2f} to {:.2f}, the share of right ones from {:.2f} to {:.2f}, and the entropy fell from"
    assert f"{words} {{:.2f}} to {{:.2f}}".format(*ends) in page
    said = real_model.read_rows(real_model.result(name, 0))[0]["before_said"]
    accuracy = float(said[1].split("after ")[1].split(";")[0])
    assert f"the right answer in {accuracy:.2f} of its held-out pairs" in page


def test_the_weights_of_the_kinds_are_those_of_the_test_problems(tmp_path):
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
    smollm2.write_problems(tmp_path, "mix", ["sum", "difference", "three"])
    rows = [json.loads(line) for line in (tmp_path / "mix" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in real_model.PROBLEMS}
    assert counts == real_model.PROBLEMS


@pytest.mark.parametrize(("completions", "value"), [(0, 0.2), (64, 0.3), (128, 0.4), (192, 0.5), (999, 0.6)])
def test_between_two_evaluations_lies_a_straight_line(completions, value):
    assert real_model.value_at([(0, 0.2), (128, 0.4), (256, 0.6)], completions) == pytest.approx(value)


def test_two_processes_do_not_share_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "ROOT", tmp_path)
    monkeypatch.setattr(real_model, "RESULTS", tmp_path)
    with (
        real_model.claim("grpo", 0) as mine,
        real_model.claim("grpo", 0) as other,
        real_model.claim("grpo", 1) as next_,
    ):
        assert (mine, other, next_) == (True, False, True)
    (tmp_path / "grpo-seed0.jsonl").touch()
    with real_model.claim("grpo", 0) as mine:
        assert not mine  # it has results by now


def test_the_page_says_which_rates_could_be_told_apart():
    found = {}
    for name in real_model.COMPARED:
        found[name] = [real_model.final(f"tune-{name}-{rate}", real_model.TUNING_SEED) for rate in real_model.RATES]
    assert [name for name, (slow, fast) in found.items() if abs(fast - slow) > 0.1] == ["dapo"]
    said = "dapo.py's do ({:.2f} and {:.2f})".format(*found["dapo"])
    assert said in " ".join((ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split())


def test_a_run_has_the_rate_of_its_tuning(monkeypatch):
    scores = {"tune-sums-5e-6": 0.2, "tune-sums-1e-5": 0.3, "tune-ppo-5e-6": 0.2, "tune-ppo-1e-5": 0.2}
    monkeypatch.setattr(real_model, "final", lambda name, seed: scores.get(name))
    assert (real_model.tuned("sums"), real_model.tuned("gspo"), real_model.tuned("ppo")) == ("1e-5", "1e-5", "5e-6")
    assert real_model.tuned("dpo") is None and real_model.command("dpo") is None
    assert real_model.command("gspo").endswith("--max_steps 24 --learning_rate 1e-5")


def test_runs_from_another_start_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "ROOT", tmp_path)
    monkeypatch.setattr(real_model, "RESULTS", tmp_path)
    (tmp_path / real_model.START).mkdir(parents=True)
    (tmp_path / real_model.START / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(real_model, "command", lambda name: real_model.START)
    digest = real_model.make_start("grpo")
    (tmp_path / "grpo-seed0.jsonl").write_text(json.dumps({"start": digest}) + "\n", encoding="utf-8")
    assert real_model.make_start("grpo") == digest
    (tmp_path / real_model.START / "model.safetensors").write_bytes(b"others")
    with pytest.raises(SystemExit, match=f"and {digest[:12]} in .*runs from different models do not compare"):
        real_model.make_start("grpo")


def test_a_run_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real_model, "ROOT", tmp_path)
    monkeypatch.setattr(real_model, "RESULTS", tmp_path)
    monkeypatch.setattr(real_model, "JOBS", [("sums", 1), ("sums", 2)])
    monkeypatch.setattr(real_model, "execute", lambda command, folder: (1, f"{folder} fails", 0.0))
    monkeypatch.setattr("sys.argv", ["real_model.py"])
    real_model.main()
    said = capsys.readouterr().out
    assert "sums seed 1: FAILED" in said and "sums seed 2: FAILED" in said and "sums-seed2 fails" in said
    assert not list(tmp_path.glob("*.jsonl"))


def write_runs(tmp_path, monkeypatch, shares):
    """Files of results {name: [share at the end, of each seed]}, of two steps each."""
    monkeypatch.setattr(real_model, "RESULTS", tmp_path)
    for name, ends in shares.items():
        for seed, end in enumerate(ends):
            header = {"command": "python ...", "said": "...", "cpu_seconds": 90.0 + seed}
            rows = [{"step": 0, "eval/logged/sum": 0.02}, {"step": 1, "completion/length": 9.0}]
            rows.append({"step": 2, "completion/length": 7.0, "eval/logged/sum": end})
            real_model.write(real_model.result(name, seed), [header, *rows])


@pytest.mark.needs("scipy")
def test_scripts_are_compared_where_both_have_all_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "tuned", lambda name: "1e-5")
    write_runs(tmp_path, monkeypatch, {"sums": [0.3, 0.4, 0.5], "ppo": [0.5, 0.6, 0.7], "dr_grpo": [0.5, 0.6]})
    _, *rows = real_model.compared_table()
    assert [row[0] for row in rows] == ["`grpo.py`", "`dr_grpo.py`", "`ppo.py`"]
    # by hand: deviations 0.1 of three seeds each, so a half width of 2.776 sqrt(2 x 0.01 / 3)
    assert [row[5] for row in rows] == ["", "", "+0.20 (-0.03 to +0.43)"]
    assert rows[1][1:5] == ["1e-5", "0.020", "0.500, 0.600", "0.550"]
    assert rows[0][-1] == "2, 2, 2"  # minutes: 90, 91 and 92 seconds


def test_a_step_samples_its_rounds_and_a_round_of_pairs_its_prompts():
    assert real_model.sampled({"completion/length": 9.0}) == 64
    assert real_model.sampled({"completion/length": 9.0, "sampling/rounds": 3.0}) == 192
    assert real_model.sampled({"pairs/made": 12.0, "pairs/yield": 0.375}) == 256
    assert real_model.sampled({"eval/reward": 0.5}) == 0


def test_the_page_says_how_many_pairs_the_bare_model_makes():
    first = real_model.rows_of("dpo-bare", 0)[0]
    page = " ".join((ROOT / "docs" / "real_model.md").read_text(encoding="utf-8").split())
    assert f"({real_model.sampled(first)} completions gave {first['pairs/made']:.0f} pair)" in page
