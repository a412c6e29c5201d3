"""common/evaluation.py: what is counted and shown; and that a script's own functions sample and score."""

import math
import types

import pytest
import torch

from harness.data import Prompt
from harness.evaluation import evaluate
from small_run import completion
from testbed import ALL, metric_rows, script


class SecondOfTwo:
    """In the place of an Accelerator; the first process has nothing to add."""

    process_index, num_processes, device = 1, 2, torch.device("cpu")

    def reduce(self, tensor, how):
        return tensor


def evaluated(count, lengths, correct, rewards, **options):
    """The metrics of the second process's share of `count` prompts with these completions; what `sample_and_score` was
    asked for, and what is written to samples.jsonl."""
    asked, written = [], []
    log = types.SimpleNamespace(
        collect_logged=lambda prefix="": None,
        show_raw=lambda *given: None,
        write_samples=lambda prompts, texts, *rest, evaluation: written.append((prompts, texts)),
    )
    run = types.SimpleNamespace(args=script("grpo").Args(**options), accelerator=SecondOfTwo(), rewards=[], log=log)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    texts = [completion(letter) for letter in "abcdefghijklmnop"[: len(lengths)]]

    def sample_and_score(prompts, n, temperature, top_p, seed):
        asked.append(([prompt.ids[0] for prompt in prompts], n, temperature, top_p, seed))
        return {"completion_mask": mask}, texts, rewards, correct, {"accuracy": correct}

    prompts = [Prompt([i], f"{i}", None) for i in range(count)]
    return evaluate(run, prompts, sample_and_score), asked, written


def test_an_evaluation_by_hand():
    # Seven prompts on two processes: the second one has 1, 3, 5 and a filler. Of 3 no answer is known.
    correct = torch.tensor([[1, 0, 0, 1], [math.nan] * 4, [0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    options = dict(seed=3, temperature=1.3, eval_samples=4, eval_k=2, eval_temperature=0.7, eval_top_p=0.5)
    rewards = torch.arange(16, dtype=torch.float64)
    result, asked, _ = evaluated(7, range(1, 17), correct.flatten(), rewards, **options)
    assert asked == [([1, 3, 5, 0], 4, 0.7, 0.5, (3, 1, 0))]
    assert result == pytest.approx({
        "eval/pass@1": (1 / 2 + 1 / 4) / 2,
        "eval/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(wrong, 2) / C(4, 2)
        "eval/reward": sum(range(12)) / 12,
        "eval/length": sum(range(1, 13)) / 12,
    })  # fmt: skip


def test_a_greedy_evaluation_takes_one_completion_and_has_no_pass_at_k():
    correct = torch.tensor([1.0, 0, 0, 0])
    result, asked, _ = evaluated(8, [3] * 4, correct, torch.ones(4), eval_temperature=0.0)
    assert asked[0][1] == 1 and result == {"eval/pass@1": 0.25, "eval/reward": 1.0, "eval/length": 3.0}


def test_an_evaluation_shows_four_of_its_prompts():
    zeros = torch.zeros(12)
    _, _, ((prompts, texts),) = evaluated(12, [3] * 12, zeros, zeros, eval_samples=2, eval_k=1)
    assert [prompt.ids[0] for prompt in prompts] == [1, 3, 5, 7] and texts == [*"abcdefgh"]


@pytest.mark.parametrize("name", [name for name in ALL if hasattr(script(name), "rollout")])
def test_a_script_evaluates_by_its_own_rollout_and_rewards(name, tmp_path, monkeypatch):
    """A fork replaces them in the script's module, and its evaluation has to follow."""
    module = script(name)
    score, sampled = module.compute_rewards, []
    monkeypatch.setattr(module, "rollout", lambda *inputs, sample=module.rollout: sampled.append(1) or sample(*inputs))

    def higher(*inputs):
        rewards, parts = score(*inputs)
        return rewards + 100, parts

    monkeypatch.setattr(module, "compute_rewards", higher)
    options = "--max_steps 0 --eval_prompts 4 --eval_samples 4 --max_new_tokens 16"
    if name == "dpo":
        options += " --pair_prompts 32"
    module.main([*options.split(), "--output_dir", str(tmp_path / "run")])
    assert sampled and metric_rows(tmp_path / "run")[0]["eval/reward"] > 90
