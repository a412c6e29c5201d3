"""tools/plot.py: panels, names of runs, and errors."""

import fnmatch
import json
import sys

import pytest

import plot
from testbed import ROOT, named_metrics

GROUPS = {"step": 1, "reward/mean": 0.5, "reward/accuracy": 0.25, "completion/length": 17.0, "policy/entropy": 0.2}
GROUPS |= {"policy/approx_kl": 0.0, "policy/kl_ref": 0.1, "policy/clip_fraction_high": 0.3, "optim/grad_norm": 1.0}
drawing = pytest.mark.needs("matplotlib")


@pytest.fixture
def run(tmp_path):
    """A function that writes the folder of a run: its rows and its options."""

    def write(name, *rows, **options):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines, encoding="utf-8")
        (tmp_path / name / "args.json").write_text(json.dumps(options), encoding="utf-8")
        return tmp_path / name

    return write


def output_of(capsys, *words):
    """Return the exit code and the one line of a command."""
    code = plot.main([*map(str, words)])
    out, err = capsys.readouterr()
    assert (out + err).count("\n") == 1 and bool(err) == bool(code)
    return code, (out + err).strip()


@drawing
@pytest.mark.parametrize("reward, right", [("accuracy", 0), ("mine.py:mine", 1), ("mine.py:mine", 0)])
def test_accuracy_without_answers_is_not_plotted(reward, right, run, capsys):
    """A run that learned from 0.05 to 0.67 was drawn as a flat 0: pass@1 by a rule that finds none of its answers."""
    evaluation = {"step": 0, "eval/pass@1": 0.0, "eval/reward": 0.05}
    later = GROUPS | {"step": 2, "eval/pass@1": right, "eval/reward": 0.67, "reward/mean": 0.67}
    folder = run(
        "x", evaluation, GROUPS | {"reward/accuracy": 0.0}, later | {"reward/accuracy": right}, reward=[reward]
    )
    code, line = output_of(capsys, folder)
    assert code == 0 and line.startswith(str(folder / "metrics.png: reward/mean, "))
    assert (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
    drawn = line.partition(": ")[2].partition(".")[0].split(", ")
    assert ("eval/pass@1" in drawn) == (right == 1 or reward == "accuracy") and "eval/reward" in drawn
    assert ("reward/accuracy" in line) == (right == 1 or reward == "accuracy")  # it may be flat


@drawing
def test_constant_metrics_are_only_named(run, capsys):
    """The reward even if it is flat; a metric that is flat in each of two runs if they differ."""
    rows = [{"step": step, "reward/mean": 0.0, "policy/ratio_max": 1.0, "policy/entropy": 0.5} for step in (1, 2, 3)]
    rows[2] |= {"policy/approx_kl": 3e-7, "policy/entropy": 0.25, "reward_terms/x": 0.25, "reward_terms/y": 0.25}
    for row in rows[:2]:
        row |= {"policy/approx_kl": 2e-7, "reward_terms/x": 0.0, "reward_terms/y": 0.0}
    one = run("one", *rows)
    other = run("other", *(row | {"policy/ratio_max": 1.5} for row in rows))
    drawn = "reward/mean, reward_terms/x, policy/entropy"
    again = "Same curve: reward_terms/y = reward_terms/x."
    flat = f"Flat: policy/approx_kl 2e-07, policy/ratio_max 1. {again}"
    assert output_of(capsys, one) == (0, f"{one / 'metrics.png'}: {drawn}. {flat}")
    picture = one / "two.png"
    flat = f"Flat: policy/approx_kl 2e-07. {again}"
    assert output_of(capsys, one, other, "-o", picture) == (0, f"{picture}: {drawn}, policy/ratio_max. {flat}")


@drawing
def test_metrics_can_be_named(run, capsys):
    """Also those that do not move, those of a fork, and those with signs of patterns or of matplotlib."""
    signs = r"logged/x[1] $\boxed$"
    folder = run("x", GROUPS | {"curriculum/seen": 3, "curriculum/left": 2, signs: 4})
    drawn = f"policy/approx_kl, curriculum/seen, curriculum/left, {signs}."
    words = [folder / "metrics.jsonl", "--metrics", "policy/approx_kl", "curriculum/*", signs]
    assert output_of(capsys, *words) == (0, f"{folder / 'metrics.png'}: {drawn}")
    code, line = output_of(capsys, folder, "--metrics", "curiculum/*")
    assert code == 2 and "curiculum/*" in line and "reward/mean" in line


def test_metrics_of_a_fork_are_plotted():
    """It was neither plotted nor named."""
    rows = [
        GROUPS | {"step": s, "policy/mine": s / 2, "own": s / 3, "eval/own": 4, "eval/pass@16": s / 5} for s in (1, 2)
    ]
    large, small, notes = plot.choose([plot.Run("mine", {}, rows)])
    assert large == ["reward/mean"] and small == ["policy/mine", "own"] and "eval/own 4" in notes
    known = [*plot.PANELS, *plot.UNPLOTTED]
    page = (ROOT / "docs/watch.md").read_text(encoding="utf-8").partition("\n## Metrics\n")[2]
    names = [name.replace("@k", "@4") for name in named_metrics(page)]
    assert len(names) > 50 and [name for name in names if not any(fnmatch.fnmatch(name, x) for x in known)] == []


def test_seeds_of_a_run_are_grouped(run):
    """Also with --seed N in default folders. Other options, or a script changed in between, make another run."""
    times = [f"mine-20261128-09000{i}-123456" for i in range(6)]
    options = [dict(seed=0), dict(seed=1), dict(seed=2), dict(seed=0, kl_coef=0.1)]
    folders = [run(name, GROUPS, **{"kl_coef": 0, **own}) for name, own in zip(times, options, strict=False)]
    named = [[read.name for read in plot.read_runs(plot.metric_files(chosen))] for chosen in (folders[:3], folders)]
    assert named == [["mine"] * 3, times[:4]]
    again = run(times[4], GROUPS, seed=1, kl_coef=0)
    assert [read.name for read in plot.read_runs(plot.metric_files([folders[1], again]))] == [times[1], times[4]]


@pytest.mark.parametrize(
    "paths, names",
    [
        (["curr/r1", "loo/r1", "sapo/r1"], ["curr", "loo", "sapo"]),
        (["runs/a", "runs/b-seed0", "runs/b-seed1"], ["a", "b", "b"]),
        (["pages/grpo-seed0.jsonl", "pages/ppo-seed0.jsonl"], ["grpo", "ppo"]),
        (["runs/a"], ["a"]),
    ],
)
def test_runs_are_named_by_differing_paths(paths, names, tmp_path):
    """Three forks, each with its run r1, were averaged as if they were seeds."""
    files = [tmp_path / path for path in paths]
    assert plot.run_names([file if file.suffix else file / "metrics.jsonl" for file in files]) == names


def test_accuracy_replaces_dapos_reward():
    """A reward of -1 to 1 over the groups kept was plotted beside that of grpo.py, as if dapo.py learned less."""
    row = {"step": 1, "reward/mean": 0.5, "eval/reward": 0.5, "eval/pass@1": 0.5, "reward/accuracy": 0.75}
    grpo = plot.Run("grpo", {}, [row, row | {"step": 2, "reward/mean": 0.7, "eval/reward": 0.7}])
    kept = {"sampling/keep_rate": 0.25, "reward/mean": -0.5, "eval/reward": -0.5}
    dapo = plot.Run("dapo", {}, [own | kept for own in grpo.rows])
    large, small, notes = plot.choose([grpo, dapo])
    assert large == ["reward/accuracy", "eval/pass@1"] and small == []
    assert "Not plotted: reward/mean, eval/reward" in notes
    assert plot.choose([dapo, dapo])[0][0] == plot.choose([grpo, grpo])[0][0] == "reward/mean"


def test_differing_options_are_named():
    one = {"script": "grpo", "seed": 0, "kl_coef": 0.04, "reward": ["accuracy"], "group_size": 8, "output_dir": "a"}
    other = one | {"script": "dapo", "seed": 1, "kl_coef": 0.0, "reward": ["a", "b"], "overlong": "soft"}

    def differences(*options):
        return plot.differences([plot.Run(f"run {i}", own, []) for i, own in enumerate(options)])

    assert differences(one, other) == "kl_coef 0.04 | 0.0   reward accuracy | a b"
    assert differences(one, one) == ""


@drawing
def test_unfinished_run_drops_half_row_and_nan(run, capsys):
    folder = run("x", GROUPS, *(GROUPS | {"step": i, "reward/mean": x} for i, x in ((2, None), (3, float("nan")))))
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "reward/me')
    assert list(plot.read_run(folder / "metrics.jsonl", "x").curve("reward/mean")) == [1]
    assert output_of(capsys, folder)[0] == 0


def test_unplottable_input_prints_one_line(run, tmp_path, capsys):
    one, other = run("one", GROUPS), run("other", GROUPS)
    (tmp_path / "text.md").write_text("# Title\n", encoding="utf-8")
    for words, word in (
        ([tmp_path / "none"], "none"),
        ([tmp_path], "has no metrics.jsonl; runs in it: empty, one, other"),
        ([tmp_path / "text.md"], "text.md"),
        ([run("empty", {"step": 0, "time/update_s": 1.0})], "no row has a metric"),
        ([one, other], "-o picture.png"),
    ):
        code, line = output_of(capsys, *words)
        assert code == 2 and line.startswith("plot.py: ") and word in line
    assert not list(tmp_path.rglob("*.png"))


@drawing
def test_unknown_format_prints_one_line(run, tmp_path, capsys):
    code, line = output_of(capsys, run("x", GROUPS), "-o", tmp_path / "picture.nothing")
    assert code == 2 and line.startswith("plot.py: ") and "nothing" in line


def test_missing_matplotlib_says_what_to_install(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert output_of(capsys, run("x", GROUPS)) == (2, "plot.py: matplotlib is not installed: pip install matplotlib")


@drawing
def test_thick_line_is_the_seed_mean():
    """The mean covers the steps that all runs reached; there is none if one ends before another begins."""
    axis = plot.pyplot().subplots()[1]
    seeds = [[{"step": step, "m": float(step * i)} for step in range(last)] for i, last in ((1, 4), (3, 3))]
    plot.plot_metric(axis, [plot.Run("a", {}, rows) for rows in seeds], "m", True)
    assert axis.lines[-1].get_xydata().tolist() == [[0, 0], [1, 2], [2, 4]]
    (band,) = axis.collections  # from the smallest to the largest seed
    assert {(2, 2), (2, 6), (1, 1), (1, 3)} <= set(map(tuple, band.get_paths()[0].vertices))
    assert axis.get_title(loc="right") == "0 → 4"
    assert plot.running_mean([1.0] * 99 + [2.0])[-2:] == [4 / 3, 1.5] and plot.running_mean([1, 2]) == [1, 2]
    apart = [[{"step": step, "m": 1.0} for step in (5, 10)], [{"step": 2, "m": 1.0}]]
    plot.plot_metric(axis, [plot.Run("b", {}, rows) for rows in apart], "m", True)
    assert len(axis.lines[-1].get_xydata()) == 0
    plot.pyplot().close()
