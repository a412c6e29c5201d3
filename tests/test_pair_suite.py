"""Tests that run over both scripts on preference pairs, dpo.py and reward_model.py."""

import re
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import pair_worker
from common.run import Checkpoints, Exit
from processes import run_processes
from testbed import PAIRS, ROOT, largest_difference, metric_rows, named_metrics, script, section_of_metrics

pytestmark = pytest.mark.parametrize("name", PAIRS)
# A few steps on given pairs, the same in both scripts.
QUICK = "--pairs_per_step 8 --max_steps 4 --eval_every 2".split()


@pytest.fixture(scope="module", autouse=True)
def of_few_pairs(few_pairs):
    """The dataset of `run`."""
    QUICK[:0] = few_pairs
    yield
    del QUICK[:2]


def run(name, folder, *arguments):
    script(name).main([*QUICK, "--output_dir", str(folder), *map(str, arguments)])


# --- a run ---


def test_resume_is_bit_exact(name, tmp_path, capsys):
    options = ["--save_every", 1, "--max_steps", 6, "--num_epochs", 2]
    run(name, tmp_path / "a", *options)
    rows = metric_rows(tmp_path / "a")
    assert [row["step"] for row in rows] == list(range(7))
    for step in (1, 3, 4):
        folder = tmp_path / f"b{step}"
        with mock.patch.object(Checkpoints, "end_step", ended_after(step)), pytest.raises(KeyboardInterrupt):
            run(name, folder, *options)
        run(name, folder, *options, "--resume")
        assert f"resumed from {folder}/checkpoints/step-{step:08d}" in capsys.readouterr().out
        assert metric_rows(folder) == rows
        a, b = (load_file(path / "model" / "model.safetensors") for path in (tmp_path / "a", folder))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def ended_after(last):
    """`Checkpoints.end_step`, after which the process ends at this step."""
    original = Checkpoints.end_step

    def end_step(self, step, signals):
        original(self, step, signals)
        if step == last:
            raise KeyboardInterrupt

    return end_step


def test_run_ends_with_pairs_or_max_steps(name, tmp_path, capsys):
    run(name, tmp_path / "all", "--max_steps", -1, "--pairs_per_step", 20, "--num_epochs", 2)
    assert [row["step"] for row in metric_rows(tmp_path / "all")] == list(range(10))  # 96 x 2 / 20
    assert re.findall(r"^step (\d/\d): ", capsys.readouterr().out, re.MULTILINE)[-1] == "9/9"
    assert all("eval/accuracy" in metric_rows(tmp_path / "all")[step] for step in (0, 9))
    run(name, tmp_path / "capped", "--max_steps", 3, "--eval_every", 0)
    rows = metric_rows(tmp_path / "capped")
    assert [("eval/accuracy" in row) for row in rows] == [True, False, False, True]


def test_max_steps_zero_only_evaluates(name, tmp_path, capsys):
    run(name, tmp_path, "--max_steps", 0)
    (row,) = metric_rows(tmp_path)
    assert {"eval/accuracy", "eval/loss", "eval/margin"} <= row.keys() and not (tmp_path / "model").exists()
    printed = capsys.readouterr().out
    assert re.search(r"\n0 steps", printed) and "before" not in printed
    # The first pair as the model sees it.
    assert re.search(r"first prompt: '[\d+-]+\?'\nfirst chosen: '.*#### \d+<eos>'\n", printed)


# --- several processes ---


def test_two_processes_match_one_and_resume(name, tmp_path):
    pair_worker.main(name, tmp_path)
    result = run_processes("tests/helpers/pair_worker.py", name, tmp_path, processes=2)
    assert result.returncode == 0, result.stderr
    one, two, other = (torch.load(tmp_path / f"steps-{x}.pt") for x in ("1-0", "2-0", "2-1"))
    assert one["resumed"] and two["resumed"] and other["resumed"]
    moved, apart = (largest_difference(x.values(), one["weights"].values()) for x in (one["start"], two["weights"]))
    assert moved > 5e-5 and apart < 1e-5 * moved + 5e-7  # four roundings of float32 weights near 1
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    assert two["eval"] == pytest.approx(one["eval"], rel=1e-3, abs=1e-5) and two["eval"] == other["eval"]
    if "reference" in one:
        assert torch.allclose(one["reference"], two["reference"], atol=1e-4)


# --- bad input ---


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--no_such_option 1", "--no_such_option"),
        ("--pairs_per_step 0", "pairs_per_step"),
        ("--resume", "--output_dir"),
        ("--dataset /no/such.jsonl", "no/such.jsonl"),
        ("--dataset common/tiny --dataset_split dev", "dev"),
        ("--model_name_or_path /no/such", "no/such"),
        ("--pairs_per_step 1000", "96 pairs x"),
        ("--num_epochs 0", "num_epochs"),
    ],
)
def test_bad_input(name, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common").symlink_to(ROOT / "common")
    arguments = [*QUICK, *arguments.split()]
    if message.startswith("96"):
        arguments += ["--num_epochs", "1"]
    with pytest.raises(Exit) as error:
        script(name).main(arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--eval_dataset embedded --dataset embedded", "no columns chosen and rejected"),
        ("--label_smoothing 0.5", "must be below 0.5"),
        ("--label_smoothing 0.1 --loss ipo", "ipo loss has none"),
        ("--loss hinge", "hinge"),
        ("--beta 0", "beta"),
        ("--nll_coef -1", "nll_coef"),
        ("--reward no_such", "no_such"),
        ("--eval_k 9", "eval_k 9"),
        ("--temperature 0.5", "unknown option"),  # nothing is sampled to train on
        ("--center_coef -1", "center_coef"),
    ],
)
def test_bad_input_of_one_script(name, arguments, message, tmp_path, monkeypatch):
    if arguments.split()[0][2:] not in script(name).Args.__dataclass_fields__:
        message = "unknown option"
    with pytest.raises(Exit, match=re.escape(message)):
        script(name).main([*QUICK, "--output_dir", str(tmp_path), *arguments.split()])


def test_glossary_names_the_metrics(name, tmp_path):
    """docs/watch.md: a script's own section is complete, and what else it logs stands in the table of all."""
    run(name, tmp_path / "a", "--max_steps", 2)
    logged = {key for row in metric_rows(tmp_path / "a") for key in row} - {"step"}
    logged.add("time/update_s")
    if name not in ("dpo", "reward_model"):
        pytest.skip("the page is about the scripts of this project")
    if name == "dpo":
        run(name, tmp_path / "b", *"--max_steps 0 --eval_dataset embedded --eval_prompts 4".split())
        logged |= {key.replace("pass@4", "pass@k") for row in metric_rows(tmp_path / "b") for key in row} - {"step"}
    section = section_of_metrics("dpo.py")  # for reward_model.py it says: the same without logps/
    documented = [named_metrics(text) for text in (section_of_metrics("Every script"), section)]
    if name == "reward_model":
        documented[1] -= {"logps/chosen", "logps/rejected"}
    assert documented[1] <= logged <= documented[0] | documented[1]
    of_all = {key for key in logged & documented[0] if not key.startswith("eval/")}
    assert of_all <= set(re.findall(r"`(\S+)`", section.split("\n|")[0]))  # which of them it logs, the section says
