"""common/harness/evaluation.py: what is counted and shown; and that a script's own functions sample and score."""

import contextlib
import math

import pytest
import torch

import grpo
from common.harness import evaluation
from testbed import ALL, metric_rows, script


class SecondOfTwo:
    """In the place of an Accelerator; the first process has nothing to add."""

    process_index, num_processes, device = 1, 2, torch.device("cpu")

    def autocast(self):
        return contextlib.nullcontext()

    def reduce(self, tensor, how):
        return tensor


@pytest.fixture
def evaluated(monkeypatch):
    """A function that evaluates the second process's share of `prompts`, with these texts and rewards in the place of
    sampled ones; returns metrics, what is shown, and what `rollout` was asked for."""
    monkeypatch.setattr(evaluation, "unsharded", lambda accelerator, model: contextlib.nullcontext())

    def evaluate(prompts, lengths, texts, scored, **options):
        asked = []
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

        def rollout(policy, prompts, n, temperature, top_p, seed, args):
            asked.append((list(prompts), n, temperature, top_p, seed))
            return {"completion_mask": mask, "truncated": torch.zeros(len(mask), dtype=torch.bool)}

        monkeypatch.setattr(evaluation, "completion_texts", lambda tokenizer, batch: list(texts))
        result, shown = evaluation.evaluate(
            SecondOfTwo(), None, None, None, [], prompts, grpo.Args(**options), rollout, lambda *inputs: scored
        )
        return result, shown, asked

    return evaluate


def test_an_evaluation_by_hand(evaluated):
    # Seven prompts on two processes: the second one has 1, 3, 5 and a filler. Of 3 no answer is known, and one
    # completion of 5 and one of the filler have no reward.
    correct = torch.tensor([[1, 0, 0, 1], [math.nan] * 4, [0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    rewards = torch.arange(16, dtype=torch.float64)
    rewards[[9, 14]] = math.nan
    scored = (rewards, correct.flatten(), {"accuracy": rewards})
    options = dict(seed=3, temperature=1.3, eval_samples=4, eval_k=2, eval_temperature=0.7, eval_top_p=0.5)
    result, shown, asked = evaluated([0, 1, 2, 3, 4, 5, 6], range(1, 17), "abcdefghijklmnop", scored, **options)
    assert asked == [([1, 3, 5, 0], 4, 0.7, 0.5, (3, 1, 0, 0))]
    assert result == pytest.approx({
        "eval/pass@1": (1 / 2 + 1 / 4) / 2,
        "eval/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(wrong, 2) / C(4, 2)
        "eval/reward": (sum(range(12)) - 9) / 11,
        "eval/length": sum(range(1, 13)) / 12,
    })  # fmt: skip
    assert shown == ([1, 3, 5, 0], [*"abcdefghijklmnop"], rewards, {"accuracy": rewards})


def test_a_greedy_evaluation_takes_one_completion_and_has_no_pass_at_k(evaluated):
    scored = (torch.ones(4), torch.tensor([1.0, 0, 0, 0]), {})
    result, _, asked = evaluated(range(8), [3] * 4, "abcd", scored, eval_temperature=0.0)
    assert asked[0][1] == 1 and result == {"eval/pass@1": 0.25, "eval/reward": 1.0, "eval/length": 3.0}


def test_an_evaluation_shows_four_of_its_prompts(evaluated):
    # Not the texts and token ids of all: they would stay in memory until the next evaluation.
    scored = (torch.zeros(12), None, {})
    _, shown, _ = evaluated(range(12), [3] * 12, "abcdefghijkl", scored, eval_samples=2, eval_k=1)
    assert shown[:2] == ([1, 3, 5, 7], [*"abcdefgh"])


@pytest.mark.parametrize("name", [name for name in ALL if hasattr(script(name), "evaluate")])
def test_a_script_evaluates_by_its_own_rollout_and_rewards(name, tmp_path, monkeypatch):
    """A fork replaces them in the script's module, and its evaluation has to follow."""
    module = script(name)
    score = module.compute_rewards
    sampled = []
    monkeypatch.setattr(module, "rollout", lambda *inputs, sample=module.rollout: sampled.append(1) or sample(*inputs))

    def higher(*inputs):
        rewards, correct, parts = score(*inputs)
        return rewards + 100, correct, parts

    monkeypatch.setattr(module, "compute_rewards", higher)
    module.main(
        ["--max_steps", "0", "--eval_prompts", "4", "--eval_samples", "4", "--output_dir", str(tmp_path / "run")]
    )
    assert sampled and metric_rows(tmp_path / "run")[0]["eval/reward"] > 90
