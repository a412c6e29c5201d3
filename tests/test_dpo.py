"""dpo.py: edge cases of the loss, and runs on given pairs."""

import math

import pytest
import torch
from accelerate import Accelerator

import dpo
from common.masked import Means
from common.pairs import Pair
from common.run import Exit
from testbed import GradientRecorder, embedded, metric_rows

# --- the loss ---


@pytest.mark.parametrize("h", [-1000.0, 1000.0])
def test_large_margins_do_not_overflow(h):
    chosen, zero = torch.tensor([h], dtype=torch.float64, requires_grad=True), torch.zeros(1)
    loss = dpo.preference_loss(chosen, zero, zero, zero, torch.tensor(1), dpo.Args(nll_coef=0.0, beta=1.0))
    (gradient,) = torch.autograd.grad(loss.sum(), chosen)
    assert (loss.item(), gradient.item()) == (max(0, -h), -float(h < 0))


def test_nonfinite_update_ends_the_run():
    _, args, _, lm = embedded("dpo")
    recorder, pairs = GradientRecorder(lm, lm.parameters()), [Pair([5, 6], [7, 1], [8, 1], math.nan, 0.0)]
    with pytest.raises(Exit, match="gradient norm nan"):
        dpo.update(Accelerator(cpu=True), lm, recorder, pairs, args, Means())
    assert recorder.steps == []


# --- a run ---


def run(folder, *arguments):
    quick = "--pairs_per_step 8 --eval_prompts 8 --eval_samples 4 --max_new_tokens 24"
    dpo.main([*quick.split(), "--output_dir", str(folder), *map(str, arguments)])
    return metric_rows(folder)


def test_max_steps_zero_only_evaluates(few_pairs, tmp_path, monkeypatch):
    original, calls = dpo.rollout, []
    monkeypatch.setattr(
        dpo, "rollout", lambda *options: calls.append((*options[3:6], options[6][:3])) or original(*options)
    )
    options = ["--seed", 3, "--eval_temperature", 0.7, "--eval_top_p", 0.9, "--eval_dataset", "embedded"]
    (row,) = run(tmp_path, *few_pairs, "--max_steps", 0, *options)
    assert calls == [(4, 0.7, 0.9, (3, 0, 0))]  # n, temperature, top-p, seed
    assert {"eval/pass@1", "eval/pass@4", "eval/reward", "eval/length"} <= row.keys()
    assert not (tmp_path / "model").exists()


def test_held_out_pairs_use_the_reference(few_pairs, tmp_path):
    rows = run(tmp_path, *few_pairs, "--max_steps", 3, "--learning_rate", 1e-3, "--nll_coef", 0)
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3]
    # Before the first step the policy equals its reference.
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2)) and rows[0]["eval/margin"] == pytest.approx(0, abs=1e-4)
    assert rows[3]["eval/loss"] < math.log(2) and rows[3]["eval/accuracy"] > 0.5
    assert "eval/pass@1" not in rows[0]


def test_num_epochs_repeats_the_pairs(few_pairs, tmp_path):
    rows = run(tmp_path / "a", *few_pairs, "--num_epochs", 2, "--pairs_per_step", 64, "--lr_scheduler", "linear")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # of 96 pairs
    rates = [row["optim/lr"] for row in rows[1:]]
    assert rates == pytest.approx([rates[0], rates[0] * 2 / 3, rates[0] / 3])  # 0 at the end of the pairs
    with pytest.raises(Exit, match=r"96 pairs x 1 epochs do not fill a step: lower --pairs_per_step"):
        run(tmp_path / "b", *few_pairs, "--pairs_per_step", 97)


def test_only_embedded_pairs_default_to_nll():
    assert (dpo.Args().nll_coef, dpo.Args().eval_dataset) == (1.0, "embedded")
    given = dpo.Args(dataset="mine.jsonl")
    assert (given.nll_coef, given.eval_dataset) == (0.0, None)  # Eq. 7
    assert dpo.Args(nll_coef=0.0).nll_coef == 0.0


def test_it_learns(tmp_path):
    """On half of the embedded pairs: pass@1 rises, completions grow longer."""
    options = "--max_steps 20 --pairs_per_step 32 --eval_prompts 32 --max_new_tokens 48"
    rows = run(tmp_path, *options.split())
    assert rows[-1]["eval/pass@1"] > rows[0]["eval/pass@1"] + 0.4
    assert rows[-1]["eval/length"] > rows[0]["eval/length"] + 10
    assert rows[-1]["rewards/margin"] > 0.3 and rows[-1]["rewards/accuracy"] > 0.8
