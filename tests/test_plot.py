"""tools/plot.py: which panels a run has, where its picture lies, what is no run; and what a run says of it."""

import json
import re
import subprocess
import sys

import pytest

import plot
import reward_model
from small_run import start
from testbed import ROOT

GROUPS = {"step": 1, "reward/mean": 0.5, "reward/accuracy": 0.25, "completion/length": 17.0, "policy/entropy": 0.2}
GROUPS |= {"policy/approx_kl": 0.0, "policy/kl_ref": 0.1, "policy/clip_fraction_high": 0.0, "optim/grad_norm": 1.0}
PAIRS = {"step": 1, "rewards/margin": 0.5, "rewards/accuracy": 0.5, "logps/chosen": -1.0, "logps/rejected": -2.0}
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
@pytest.mark.parametrize("reward", [["math_verify", "format"], ["mine.py:mine"]])
def test_accuracy_is_drawn_where_it_is_rewarded(reward, run, capsys):
    """A run that learns from 0.05 to 0.67 was drawn as a flat 0: pass@1 by a rule that finds none of its answers."""
    evaluation = {"step": 0, "eval/pass@1": 0.0, "eval/pass@4": 0.0, "eval/reward": 0.05}
    folder = run("x", evaluation, GROUPS, evaluation | {"step": 1}, reward=reward)
    code, line = said(capsys, folder)
    path, _, drawn = line.partition(": ")
    rule = "reward/accuracy, eval/pass@1, " if "mine" not in reward[0] else ""
    assert code == 0 and path == str(folder / "metrics.png") and (folder / "metrics.png").read_bytes()[1:4] == b"PNG"
    assert drawn == (
        f"reward/mean, eval/reward, {rule}completion/length, policy/entropy, policy/approx_kl, policy/kl_ref, "
        "policy/clip_fraction_high, optim/grad_norm"
    )


@drawing
def test_runs_of_pairs_have_panels_of_their_own(run, capsys):
    dpo = run("dpo", PAIRS, reward=["accuracy"])
    model = run("model", PAIRS, {"step": 1, "eval/accuracy": 0.5, "eval/loss": 0.7})  # of reward_model.py: no --reward
    shared = "rewards/margin, rewards/accuracy, "
    assert said(capsys, dpo) == (0, f"{dpo / 'metrics.png'}: {shared}logps/chosen, logps/rejected")
    assert said(capsys, model)[1].endswith(f"{shared}eval/accuracy, eval/loss, logps/chosen, logps/rejected")


@drawing
def test_a_run_may_be_given_by_its_file_and_several_by_a_pattern(run, tmp_path, capsys):
    one, picture = run("a-seed0", GROUPS), tmp_path / "both.png"
    run("a-seed1", GROUPS | {"step": 2})
    assert said(capsys, one / "metrics.jsonl")[1].startswith(f"{one / 'metrics.png'}: reward/mean")
    for runs in ([f"{tmp_path}/a-*"], [one, tmp_path / "a-seed1"]):
        assert said(capsys, *runs, "-o", picture)[1].startswith(f"{picture}: reward/mean") and picture.is_file()
        picture.unlink()
    assert list(plot.read([f"{tmp_path}/a-*"])) == ["a"] and len(plot.read([f"{tmp_path}/a-*"])["a"]) == 2


def test_a_file_of_its_own_has_all_that_it_holds_and_todays_names(run, tmp_path, capsys):
    (tmp_path / "x-seed0.jsonl").write_text(json.dumps(GROUPS | {"policy/clip_low": 0.5}) + "\n", encoding="utf-8")
    (rows,) = plot.read([tmp_path / "x-seed0.jsonl"])["x"]
    assert {"reward/accuracy", "policy/clip_fraction_low"} <= rows[0].keys()
    assert said(capsys, tmp_path / "x-seed0.jsonl")[0] == 2  # its folder is no place for pictures


@drawing
@pytest.mark.parametrize("count, shape", [(1, (1, 1)), (5, (2, 4))])
def test_a_grid_has_four_columns_and_titles_with_the_names(count, shape):
    names = list(plot.PANELS)[:count]
    runs = {f"run {i}": [[{"step": s} | dict.fromkeys(names, 0.5) for s in (0, 1)]] for i in range(12)}  # > colours
    figure = plot.panels(runs, {name: f"words\n{name}" for name in plot.PANELS})
    assert [axis.get_title().split("\n")[1] for axis in figure.axes] == names
    assert figure.axes[0].get_gridspec().get_geometry() == shape
    plot.plt.close(figure)


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


def last_line(capsys):
    return capsys.readouterr().out.splitlines()[-1]


def ended(folder, script=None):
    run, *_ = start(folder, script)
    run.log({"reward/mean": 0.5} if script is None else {"rewards/margin": 0.5})
    run.finish(None, None, None)


@drawing
def test_a_run_names_the_command_that_draws_it(tmp_path, monkeypatch, capsys):
    """Any script's, from any folder; the command works as it stands there."""
    for i, script in enumerate((reward_model, None)):
        monkeypatch.chdir(ROOT if script else tmp_path)
        folder = tmp_path / f"a run {i}"
        ended(folder, script)
        (command,) = re.findall(rf" s, in {folder} \((python .*) draws it\)$", last_line(capsys))
        assert (" tools/plot.py " in command) == (script is not None)
    command = command.replace("python", sys.executable, 1)
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith(f"{folder / 'metrics.png'}: reward"), result.stderr


@pytest.mark.parametrize("reward, counted", [(["accuracy"], True), (["mine.py:mine"], False)])
def test_the_line_of_an_evaluation_has_pass_at_k_where_it_is_rewarded(reward, counted, tmp_path, capsys):
    run, *_ = start(tmp_path, reward=reward)
    run.log_evaluation({"eval/pass@1": 0.0, "eval/pass@4": 0.0, "eval/reward": 0.5, "eval/length": 3.0})
    passed = "eval/pass@1 0.000, eval/pass@4 0.000, " if counted else ""
    assert last_line(capsys) == f"step 0: {passed}eval/reward 0.500, eval/length 3.000"
    assert run.first_eval["eval/pass@1"] == 0  # what is kept has it


@drawing
def test_a_pattern_is_expanded_where_the_shell_leaves_it_alone(tmp_path):
    """In PowerShell the documented command found no file `runs/*/metrics.jsonl`."""
    for name in ("b", "a-seed0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    assert list(plot.read([f"{tmp_path}/*/metrics.jsonl"])) == ["a", "b"]
    assert list(plot.read([tmp_path / "b" / "metrics.jsonl"])) == ["b"]
    with pytest.raises(FileNotFoundError, match="none.jsonl"):
        plot.read(["none.jsonl"])


@drawing
def test_names_at_the_ends_of_curves_lie_apart_and_inside():
    axis = plot.plt.subplots()[1]
    axis.set(xlim=(0, 1), ylim=(0, 14))
    plot.label_ends(axis, [[y, 1, name, "black"] for name, y in (("a", 14), ("b", 13.9), ("c", 13.8), ("d", 2))])
    heights = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert heights == pytest.approx({"d": 2, "c": 12, "b": 13, "a": 14})


@drawing
def test_a_run_that_ends_before_another_begins_is_drawn_too():
    axis, whole = plot.plt.subplots()[1], [{"step": step, "m": 1.0} for step in (5, 10)]
    plot.draw(axis, {"a": [whole, [{"step": 2, "m": 1.0}]]}, "m")
    assert len(axis.lines) == 3 and not axis.texts  # two seeds, a mean without points, no name
