"""What dr_grpo.py removes from GRPO, and its truncated completions."""

import pytest
import torch

import dr_grpo
from common.rewards import load_rewards


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

    texts, truncated = ["3", "3", "-2", "-2", "", ""], torch.tensor([False, True] * 3)
    rewards, _, parts = dr_grpo.compute_rewards(load_rewards(args), [Prompt()] * 6, texts, truncated)
    assert rewards[:4].tolist() == [3, 0, -2, 0]
    assert rewards[4:].isnan().all()  # without a reward, cut off or not
    assert parts["part"][:4].tolist() == [3, 3, -2, -2]  # the parts are reported as they are


@pytest.mark.parametrize("masked", [False, True])
def test_mask_truncated_takes_the_tokens_of_the_row_out_of_the_loss_alone(masked, tmp_path, monkeypatch):
    # The official ignore_no_eos. Metrics still count the row, and its reward stays in the group's mean.
    seen = []
    monkeypatch.setattr(dr_grpo, "update", lambda *arguments: seen.append(arguments[4]))
    monkeypatch.setattr(dr_grpo, "evaluate", lambda *arguments: ({}, None))
    options = "--max_steps 1 --prompts_per_step 4 --group_size 4 --max_new_tokens 20 --eval_every 0"
    dr_grpo.main([*options.split(), "--output_dir", str(tmp_path), *["--mask_truncated"] * masked])
    (batch,) = seen
    truncated, groups = batch["truncated"], batch["rewards"].view(-1, 4)
    assert truncated.any() and not truncated.all() and batch["completion_mask"].any(dim=1).all()
    expected = batch["completion_mask"] & ~truncated[:, None] if masked else batch["completion_mask"]
    assert torch.equal(batch["loss_mask"], expected)
    assert torch.allclose(batch["advantages"].view(-1, 4).double(), groups - groups.mean(dim=1, keepdim=True))
