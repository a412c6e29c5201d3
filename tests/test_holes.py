"""What the mutants of mutants.py showed to be held by no test: options, seeds, evaluation, metrics, a run's end."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import dpo
import grpo
from common.errors import InputError
from common.generation import stream_seed
from common.harness.args import learning_rate
from common.harness.metrics import Metrics, rollout_metrics
from common.harness.pairs import Pair
from common.harness.run import Run
from tools import SCRIPTS, GradientRecorder, embedded, fill, gradients, hand_made_batch, script


class Reached(Exception):
    """How far a run is to go."""


@pytest.mark.parametrize("name", [*SCRIPTS, "dpo", "reward_model"])
def test_the_optimizer_has_the_options(name, tmp_path, monkeypatch):
    def adamw(parameters, *options, **keywords):
        raise Reached(*options, *keywords.items())

    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    options = "--learning_rate 0.5 --adam_beta1 0.7 --adam_beta2 0.8 --weight_decay 0.3".split()
    with pytest.raises(Reached) as reached:
        script(name).main([*options, "--output_dir", str(tmp_path)])
    assert reached.value.args == (0.5, (0.7, 0.8), ("weight_decay", 0.3))


def test_the_schedules_in_closed_form():
    args = SimpleNamespace(learning_rate=2.0, warmup_steps=0, max_steps=4, lr_scheduler="cosine")
    cosine = [1 + math.cos(math.pi * step / 4) for step in range(4)]
    assert [learning_rate(step, args) for step in range(4)] == pytest.approx(cosine)
    args.lr_scheduler = "linear"
    assert [learning_rate(step, args) for step in range(4)] == pytest.approx([2, 1.5, 1, 0.5])
    args.lr_scheduler, args.warmup_steps = "constant", 4
    assert [learning_rate(step, args) for step in range(6)] == pytest.approx([0.5, 1, 1.5, 2, 2, 2])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "dcpo", "ppo"])  # dapo's rounds: test_dapo.py
def test_each_step_and_process_samples_with_a_seed_of_its_own(name, tmp_path, monkeypatch):
    module, seeds = script(name), []
    monkeypatch.setattr(Accelerator, "process_index", 1)  # it says that it is the second process, and is alone
    original = module.rollout

    def spy(model, prompts, n, temperature, top_p, seed, args):
        seeds.append((seed, temperature, top_p))
        return original(model, prompts, n, temperature, top_p, seed, args)

    monkeypatch.setattr(module, "rollout", spy)
    monkeypatch.setattr(module, "update", lambda *arguments: None)
    options = "--max_steps 2 --prompts_per_step 4 --group_size 2 --max_new_tokens 4 --seed 3 --temperature 1.3"
    options += " --eval_every 0 --eval_prompts 4 --eval_samples 4 --eval_temperature 0.7 --eval_top_p 0.5"
    module.main([*options.split(), "--output_dir", str(tmp_path)])
    evaluation = (stream_seed(3, 1, 0, 0), 0.7, 0.5)
    steps = [(stream_seed(3, 1, step, 0), 1.3, 1.0) for step in (1, 2)]
    assert seeds == [evaluation, *steps, evaluation]


class SecondOfTwo:
    """In the place of an Accelerator; the first process has nothing to add."""

    process_index, num_processes, device = 1, 2, torch.device("cpu")

    def autocast(self):
        return contextlib.nullcontext()

    def reduce(self, tensor, how):
        return tensor


def test_an_evaluation_by_hand(monkeypatch):
    # Seven prompts on two processes: the second one has 1, 3, 5 and a filler; of 3 no answer is known.
    correct = torch.tensor([[1, 0, 0, 1], [math.nan] * 4, [0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    rewards, lengths = torch.arange(16, dtype=torch.float64), torch.arange(1, 17)[:, None]
    seen = []

    def rollout(model, prompts, n, temperature, top_p, seed, args):
        seen.append((prompts, n, temperature, top_p, seed))
        return {"completion_mask": torch.arange(16) < lengths, "truncated": torch.zeros(16, dtype=torch.bool)}

    monkeypatch.setattr(grpo, "rollout", rollout)
    monkeypatch.setattr(grpo, "completion_texts", lambda tokenizer, batch: [""] * 16)
    monkeypatch.setattr(grpo, "compute_rewards", lambda *arguments: (rewards, correct.flatten(), {}))
    args = grpo.Args(seed=3, temperature=1.3, eval_samples=4, eval_k=2, eval_temperature=0.7, eval_top_p=0.5)
    result = grpo.evaluate(SecondOfTwo(), None, None, [], [0, 1, 2, 3, 4, 5, 6], args)
    assert seen == [([1, 3, 5, 0], 4, 0.7, 0.5, stream_seed(3, 1, 0, 0))]
    assert result == pytest.approx({
        "eval/pass@1": (1 / 2 + 1 / 4) / 2,
        "eval/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(wrong, 2) / C(4, 2)
        "eval/reward": sum(range(12)) / 12,
        "eval/length": sum(range(1, 13)) / 12,
    })  # fmt: skip


# --- the update ---


def prepared(name, **options):
    module, args, tokenizer, policy = embedded(
        name, **{"group_size": 4, "prompts_per_step": 8, "num_minibatches": 1, "kl_coef": 0.0, **options}
    )
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    return module, args, policy, fill(module, batch, rewards, args)


def test_the_old_log_probs_are_kept_over_epochs_of_one_minibatch():
    module, args, policy, batch = prepared("grpo", num_epochs=2)
    optimizer, metrics, accelerator = torch.optim.SGD(policy.parameters(), lr=0.5), Metrics(1), Accelerator(cpu=True)
    module.update(accelerator, policy, None, optimizer, batch, args, metrics)
    assert metrics.reduce(accelerator)["policy/ratio_max"] > 1.01


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_loss_that_is_not_finite_ends_the_run(name):
    module, args, policy, batch = prepared(name)
    batch["rewards" if name == "ppo" else "advantages"][0] = math.nan
    with pytest.raises(InputError, match=r"step 1: loss nan, .* not finite"):
        gradients(module, args, policy, batch)


def test_a_loss_of_pairs_that_is_not_finite_ends_the_run():
    _, args, _, policy = embedded("dpo")
    recorder, pairs = GradientRecorder(policy, []), [Pair([5, 6], [7, 1], [8, 1], math.nan, 0.0)]
    with pytest.raises(InputError, match=r"step 1: loss nan, .* not finite"):
        dpo.update_pairs(Accelerator(cpu=True), policy, recorder, pairs, args, Metrics(1))
    assert recorder.steps == []  # before the weights are spoilt


# --- metrics ---


def test_metrics_equal_their_definitions_over_several_calls():
    metrics = Metrics()
    for values, mask in (([3.0, 9.0], [True, False]), ([5.0, 1.0], [True, True])):
        values, mask = torch.tensor(values), torch.tensor(mask)
        metrics.add("mean", values, mask)
        metrics.add_max("max", values + 1, mask)
        metrics.add_std("std", values)
        metrics.add("none", values, mask & False)
    metrics.add_max("max", torch.tensor([2.0]))
    expected = {"mean": 3.0, "std": ((1.5**2 + 4.5**2 + 0.5**2 + 3.5**2) / 4) ** 0.5, "max": 6.0}
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx(expected)


def test_the_metrics_of_a_rollout_by_hand():
    completions = torch.tensor([[5, 1, 0], [5, 1, 7], [6, 6, 1], [6, 6, 6], [5, 1, 0], [5, 5, 1], [5, 1, 0], [1, 0, 0]])
    lengths = torch.tensor([2, 2, 3, 3, 2, 3, 2, 1])
    batch = {
        "completions": completions,
        "completion_mask": torch.arange(3) < lengths[:, None],
        "truncated": torch.tensor([False] * 3 + [True] + [False] * 4),
    }
    nan = math.nan
    correct = torch.tensor([1, 1, 0, 0, 1, nan, 0, 0], dtype=torch.float64)
    rewards = torch.tensor([2, 2, 2, 2, 1, 1, 1, 1], dtype=torch.float64)
    metrics = Metrics()
    rollout_metrics(metrics, batch, rewards, correct, {"a": torch.tensor([1.0] * 4 + [nan] * 2 + [4.0] * 2)}, 4)
    assert metrics.reduce(Accelerator(cpu=True)) == pytest.approx({
        "reward/mean": 1.5,
        "reward/std": 0.5,
        "reward/accuracy": 3 / 7,
        "reward_part/a": 2.0,
        "advantage/zero_groups": 1.0,
        "completion/length": 18 / 8,
        "completion/length_correct": 6 / 3,
        "completion/length_incorrect": 9 / 4,
        "completion/truncated": 1 / 8,
        "completion/unique": (3 / 4 + 3 / 4) / 2,  # what stands after the stop token does not count
    })  # fmt: skip


def test_an_evaluation_is_due_at_the_end():
    run = SimpleNamespace(args=SimpleNamespace(max_steps=5), step=0)
    due = {every: [] for every in (0, 2)}
    for run.step in range(1, 6):
        for every, steps in due.items():
            steps.append((Run.due(run, every, at_end=True), Run.due(run, every, at_end=False)))
    assert due[0] == [(False, False)] * 4 + [(True, False)]
    assert due[2] == [(False, False), (True, True), (False, False), (True, True), (True, False)]
