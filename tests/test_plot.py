"""tools/plot.py: which panels a run has, where its picture lies, and what is no run."""

import json
import subprocess
import sys

import pytest

import plot
from testbed import ROOT

GROUPS = {"step": 1, "reward/mean": 0.5, "reward/accuracy": 0.25, "completion/length": 17.0, "policy/entropy": 0.2}
GROUPS |= {"policy/approx_kl": 0.0, "policy/kl_ref": 0.1, "policy/clip_fraction_high": 0.3, "optim/grad_norm": 1.0}
PAIRS = {"step": 1, "rewards/margin": 0.4, "rewards/accuracy": 0.5, "logps/chosen": -1.0, "logps/rejected": -2.0}
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


def said(capsys, *words):
    """The exit code and the one line of a command."""
    sys.argv, before = ["plot.py", *map(str, words)], sys.argv
    try:
        code = plot.main()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    assert (out + err).count("\n") == 1 and "Traceback" not in err and bool(err) == bool(code)
    return code, (out + err).strip()


@drawing
@pytest.mark.parametrize(
    "reward, is_right, has_accuracy",
    [("accuracy", 1, True), ("accuracy", 0, True), ("mine.py:mine", 1, True), ("mine.py:mine", 0, False)],
)
def test_accuracy_is_drawn_where_it_is_rewarded_or_finds_answers(reward, is_right, has_accuracy, run, capsys):
    """A run that learns from 0.05 to 0.67 was drawn as a flat 0: pass@1 by a rule that finds none of its answers."""
    evaluation = {"step": 0, "eval/pass@1": 0.0, "eval/pass@4": 0.0, "eval/reward": 0.05}
    first = GROUPS | {"reward/accuracy": 0.0}
    later = {"step": 2} | {name: 2 * value + 1 for name, value in (first | evaluation).items() if name != "step"}
    later |= {"eval/pass@1": is_right, "reward/accuracy": is_right}
    folder = run("x", evaluation, first, later, reward=[reward, "format"])
    code, line = said(capsys, folder)
    path, _, drawn = line.partition(": ")
    assert code == 0 and path == str(folder / "metrics.png") and (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
    drawn = drawn.partition(".")[0].split(", ")
    assert ("eval/pass@1" in drawn) == has_accuracy and {"reward/mean", "eval/reward", "policy/entropy"} <= set(drawn)
    assert ("reward/accuracy" in line) == has_accuracy  # it may be flat


@drawing
def test_runs_of_pairs_have_panels_of_their_own(run, capsys):
    later = {name: value + 1 for name, value in PAIRS.items()}
    dpo = run("dpo", PAIRS, later, reward=["accuracy"])
    model = run("model", PAIRS, later | {"eval/accuracy": 0.5, "eval/loss": 0.7})  # of reward_model.py: no --reward
    rest = "rewards/margin, logps/chosen, logps/rejected."
    assert said(capsys, dpo) == (0, f"{dpo / 'metrics.png'}: rewards/accuracy, {rest}")
    assert said(capsys, model)[1].endswith(f": rewards/accuracy, eval/accuracy, {rest} Flat: eval/loss 0.7.")


@drawing
def test_what_does_not_move_is_named_and_not_drawn(run, capsys):
    """Unless it is the reward; and a value at which two runs stay is drawn where the two differ."""
    rows = [{"step": step, "reward/mean": 0.0, "policy/ratio_max": 1.0, "policy/entropy": 0.5} for step in (1, 2, 3)]
    rows[2] |= {"rollout/logprob_gap": 3e-7, "policy/entropy": 0.25, "reward_part/x": 0.25, "reward_part/y": 0.25}
    for row in rows[:2]:
        row |= {"rollout/logprob_gap": 2e-7, "reward_part/x": 0.0, "reward_part/y": 0.0}
    one = run("one", *rows)
    other = run("other", *(row | {"policy/ratio_max": 1.5} for row in rows))
    drawn = "reward/mean, reward_part/x, policy/entropy"
    again = "Drawn already: reward_part/y = reward_part/x."
    flat = f"Flat: policy/ratio_max 1, rollout/logprob_gap 2e-07. {again}"
    assert said(capsys, one) == (0, f"{one / 'metrics.png'}: {drawn}. {flat}")
    picture = one / "two.png"
    flat = f"Flat: rollout/logprob_gap 2e-07. {again}"
    assert said(capsys, one, other, "-o", picture) == (0, f"{picture}: {drawn}, policy/ratio_max. {flat}")


@drawing
def test_parts_of_the_reward_and_what_is_logged_are_drawn(run, capsys):
    """They are what somebody with a reward function of their own wants to see."""
    names = ["reward_part/right", "logged/lines", "eval/logged/lines", "sampling/rounds", "overlong/penalty"]
    rows = [{"step": step} | {name: step * i for i, name in enumerate(names, 1)} for step in (1, 2)]
    folder = run("y", *rows)
    assert said(capsys, folder)[1] == f"{folder / 'metrics.png'}: {', '.join(names)}."


@drawing
def test_metrics_can_be_asked_for(run, tmp_path, capsys):
    """Also those that do not move, and those of a fork."""
    folder = run("x", GROUPS | {"curriculum/seen": 3, "curriculum/left": 2, "logged/x[1]": 4})
    asked = ["policy/approx_kl", "curriculum/*", "logged/x[1]"]
    drawn = "policy/approx_kl, curriculum/seen, curriculum/left, logged/x[1]."
    assert said(capsys, folder, "--metrics", *asked) == (0, f"{folder / 'metrics.png'}: {drawn}")
    code, line = said(capsys, folder, "--metrics", "curiculum/*")
    assert code == 2 and line.startswith("plot.py: no row has the metric curiculum/*; there are reward/mean, ")


@drawing
def test_a_run_may_be_given_by_its_file_and_several_by_a_pattern(run, tmp_path, capsys):
    one, picture = run("a-seed0", GROUPS), tmp_path / "both.png"
    run("a-seed1", GROUPS | {"step": 2})
    assert said(capsys, one / "metrics.jsonl")[1].startswith(f"{one / 'metrics.png'}: reward/mean")
    for runs in ([f"{tmp_path}/a-*"], [one, tmp_path / "a-seed1"], [one, one, tmp_path / "a-*"]):
        assert said(capsys, *runs, "-o", picture)[1].startswith(f"{picture}: reward/mean") and picture.is_file()
        picture.unlink()
    assert plot.names_of(plot.files_of([one, f"{tmp_path}/a-*"])) == ["a", "a"]


@pytest.mark.parametrize(
    "paths, names",
    [
        (["curr/r1", "loo/r1", "sapo/r1"], ["curr", "loo", "sapo"]),
        (["runs/a", "runs/b-seed0", "runs/b-seed1"], ["a", "b", "b"]),
        (["a-seed0/r1", "a-seed1/r1", "b/r1"], ["a", "a", "b"]),
        (["x/r1", "y/r2"], ["x/r1", "y/r2"]),
        (["a", "a/b"], ["a", "a/b"]),
        (["pages/grpo-seed0.jsonl", "pages/ppo-seed0.jsonl"], ["grpo", "ppo"]),
        (["runs/a"], ["a"]),
    ],
)
def test_runs_have_the_part_of_their_paths_that_differs_as_names(paths, names, tmp_path):
    """Three different forks, each in its r1, were drawn as one mean."""
    files = [tmp_path / path for path in paths]
    files = [file if file.suffix else file / "metrics.jsonl" for file in files]
    assert plot.names_of(files) == names


def test_a_file_of_its_own_has_all_that_it_holds_and_todays_names(run, tmp_path, capsys):
    (tmp_path / "x-seed0.jsonl").write_text(json.dumps(GROUPS | {"policy/clip_low": 0.5}) + "\n", encoding="utf-8")
    (row,) = plot.read(tmp_path / "x-seed0.jsonl", "x").rows
    assert {"reward/accuracy", "policy/clip_fraction_low"} <= row.keys()
    assert said(capsys, tmp_path / "x-seed0.jsonl")[0] == 2  # its folder is no place for pictures


def columns_of(figure):
    """How many panels stand beside each other at most."""
    tops = [round(axis.get_position().y1, 2) for axis in figure.axes]
    return max(tops.count(top) for top in tops)


@drawing
@pytest.mark.parametrize("large, small, grid", [(1, 0, (1, 1)), (2, 1, (2, 2)), (2, 8, (3, 4)), (0, 2, (1, 2))])
def test_large_panels_stand_above_small_ones(large, small, grid):
    names = list(plot.PANELS)[: large + small]
    rows = [{"step": s} | dict.fromkeys(names, 0.5) for s in (0, 1)]
    runs = [plot.Run(f"run {i}", {}, rows) for i in range(20)]  # more than there are colours
    figure = plot.picture(runs, names[:large], names[large:], "What is flat.")
    figure.draw_without_rendering()
    assert (len({round(axis.get_position().y1, 2) for axis in figure.axes}), columns_of(figure)) == grid
    plot.pyplot().close(figure)


@drawing
def test_the_lowest_panel_of_each_column_names_its_axis():
    """With a gap in the last row, three of four columns had an axis without a name."""
    names = list(plot.PANELS)[:5]
    run = plot.Run("x", {}, [{"step": step} | dict.fromkeys(names, 0.5) for step in (0, 1)])
    figure = plot.picture([run], [], names)
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "", "step", "step", "step"]
    plot.pyplot().close(figure)


def test_the_reward_of_a_run_that_drops_groups_says_so():
    """It fell beside a pass@1 of 1: the groups that are kept have wrong answers."""
    every = plot.Run("grpo", {}, [{"step": 1, "reward/mean": 0.5}])
    kept = plot.Run("dapo", {}, [{"step": 1, "reward/mean": 0.5, "sampling/keep_rate": 0.25}])
    assert plot.words_of("reward/mean", [kept]) == "reward of the groups kept"
    assert plot.words_of("reward/mean", [kept, every]) == "reward"


def test_beside_dapo_the_accuracy_stands_for_the_reward():
    """A reward of -1 to 1 over the groups kept lay under grpo.py's, as if it learned less."""
    row = {"step": 1, "reward/mean": 0.5, "eval/reward": 0.5, "eval/pass@1": 0.5, "reward/accuracy": 0.75}
    grpo = plot.Run("grpo", {}, [row, row | {"step": 2, "reward/mean": 0.7, "eval/reward": 0.7}])
    kept = {"sampling/keep_rate": 0.25, "reward/mean": -0.5, "eval/reward": -0.5}
    dapo = plot.Run("dapo", {}, [own | kept for own in grpo.rows])
    large, small, notes = plot.choose([grpo, dapo])
    assert large == ["reward/accuracy", "eval/pass@1"] and small == []
    assert "Not drawn: reward/mean, eval/reward, since right is 1 and wrong -1 in dapo.py" in notes
    assert plot.choose([dapo, dapo])[0][0] == plot.choose([grpo, grpo])[0][0] == "reward/mean"


@drawing
@pytest.mark.parametrize("last", [1, 2, 3, 7, 50, 1234])
def test_ticks_are_whole_steps(last):
    run = plot.Run("x", {}, [{"step": step, "m": step} for step in range(1, last + 1)])
    figure = plot.picture([run], ["m"], [])
    ticks = figure.axes[0].get_xticks()
    assert all(tick == int(tick) for tick in ticks) and len(ticks) <= 9
    plot.pyplot().close(figure)


def test_a_title_says_what_is_known_of_the_runs(run):
    """The args.json of an older run does not name its script."""
    known = {"model_name_or_path": "/home/me/models/Qwen/Qwen2.5-0.5B", "dataset": ["a.jsonl"], "max_steps": 9}
    one = run("one", GROUPS, script="grpo", **known)
    two = run("two", GROUPS, script="mine", **known)
    old = run("old", GROUPS, **known)
    one, two, old = (plot.read(folder / "metrics.jsonl", folder.name) for folder in (one, two, old))
    rest = "model Qwen/Qwen2.5-0.5B  ·  data a.jsonl"
    assert plot.title_of([one]) == f"grpo.py  ·  {rest}"
    assert plot.title_of([one, two]) == f"grpo.py, mine.py  ·  {rest}"
    assert plot.title_of([old]) == rest
    assert plot.steps_of(old) == "step 1 of 9"


@drawing
def test_a_run_that_goes_on_is_drawn_without_its_half_row(run, capsys):
    folder = run("x", GROUPS, GROUPS | {"step": 2})
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "reward/me')
    assert len(plot.read(folder / "metrics.jsonl", "x").rows) == 2
    assert said(capsys, folder)[0] == 0


@drawing
@pytest.mark.parametrize("value", [None, "high", float("nan")])
def test_what_is_no_finite_number_is_not_drawn(value, run, capsys):
    folder = run("x", GROUPS, GROUPS | {"step": 2, "reward/mean": value}, GROUPS | {"step": 3})
    assert said(capsys, folder)[0] == 0
    assert list(plot.read(folder / "metrics.jsonl", "x").curve("reward/mean")) == [1, 3]


@drawing
def test_watch_draws_again_with_each_new_row(run, monkeypatch, capsys):
    """And waits for a run that has no row yet, until Ctrl-C."""
    folder = run("x")
    rows = [GROUPS, None, GROUPS | {"step": 2}]

    def sleep(seconds):
        if not rows:
            raise KeyboardInterrupt
        row = rows.pop(0)
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n" if row else "")

    monkeypatch.setattr(plot.time, "sleep", sleep)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(folder), "--watch"])
    assert plot.main() == 0
    out, err = capsys.readouterr()
    assert out.count("metrics.png: reward/mean") == 2 and err.count("\n") == 1 and "no row" in err


def test_what_cannot_be_drawn_is_one_line(run, tmp_path, capsys):
    one, other = run("one", GROUPS), run("other", GROUPS)
    (tmp_path / "text.md").write_text("# Title\n", encoding="utf-8")
    (tmp_path / "list.jsonl").write_text("[1]\n3\n", encoding="utf-8")
    empty = run("empty", {"step": 0, "time/update_s": 1.0})
    several = "name it with -o picture.png"
    for words, what in (
        ([tmp_path], f"{tmp_path / 'metrics.jsonl'} is not there: RUN is the folder of a run"),
        ([tmp_path / "none"], f"{tmp_path / 'none'} is not there"),
        ([tmp_path / "text.md"], "text.md is not the metrics.jsonl of a run"),
        ([tmp_path / "list.jsonl"], "list.jsonl is not the metrics.jsonl of a run"),
        ([empty], "no row has a metric that is drawn"),
        ([one, other], several),
    ):
        code, line = said(capsys, *words)
        assert code == 2 and line.startswith("plot.py: ") and what in line
    assert not list(tmp_path.rglob("*.png"))


@drawing
def test_a_picture_that_cannot_be_written_is_one_line(run, tmp_path, capsys):
    for output in (tmp_path / "none" / "a.png", tmp_path / "a.unknown"):
        code, line = said(capsys, run(output.stem + output.suffix, GROUPS), "-o", output)
        assert code == 2 and line.startswith(f"plot.py: {output} cannot be written: ")


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch, capsys):
    folder = run("x", GROUPS)
    plot.pyplot.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert said(capsys, folder) == (2, "plot.py: matplotlib is not installed: pip install matplotlib")


@drawing
def test_a_run_that_ends_before_another_begins_is_drawn_too():
    axis = plot.pyplot().subplots()[1]
    seeds = [[{"step": step, "m": 1.0} for step in (5, 10)], [{"step": 2, "m": 1.0}]]
    plot.draw(axis, [plot.Run("a", {}, rows) for rows in seeds], "m", True)
    assert len(axis.lines) == 2  # two seeds, and no mean of them
    plot.pyplot().close()


@drawing
def test_the_thick_line_is_the_mean_of_the_seeds():
    axis = plot.pyplot().subplots()[1]
    seeds = [[{"step": step, "m": float(step * i)} for step in range(last)] for i, last in ((1, 4), (3, 3))]
    plot.draw(axis, [plot.Run("a", {}, rows) for rows in seeds], "m", False)
    assert axis.lines[-1].get_xydata().tolist() == [[0, 0], [1, 2], [2, 4]]
    assert plot.running_mean([1.0] * 99 + [2.0])[-2:] == [4 / 3, 1.5] and plot.running_mean([1, 2]) == [1, 2]
    plot.pyplot().close()


# --- several runs ---


def runs_of(*options):
    """Runs of one row with these options, named a, b, ..."""
    row = {"step": 1, "reward/mean": 0.5, "eval/pass@1": 0.5}
    return [plot.Run(chr(97 + i), own, [row]) for i, own in enumerate(options)]


def test_runs_are_named_by_their_scripts_where_these_tell_them_apart(run):
    names = []
    for scripts in (["grpo", "dapo"], ["grpo", "grpo"], ["grpo", None], ["grpo"]):
        folders = []
        for i, script in enumerate(scripts):
            options = {"script": script} if script else {}
            folders.append(run(f"{'-'.join(map(str, scripts))}-{i}", GROUPS, **options))
        names.append([own.name for own in plot.read_runs(plot.files_of(folders))])
    one, two = ("grpo-grpo-0", "grpo-grpo-1"), ("grpo-None-0", "grpo-None-1")
    assert names == [["grpo", "dapo"], [*one], [*two], ["grpo-0"]]


def test_seeds_of_two_scripts_have_the_names_of_the_scripts(run):
    folders = []
    for script in ("grpo", "ppo"):
        folders += [run(f"of {script}-seed{seed}", GROUPS, script=script) for seed in (0, 1)]
    assert [own.name for own in plot.read_runs(plot.files_of(folders))] == ["grpo", "grpo", "ppo", "ppo"]


def test_the_options_that_differ_are_named():
    one = {"script": "grpo", "seed": 0, "kl_coef": 0.04, "reward": ["accuracy"], "group_size": 8, "output_dir": "a"}
    other = one | {"script": "dapo", "seed": 1, "kl_coef": 0.0, "reward": ["a", "b"], "overlong": "soft"}
    assert plot.differences(runs_of(one, other)) == "kl_coef 0.04 | 0.0   reward accuracy | a b"
    assert plot.differences(runs_of(one, one)) == ""
    many = {f"option_{i}": i for i in range(10)}
    more = {name: value + 1 for name, value in many.items()}
    assert plot.differences(runs_of(many, more)).endswith("option_7 7 | 8   and 2 more")


def test_a_pass_at_1_that_is_sampled_in_another_way_is_marked():
    """dapo.py evaluates at top-p 0.7, which lifts pass@1."""
    plain = {"eval_temperature": 1.0, "eval_top_p": 1.0}
    narrow, cold = plain | {"eval_top_p": 0.7}, plain | {"eval_temperature": 0.5, "eval_top_p": 0.7}
    words = [plot.words_of("eval/pass@1", runs_of(*each)) for each in ([plain], [narrow], [plain, cold], [cold, cold])]
    both = "temperature 0.5 and top-p 0.7"
    held_out = "held-out pass@1"
    assert words == [held_out, f"{held_out}, top-p 0.7", f"{held_out}; b: {both}", f"{held_out}, {both}"]
    assert plot.words_of("eval/reward", runs_of(narrow)) == "held-out reward"


@drawing
def test_names_that_mean_something_to_a_shell_or_to_matplotlib_are_drawn(run, tmp_path, capsys):
    rows = [GROUPS | {"step": step, "logged/\ud83d$x$": step} for step in (1, 2)]
    folders = [run(name, *rows, script="grpo") for name in ("r[1]", "a$b$", "c$")]
    picture = tmp_path / "all.png"
    code, line = said(capsys, *folders, "-o", picture)
    assert code == 0 and "logged/?$x$" in line and picture.is_file()
    assert said(capsys, folders[0])[0] == 0


@drawing
def test_a_reader_that_goes_away_leaves_no_traceback(run):
    folder = run("x", GROUPS)
    command = f"{sys.executable} tools/plot.py {folder} | true"
    result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == ""
