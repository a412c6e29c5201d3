"""dpo.py: its losses by literal loops, and the pairs that it makes."""

import json
import math
import shutil

import pytest
import torch
from accelerate import Accelerator

import dpo
from harness.data import Prompt, load_prompts
from harness.errors import InputError
from harness.metrics import Metrics
from harness.pairs import Pair
from common.rewards import Reward
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
    loss = dpo.preference_loss(chosen, zero, zero, zero, length, dpo.Args(**options))
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
    _, args, _, policy = model
    pair = PAIRS[0]
    longer = Pair(
        [*pair.prompt, *pair.chosen[:2]], pair.chosen[2:], pair.rejected[2:], pair.ref_chosen, pair.ref_rejected
    )
    gradients = []
    for part in (pair, longer):
        dpo.pair_losses(policy, batch_of([part], args), args)[0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
        policy.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_a_loss_of_pairs_that_is_not_finite_ends_the_run():
    _, args, _, policy = embedded("dpo")
    recorder, pairs = GradientRecorder(policy, []), [Pair([5, 6], [7, 1], [8, 1], math.nan, 0.0)]
    with pytest.raises(InputError, match=r"loss nan, .* not finite"):
        dpo.update(Accelerator(cpu=True), policy, recorder, pairs, args, Metrics())
    assert recorder.steps == []  # before the weights are spoilt


# --- pairs of its own ---


def run(folder, *arguments):
    """A quick run of two rounds; later arguments win."""
    quick = "--rounds 2 --pair_prompts 64 --pair_samples 4 --pairs_per_step 8 --eval_prompts 8 --eval_samples 4"
    dpo.main([*quick.split(), "--output_dir", str(folder), *map(str, arguments)])


def sampler_of(policy, tokenizer, functions, args):
    """The `sample_and_score` of main."""

    def sample_and_score(prompts, n, temperature, top_p, seed):
        batch = dpo.rollout(policy, prompts, n, temperature, top_p, seed, args)
        texts = dpo.completion_texts(tokenizer, batch)
        rewards, parts = dpo.compute_rewards(functions, prompts, texts)
        return batch, texts, rewards, dpo.correctness(prompts, texts, parts), parts

    return sample_and_score


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_written_pairs_are_the_trained_pairs(tmp_path):
    # Read again by --dataset they give the same tokens, so the same run.
    run(tmp_path / "own", "--rounds", 1)
    for name in ("train", "test"):
        shutil.copy(tmp_path / "own" / "pairs-round-1.jsonl", tmp_path / f"{name}.jsonl")
    run(tmp_path / "given", "--rounds", 1, "--dataset", tmp_path, "--eval_dataset", "embedded")
    own, given = (metric_rows(tmp_path / name) for name in ("own", "given"))
    for a, b in zip(own[1:], given[1:], strict=True):
        assert all(a[key] == b[key] for key in a if key.startswith(("optim/", "rewards/", "logps/", "completion/")))
    assert given[-1]["eval/pass@1"] == own[-1]["eval/pass@1"]  # and the prompts of --eval_dataset are evaluated


def test_rewards_that_differ_by_rounding_make_no_pair_nor_do_those_that_are_missing(model):
    _, _, tokenizer, policy = model
    args = dpo.Args(pair_samples=4, max_new_tokens=12)
    sums = [None, 0.3, 0.1 + 0.2, None]
    functions = [Reward("sums", 1.0, lambda completions, **columns: sums * (len(completions) // 4))]
    prompts, metrics, accelerator = load_prompts(args, tokenizer)[0][:16], Metrics(), Accelerator(cpu=True)
    sample = sampler_of(policy, tokenizer, functions, args)
    pairs, _ = dpo.make_pairs(accelerator, sample, prompts, 1, args, metrics)
    result = metrics.reduce(accelerator)
    assert pairs == [] and result["pairs/yield"] == 0 and result["pairs/truncated"] < 0.5


def test_pairs_are_made_by_reward_and_never_of_cut_completions(model, tmp_path, monkeypatch):
    _, _, tokenizer, policy = model
    (tmp_path / "short.py").write_text(
        "def short(prompts, completions, **kwargs): return [-len(c) for c in completions]", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    args = dpo.Args(reward=["short.py:short"], pair_samples=6, max_new_tokens=12)
    prompts, metrics = load_prompts(args, tokenizer)[0][:40], Metrics()
    sample = sampler_of(policy, tokenizer, dpo.load_rewards(args), args)
    made = dpo.make_pairs(Accelerator(cpu=True), sample, prompts, 1, args, metrics)
    pairs, rows = made
    assert 0 < len(pairs) == len(rows) <= 40
    for pair, row in zip(pairs, rows, strict=True):
        assert pair.chosen[-1] == pair.rejected[-1] == tokenizer.eos_token_id
        assert len(pair.chosen) < len(pair.rejected) <= 12  # answers in steps are longer than that and cut
        assert len(row["chosen"]) < len(row["rejected"]) and tokenizer.decode(pair.chosen[:-1]) == row["chosen"]
    result = metrics.reduce(Accelerator(cpu=True))
    assert result["pairs/yield"] == pytest.approx(len(pairs) / 40) and 0.1 < result["pairs/truncated"] < 0.7


def test_conversational_prompts_give_conversational_pairs():
    turns, tools = [{"role": "user", "content": "7+5?"}], [{"type": "function"}]
    prompt = Prompt([1], turns, "12", {"answer": "#### 12", "tools": tools})
    row = dpo.preference_row(prompt, "#### 12", "#### 11")
    assert row["prompt"] is turns and row["tools"] is tools and "answer" not in row
    assert row["chosen"] == [{"role": "assistant", "content": "#### 12"}]
    assert row["rejected"] == [{"role": "assistant", "content": "#### 11"}]


def test_max_steps_zero_evaluates_and_makes_the_pairs(tmp_path, monkeypatch):
    original, calls = dpo.rollout, []
    monkeypatch.setattr(dpo, "rollout", lambda *options: calls.append(options[2:6]) or original(*options))
    run(tmp_path, "--max_steps", 0, "--seed", 3, "--temperature", 1.3, "--eval_temperature", 0.7, "--eval_top_p", 0.9)
    assert sorted(calls) == [(4, 0.7, 0.9, (3, 0, 0)), (4, 1.3, 1.0, (3, 0, 1, 1))]  # n, temperature, top_p, seed
    (row,) = metric_rows(tmp_path)
    assert {"eval/pass@1", "pairs/made", "pairs/yield", "pairs/accuracy"} <= row.keys()
    assert len(rows_of(tmp_path / "pairs-round-1.jsonl")) == row["pairs/made"]
    samples = rows_of(tmp_path / "samples.jsonl")  # of four prompts
    assert len(samples) == 16 and all(sample["evaluation"] for sample in samples)
    assert not (tmp_path / "pairs-round-2.jsonl").exists() and not (tmp_path / "model").exists()


def test_a_run_that_is_resumed_with_fewer_steps_than_it_has_made_ends(tmp_path):
    """It went on to the end of the pairs."""
    run(tmp_path, "--max_steps", 2, "--save_every", 1)
    run(tmp_path, "--max_steps", 1, "--save_every", 1, "--resume")
    assert metric_rows(tmp_path)[-1]["step"] == 2 and (tmp_path / "model").exists()


def test_a_first_round_without_a_pair_says_what_a_pair_is(tmp_path):
    with pytest.raises(InputError, match=r"0 pairs x 1 passes do not fill a step"):
        run(tmp_path, "--pair_prompts", 2, "--max_new_tokens", 1)


def test_a_round_without_enough_pairs_ends_the_run(tmp_path, monkeypatch, capsys):
    with pytest.raises(InputError, match=r"pairs x 1 passes do not fill a step of 128"):
        run(tmp_path / "a", "--pairs_per_step", 128)
    original, made = dpo.make_pairs, []

    def make_pairs(*arguments):
        made.append(original(*arguments))
        return made[0] if len(made) == 1 else ([], [])

    monkeypatch.setattr(dpo, "make_pairs", make_pairs)
    run(tmp_path / "b", "--pairs_per_step", 16)
    assert "the run ends" in capsys.readouterr().out
    rows, steps = metric_rows(tmp_path / "b"), len(made[0][0]) // 16
    assert [row["step"] for row in rows] == list(range(steps + 1)) and "eval/pass@1" in rows[-1]
    assert (tmp_path / "b" / "model").exists()


def test_it_learns(tmp_path):
    """One round on the embedded task: pass@1 rises, completions grow longer."""
    dpo.main(
        [
            "--output_dir",
            str(tmp_path),
            "--eval_prompts",
            "32",
            "--eval_samples",
            "4",
            "--eval_every",
            "0",
            "--max_new_tokens",
            "48",
        ]
    )
    rows = metric_rows(tmp_path)
    assert rows[-1]["eval/pass@1"] > rows[0]["eval/pass@1"] + 0.4
    assert rows[-1]["eval/length"] > rows[0]["eval/length"] + 10
    assert rows[-1]["rewards/margin"] > 0.3 and rows[-1]["rewards/accuracy"] > 0.8
