"""dpo.py: its losses by literal loops, sums over completions, and runs on given pairs."""

import math

import pytest
import torch
from accelerate import Accelerator

import dpo
from harness.errors import InputError
from harness.metrics import Metrics
from harness.pairs import Pair
from testbed import GradientRecorder, embedded, metric_rows

VARIANTS = {
    "dpo": {},
    "cdpo": dict(label_smoothing=0.1),
    "ipo": dict(loss="ipo"),
    "robust": dict(loss="robust", label_smoothing=0.1),
}


# --- the loss ---


def literal_loss(chosen, rejected, ref_chosen, ref_rejected, n_chosen, args):
    """One pair, as the papers write it."""
    a, b, e = chosen - ref_chosen, rejected - ref_rejected, args.label_smoothing
    if args.loss == "ipo":
        loss = (a - b - 1 / (2 * args.beta)) ** 2
    else:
        right, wrong = (-math.log(1 / (1 + math.exp(-sign * args.beta * (a - b)))) for sign in (1, -1))
        loss = (1 - e) * right + e * wrong if args.loss == "sigmoid" else ((1 - e) * right - e * wrong) / (1 - 2 * e)
    return loss + args.nll_coef * -chosen / n_chosen


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_literal_loop_over_pairs(options):
    generator = torch.Generator().manual_seed(0)
    logprobs = [-20 * torch.rand(16, generator=generator, dtype=torch.float64) for _ in range(4)]
    lengths = torch.randint(1, 30, (16,), generator=generator)
    args = dpo.Args(beta=0.3, nll_coef=0.7, **options)
    losses = dpo.preference_loss(*logprobs, lengths, args)
    rows = zip(*(column.tolist() for column in (*logprobs, lengths)), strict=True)
    assert losses.tolist() == pytest.approx([literal_loss(*row, args) for row in rows], abs=1e-10)


def at_h(h, **options):
    """(loss, dL/dl_w) of one pair whose h is given."""
    chosen, zero, length = (
        torch.tensor([float(h)], dtype=torch.float64, requires_grad=True),
        torch.zeros(1),
        torch.tensor(1),
    )
    loss = dpo.preference_loss(chosen, zero, zero, zero, length, dpo.Args(nll_coef=0.0, **options))
    return float(loss.detach()), float(torch.autograd.grad(loss.sum(), chosen)[0])


@pytest.mark.parametrize("h", [-30, -1, 0, 0.5, 40])
def test_gradient_in_closed_form(h):
    # Liger#481: a sign turned round gives a loss that falls below 0 and trains the rejected completion.
    beta, e = 0.3, 0.2
    s = 1 / (1 + math.exp(beta * h))  # sigmoid(-beta h)
    assert at_h(h, beta=beta)[1] == pytest.approx(-beta * s, abs=1e-12)
    cdpo = -beta * ((1 - e) * s - e * (1 - s))
    assert at_h(h, beta=beta, label_smoothing=e)[1] == pytest.approx(cdpo, abs=1e-12)
    robust = -beta * ((1 - e) * s + e * (1 - s)) / (1 - 2 * e)
    assert at_h(h, beta=beta, label_smoothing=e, loss="robust")[1] == pytest.approx(robust, abs=1e-12)
    assert at_h(h, beta=beta, loss="ipo")[1] == pytest.approx(2 * (h - 1 / (2 * beta)), abs=1e-12)


def test_where_the_losses_come_to_rest():
    assert at_h(math.log(0.9 / 0.1) / 0.5, beta=0.5, label_smoothing=0.1)[1] == pytest.approx(0, abs=1e-12)
    assert at_h(1 / (2 * 0.5), beta=0.5, loss="ipo") == (0, 0)
    assert at_h(1000, beta=1.0)[0] == 0 and math.isfinite(at_h(-1000, beta=1.0)[0])  # no overflow on either side


# --- the model's side ---


PAIRS = [
    Pair([5, 6, 7], [8, 9, 10, 1], [8, 9, 11, 12, 1], -3.0, -4.5),
    Pair([3] * 6, [7, 1], [6, 5, 4, 3, 8, 1], -2.0, -9.0),
]


def batch_of(pairs, args):
    (batch,) = dpo.pair_batches(pairs, args, "cpu")
    return batch


@pytest.fixture(scope="module")
def model():
    return embedded("dpo")


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_losses_and_metrics_of_pairs_are_those_of_sums_over_the_completion_with_its_eos(options, model):
    # minimind#659: means in place of sums are another algorithm. B25: prompt or padding in the sum, EOS left out.
    policy, args = model[3], dpo.Args(nll_coef=0.7, **options)
    with torch.no_grad():
        losses, stats = dpo.pair_losses(policy, batch_of(PAIRS, args), args)
    for i, pair in enumerate(PAIRS):
        sums = []
        for completion in (pair.chosen, pair.rejected):
            logits = policy.lm(torch.tensor([pair.prompt + completion])).logits[0].log_softmax(-1)
            start = len(pair.prompt) - 1
            sums.append(sum(float(logits[start + t, token].detach()) for t, token in enumerate(completion)))
        references = pair.ref_chosen, pair.ref_rejected
        chosen, rejected = (args.beta * (logp - ref) for logp, ref in zip(sums, references, strict=True))
        expected = {"logps/chosen": sums[0], "logps/rejected": sums[1], "rewards/chosen": chosen}
        expected |= {"rewards/rejected": rejected, "rewards/margin": chosen - rejected}
        assert {name: float(stats[name][i]) for name in expected} == pytest.approx(expected, abs=1e-4)
        assert float(stats["rewards/accuracy"][i]) == (chosen > rejected)
        assert float(losses[i]) == pytest.approx(
            literal_loss(*sums, *references, len(pair.chosen), args), rel=1e-4, abs=1e-4
        )


def test_a_common_beginning_cancels(model):
    # The log-probs of the first two tokens are the same in both completions: h, and so its gradient, is without them.
    policy, args, pair = model[3], dpo.Args(nll_coef=0.0), PAIRS[0]
    longer = Pair(
        [*pair.prompt, *pair.chosen[:2]], pair.chosen[2:], pair.rejected[2:], pair.ref_chosen, pair.ref_rejected
    )
    gradients = []
    for part in (pair, longer):
        dpo.pair_losses(policy, batch_of([part], args), args)[0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
        policy.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_an_update_on_pairs_that_is_not_finite_is_left_out():
    _, args, _, policy = embedded("dpo")
    recorder, pairs = GradientRecorder(policy, policy.parameters()), [Pair([5, 6], [7, 1], [8, 1], math.nan, 0.0)]
    metrics = Metrics()
    dpo.update(Accelerator(cpu=True), policy, recorder, pairs, args, metrics)
    assert recorder.steps == [] and metrics.problem.startswith("update 1 is not finite: loss nan")


# --- a run ---


def run(folder, *arguments):
    quick = "--pairs_per_step 8 --eval_prompts 8 --eval_samples 4 --max_new_tokens 24"
    dpo.main([*quick.split(), "--output_dir", str(folder), *map(str, arguments)])
    return metric_rows(folder)


def test_max_steps_zero_only_evaluates_by_sampling(few_pairs, tmp_path, monkeypatch):
    original, calls = dpo.rollout, []
    monkeypatch.setattr(
        dpo, "rollout", lambda *options: calls.append((*options[2:5], options[5][:3])) or original(*options)
    )
    options = ["--seed", 3, "--eval_temperature", 0.7, "--eval_top_p", 0.9, "--eval_dataset", "embedded"]
    (row,) = run(tmp_path, *few_pairs, "--max_steps", 0, *options)
    assert calls == [(4, 0.7, 0.9, (3, 0, 0))]  # n, temperature, top-p, seed
    assert {"eval/pass@1", "eval/pass@4", "eval/reward", "eval/length"} <= row.keys()
    assert not (tmp_path / "model").exists()


def test_held_out_pairs_are_evaluated_against_the_reference(few_pairs, tmp_path):
    rows = run(tmp_path, *few_pairs, "--max_steps", 3, "--learning_rate", 1e-3, "--nll_coef", 0)
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3]
    # The policy is its own reference before the first step.
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2)) and rows[0]["eval/margin"] == pytest.approx(0, abs=1e-4)
    assert rows[3]["eval/loss"] < math.log(2) and rows[3]["eval/accuracy"] > 0.5
    assert "eval/pass@1" not in rows[0]


def test_a_run_goes_over_the_pairs_num_epochs_times(few_pairs, tmp_path):
    rows = run(tmp_path / "a", *few_pairs, "--num_epochs", 2, "--pairs_per_step", 64, "--lr_scheduler", "linear")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]  # of 96 pairs
    rates = [row["optim/lr"] for row in rows[1:]]
    assert rates == pytest.approx([rates[0], rates[0] * 2 / 3, rates[0] / 3])  # 0 at the end of the pairs
    with pytest.raises(InputError, match=r"96 pairs x 1 epochs do not fill a step: lower --pairs_per_step"):
        run(tmp_path / "b", *few_pairs, "--pairs_per_step", 97)


def test_nll_is_on_for_the_embedded_pairs_alone():
    assert (dpo.Args().nll_coef, dpo.Args().eval_dataset) == (1.0, "embedded")
    given = dpo.Args(dataset="mine.jsonl")
    assert (given.nll_coef, given.eval_dataset) == (0.0, None)  # Eq. 7
    assert dpo.Args(nll_coef=0.0).nll_coef == 0.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--dataset embedded", "--dataset embedded: no columns chosen and rejected"),
        ("--loss ipo --label_smoothing 0.1", "--label_smoothing: the ipo loss has none"),
        ("--label_smoothing 0.5", "label_smoothing 0.5"),
        ("--beta 0", "beta 0.0"),
        ("--temperature 0.7", "unknown option --temperature"),  # pairs are given
        ("--record_tokens", "unknown option --record_tokens"),
    ],
)
def test_bad_input_of_its_own(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        dpo.main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_it_learns(tmp_path):
    """On half of the embedded pairs: pass@1 rises, completions grow longer."""
    options = "--max_steps 20 --pairs_per_step 32 --eval_prompts 32 --max_new_tokens 48"
    rows = run(tmp_path, *options.split())
    assert rows[-1]["eval/pass@1"] > rows[0]["eval/pass@1"] + 0.4
    assert rows[-1]["eval/length"] > rows[0]["eval/length"] + 10
    assert rows[-1]["rewards/margin"] > 0.3 and rows[-1]["rewards/accuracy"] > 0.8
