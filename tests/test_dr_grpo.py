"""What dr_grpo.py removes from GRPO, and its truncated completions."""

import pytest
import torch

import dr_grpo
from common.rewards import load_rewards
from small_run import completion
from testbed import metric_rows


def args_of(**options):
    return dr_grpo.Args(**{"group_size": 4, **options})


def test_advantages_are_the_centred_rewards():
    # TRL's loss_type="dr_grpo" alone keeps the division by the standard deviation: half of the algorithm.
    advantages = dr_grpo.compute_advantages(torch.tensor([1.0, 0, 0, 0]), args_of())
    assert advantages[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert (dr_grpo.compute_advantages(torch.full((4,), 0.3), args_of()) == 0).all()


def test_a_truncated_completion_scores_0_whatever_its_parts(tmp_path):
    # The sum, not the accuracy part alone: a format reward would still pay for a completion that never ends.
    (tmp_path / "part.py").write_text(
        "def part(prompts, completions, **kwargs):\n    return [float(c) if c else None for c in completions]\n",
        encoding="utf-8",
    )
    args = args_of(reward=[f"{tmp_path}/part.py:part"], group_size=2)

    class Prompt:
        prompt, answer, columns, gold, thinks = "1+1?", "2", {}, "2", False

    texts = [completion(text, truncated=i % 2 == 1) for i, text in enumerate(["3", "3", "-2", "-2"])]
    rewards, parts = dr_grpo.compute_rewards(load_rewards(args), [Prompt()] * 2, texts)
    assert rewards.tolist() == [3, 0, -2, 0]
    assert parts["part"].tolist() == [3, 3, -2, -2]  # the parts are reported as they are
    assert parts["truncated"].tolist() == [0, -3, 0, 2]


def test_where_reward_0_is_a_rise_the_run_says_so_once_and_its_parts_add_up(tmp_path, capsys):
    """Under a penalty on the length a completion that is cut off is the best wrong one."""
    penalty = "def short(completions, **_):\n    return [-len(text) / 100 for text in completions]\n"
    (tmp_path / "mine.py").write_text(penalty, encoding="utf-8")
    options = "--max_steps 2 --prompts_per_step 4 --group_size 4 --max_new_tokens 16"
    options += f" --eval_prompts 2 --eval_samples 1 --eval_k 1 --reward accuracy {tmp_path}/mine.py:short --output_dir {tmp_path}/run"
    dr_grpo.main(options.split())
    printed = capsys.readouterr().out
    assert printed.count("are truncated and have reward 0 where they would have less") == 1
    for row in metric_rows(tmp_path / "run")[1:]:
        parts = [row[f"reward_terms/{name}"] for name in ("accuracy", "short", "truncated")]
        assert parts[2] > 0 and sum(parts) == pytest.approx(row["reward/mean"])
        assert f"truncated {parts[2]:.3f})" in printed
