"""`evaluate` of the scripts: its metrics and samples, and that it calls the script's own functions."""

import math

import pytest
import torch

import grpo
from common.load import Prompt
from common.rewards import Samples
from small_run import completion
from testbed import ALL, metric_rows, script


class SecondOfTwo:
    """Stand in for an Accelerator; the first process adds nothing."""

    process_index, num_processes, device, is_main_process = 1, 2, torch.device("cpu"), True

    def reduce(self, tensor):
        return tensor


def evaluated(count, lengths, correct, rewards, unknown=(), **options):
    """Return the metrics of the second process's share of `count` prompts with these completions.

    No answer is known of the prompts `unknown`. Also what `sample_and_score` was called with, and the rows for samples.jsonl.
    """
    args = grpo.Args(**{"generate_batch_size": 0, **options})
    calls = []
    texts = [f"{letter} #### {right:g}" for letter, right in zip("abcdefghijklmnop", correct.tolist(), strict=False)]
    rest = list(zip(texts, lengths, rewards.tolist(), strict=False))

    def sample_and_score(prompts, n, temperature, top_p, seed):
        calls.append(([prompt.ids[0] for prompt in prompts], n, temperature, top_p, seed))
        rows = [rest.pop(0) for _ in range(n * len(prompts))]
        texts, own, rewards = zip(*rows, strict=True)
        mask = torch.arange(max(own)) < torch.tensor(own)[:, None]
        terms = {"own": torch.tensor(rewards).double()}
        rewards = terms["own"].nan_to_num(7.0)  # a row without a reward gets its group's mean
        return Samples({"completion_mask": mask}, prompts, list(map(completion, texts)), rewards, terms)

    prompts = [Prompt([i], f"{i}", None if i in unknown else "1") for i in range(count)]
    scores, rows = grpo.evaluate(SecondOfTwo(), prompts, sample_and_score, args)
    return scores, calls, rows


def test_evaluation_by_hand():
    # Seven prompts on two processes: the second one has 1, 3, 5 and a filler. Of 3 no answer is known, and its first
    # completion has no reward.
    correct = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    options = dict(seed=3, temperature=1.3, eval_samples=4, eval_k=2, eval_temperature=0.7, eval_top_p=0.5)
    rewards = torch.arange(16, dtype=torch.float64)
    rewards[4] = math.nan
    result, calls, *_ = evaluated(7, range(1, 17), correct.flatten(), rewards, unknown=[3], **options)
    assert calls == [([1, 3, 5, 0], 4, 0.7, 0.5, (3, 1, 0, 0))]
    assert result == pytest.approx({
        "eval/pass@1": (1 / 2 + 1 / 4) / 2,
        "eval/pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(wrong, 2) / C(4, 2)
        "eval/reward": (sum(range(12)) - 4) / 11,
        "eval/length": sum(range(1, 13)) / 12,
    })  # fmt: skip


def test_greedy_evaluation():
    correct = torch.tensor([1.0, 0, 0, 0])
    result, calls, *_ = evaluated(8, [3] * 4, correct, torch.ones(4), eval_temperature=0.0)
    assert calls[0][1] == 1 and result == {"eval/pass@1": 0.25, "eval/reward": 1.0, "eval/length": 3.0}


def test_samples_of_four_prompts():
    zeros = torch.zeros(12)
    for size in (0, 3):  # in one chunk, and in chunks of one prompt
        _, _, rows = evaluated(12, [3] * 12, zeros, zeros, eval_samples=2, eval_k=1, generate_batch_size=size)
        assert [row["prompt"] for row in rows[::2]] == ["1", "3", "5", "7"]
        assert [row["completion"] for row in rows] == [f"{letter} #### 0" for letter in "abcdefgh"]


def test_chunks_give_the_same_scores():
    correct = torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1])
    options = dict(eval_samples=2, eval_k=2)
    whole, one_call, _ = evaluated(11, range(1, 13), correct, 2 * correct, **options)
    result, calls, _ = evaluated(11, range(1, 13), correct, 2 * correct, **options, generate_batch_size=5)
    assert [call[0] for call in one_call] == [[1, 3, 5, 7, 9, 0]]
    assert [call[0] for call in calls] == [[1, 3], [5, 7], [9, 0]]
    assert len({call[-1] for call in calls}) == 3 and calls[0][-1] == one_call[0][-1]
    assert result == pytest.approx(whole)


@pytest.mark.parametrize("name", [name for name in ALL if hasattr(script(name), "rollout")])
def test_own_rollout_and_rewards(name, tmp_path, monkeypatch):
    """A fork replaces them in the script's module, and evaluation must use them."""
    module = script(name)
    score, sampled = module.compute_rewards, []
    monkeypatch.setattr(module, "rollout", lambda *inputs, sample=module.rollout: sampled.append(1) or sample(*inputs))

    def higher(*inputs):
        rewards, parts = score(*inputs)
        return rewards + 100, parts

    monkeypatch.setattr(module, "compute_rewards", higher)
    options = "--max_steps 0 --eval_prompts 4 --eval_samples 4 --max_new_tokens 20"
    module.main([*options.split(), "--output_dir", str(tmp_path / "run")])
    assert sampled and metric_rows(tmp_path / "run")[0]["eval/reward"] > 90
