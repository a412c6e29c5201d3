"""`evaluate` of every script that samples: what is counted, and what is shown."""

import contextlib
import math

import pytest
import torch

from testbed import ALL, script

pytestmark = pytest.mark.parametrize("name", [name for name in ALL if hasattr(script(name), "evaluate")])


class SecondOfTwo:
    """In the place of an Accelerator; the first process has nothing to add."""

    process_index, num_processes, device = 1, 2, torch.device("cpu")

    def autocast(self):
        return contextlib.nullcontext()

    def reduce(self, tensor, how):
        return tensor


def test_an_evaluation_by_hand(name, monkeypatch):
    # Seven prompts on two processes: the second one has 1, 3, 5 and a filler. Of 3 no answer is known, and one
    # completion of 5 and one of the filler have no reward.
    correct = torch.tensor([[1, 0, 0, 1], [math.nan] * 4, [0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    rewards, lengths = torch.arange(16, dtype=torch.float64), torch.arange(1, 17)[:, None]
    rewards[[9, 14]] = math.nan
    module, seen = script(name), []

    def rollout(model, prompts, n, temperature, top_p, seed, args):
        seen.append((prompts, n, temperature, top_p, seed))
        return {"completion_mask": torch.arange(16) < lengths, "truncated": torch.zeros(16, dtype=torch.bool)}

    parts = {"accuracy": rewards}
    monkeypatch.setattr(module, "rollout", rollout)
    monkeypatch.setattr(module, "completion_texts", lambda tokenizer, batch: [*"abcdefghijklmnop"])
    monkeypatch.setattr(module, "compute_rewards", lambda *arguments: (rewards, correct.flatten(), parts))
    args = module.Args(seed=3, temperature=1.3, eval_samples=4, eval_k=2, eval_temperature=0.7, eval_top_p=0.5)
    result, shown = module.evaluate(SecondOfTwo(), None, None, [], [0, 1, 2, 3, 4, 5, 6], args)
    assert seen == [([1, 3, 5, 0], 4, 0.7, 0.5, (3, 1, 0, 0))]
    assert result == pytest.approx({
        "eval/pass@1": (1 / 2 + 1 / 4) / 2,
        "eval/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(wrong, 2) / C(4, 2)
        "eval/reward": (sum(range(12)) - 9) / 11,
        "eval/length": sum(range(1, 13)) / 12,
    })  # fmt: skip
    assert shown == ([1, 3, 5, 0], [*"abcdefghijklmnop"], rewards, parts)


def test_a_greedy_evaluation_takes_one_completion_and_has_no_pass_at_k(name, monkeypatch):
    batch = {"completion_mask": torch.ones(4, 3, dtype=torch.bool), "truncated": torch.zeros(4, dtype=torch.bool)}
    module, asked = script(name), []
    monkeypatch.setattr(module, "rollout", lambda *arguments: asked.append(arguments[2]) or batch)
    monkeypatch.setattr(module, "completion_texts", lambda tokenizer, batch: [*"abcd"])
    monkeypatch.setattr(module, "compute_rewards", lambda *arguments: (torch.ones(4), torch.tensor([1.0, 0, 0, 0]), {}))
    args = module.Args(eval_temperature=0.0)
    result, _ = module.evaluate(SecondOfTwo(), None, None, [], range(8), args)
    assert asked == [1] and result == {"eval/pass@1": 0.25, "eval/reward": 1.0, "eval/length": 3.0}


def test_an_evaluation_shows_four_of_its_prompts(name, monkeypatch):
    # Not the texts and token ids of all: they would stay in memory until the next evaluation.
    batch = {"completion_mask": torch.ones(12, 3, dtype=torch.bool), "truncated": torch.zeros(12, dtype=torch.bool)}
    module = script(name)
    monkeypatch.setattr(module, "rollout", lambda *arguments: batch)
    monkeypatch.setattr(module, "completion_texts", lambda tokenizer, batch: [*"abcdefghijkl"])
    monkeypatch.setattr(module, "compute_rewards", lambda *arguments: (torch.zeros(12), None, {}))
    _, shown = module.evaluate(SecondOfTwo(), None, None, [], range(12), module.Args(eval_samples=2, eval_k=1))
    assert shown[:2] == ([1, 3, 5, 7], [*"abcdefgh"])
