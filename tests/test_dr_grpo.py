"""dr_grpo.py: what it removes from GRPO, and truncated completions."""

import torch

import dr_grpo
from common.load import Prompt
from common.rewards import load_rewards
from small_run import completion


def args_of(**options):
    return dr_grpo.Args(**{"group_size": 4, **options})


def test_advantages_are_the_centred_rewards():
    # TRL's loss_type="dr_grpo" alone keeps the division by the standard deviation: half of the algorithm.
    advantages = dr_grpo.compute_advantages(torch.tensor([1.0, 0, 0, 0]), args_of())
    assert advantages[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert (dr_grpo.compute_advantages(torch.full((4,), 0.3), args_of()) == 0).all()


def test_truncated_completions_score_0(tmp_path):
    # The sum, not the accuracy alone: a format reward would still pay for a completion that never ends.
    (tmp_path / "term.py").write_text(
        "def term(prompts, completions, **kwargs):\n    return [float(c) if c else None for c in completions]\n",
        encoding="utf-8",
    )
    args = args_of(reward=[f"{tmp_path}/term.py:term"], group_size=2)
    texts = [completion(text, truncated=i % 2 == 1) for i, text in enumerate(["3", "3", "-2", "-2", "", "5", "4", ""])]
    rewards, terms = dr_grpo.compute_rewards(load_rewards(args), [Prompt([1], "1+1?", "2")] * 4, texts, 2)
    assert rewards.tolist() == [3, 0, -2, 0, 0, 0, 4, 4]  # without a reward it does not move the baseline
    assert terms["term"].nan_to_num(7).tolist() == [3, 3, -2, -2, 7, 5, 4, 7]  # the terms are logged as they are
