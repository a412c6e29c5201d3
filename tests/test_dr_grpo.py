"""The functions of dr_grpo.py against the worked example, a literal loop, and what its paper removes from GRPO."""

import pytest
import torch

import dr_grpo
import grpo
from common.rewards import load_rewards
from testbed import ORACLES, b1, embedded, fill, gradients, hand_made_batch, largest_difference, ragged, totals_of

EXAMPLE = ORACLES["drgrpo"]


def args_of(**options):
    return dr_grpo.Args(**{"group_size": 4, "max_new_tokens": EXAMPLE["const"], **options})


def loss_of(args, dtype=torch.float64):
    old, new, _, mask = b1(dtype)
    advantages = dr_grpo.compute_advantages(torch.tensor(ORACLES["B1"]["R01"], dtype=dtype), args).to(dtype)
    losses, _ = dr_grpo.policy_loss(new, old, advantages, mask, args)
    return (losses * dr_grpo.token_weights(mask, totals_of(mask, 4), args)).sum(), losses, new, mask


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_oracle(dtype, tolerance):
    loss, _, new, _ = loss_of(args_of(), dtype)
    loss.backward()
    assert float(loss) == pytest.approx(EXAMPLE["loss"], abs=tolerance)
    assert torch.allclose(new.grad, ragged(EXAMPLE["grad"], dtype)[0], atol=tolerance)


@pytest.mark.parametrize(
    "rewards, expected", [((1, 0, 0, 1), EXAMPLE["adv"]), ((1, 0, 0, 0), [0.75, -0.25, -0.25, -0.25])]
)
def test_advantages_are_the_centred_rewards(rewards, expected):
    # TRL's loss_type="dr_grpo" alone keeps the division by the standard deviation: half of the algorithm.
    advantages = dr_grpo.compute_advantages(torch.tensor(rewards, dtype=torch.float64), args_of())
    assert advantages[:, 0].tolist() == expected
    rewards = torch.tensor([0.3] * 4, dtype=torch.float32)
    assert (dr_grpo.compute_advantages(rewards, args_of()) == 0).all()


def test_the_defaults_are_the_papers():
    args = dr_grpo.Args()
    assert (args.normalize_std, args.kl_coef, args.clip_low, args.clip_high) == (False, 0.0, 0.2, 0.2)
    assert args.num_minibatches > 1 and not args.mask_truncated  # with one update no clip acts


def test_normalize_std_changes_the_loss():
    assert abs(float(loss_of(args_of())[0]) - float(loss_of(args_of(normalize_std=True))[0])) > 1e-2


def test_weights_equal_a_literal_loop():
    # verl's seq-mean-token-sum-norm had no 1/B up to 0.7.0: there the loss doubled with the micro-batch.
    _, losses, _, mask = loss_of(args_of())
    expected = 0.0
    for row in range(4):
        expected += sum(float(losses[row, t]) for t in range(mask.shape[1]) if mask[row, t]) / 8 / 4
    weights = dr_grpo.token_weights(mask, totals_of(mask, 4), args_of())
    assert float((losses * weights).sum()) == pytest.approx(expected, abs=1e-12)


def test_the_constant_is_an_option_and_never_a_width():
    # verl divides by the padded width of the batch at hand: a constant that changes from step to step.
    mask = torch.tensor([[True, True, False], [True, False, False]])
    totals = totals_of(mask, 2)
    weights = dr_grpo.token_weights(mask, totals, args_of(max_new_tokens=10))
    wider = dr_grpo.token_weights(torch.nn.functional.pad(mask, (0, 7)), totals, args_of(max_new_tokens=10))
    assert weights[mask].tolist() == [0.05] * 3 and (weights[~mask] == 0).all()
    assert torch.equal(wider[:, :3], weights)
    halved = dr_grpo.token_weights(mask, totals, args_of(max_new_tokens=20))
    assert torch.equal(halved * 2, weights)


def test_a_token_weighs_the_same_in_a_short_and_a_long_completion():
    # The length bias of GRPO: a wrong answer is pushed down less per token when it is long.
    mask = torch.arange(40)[None] < torch.tensor([[5], [40]])
    for module, ratio in ((grpo, 8.0), (dr_grpo, 1.0)):
        weights = module.token_weights(mask, totals_of(mask, 2), module.Args(group_size=2))
        assert float(weights[0, 0] / weights[1, 0]) == pytest.approx(ratio)


def test_with_lengths_of_the_constant_it_is_grpo_without_std():
    mask, old = torch.ones(4, 6, dtype=torch.bool), torch.zeros(4, 6, dtype=torch.float64)
    new, advantages = torch.randn(4, 6, dtype=torch.float64) / 4, torch.tensor([[0.5], [-0.5], [-0.5], [0.5]])
    totals, results = totals_of(mask, 4), []
    for module in (grpo, dr_grpo):
        args = module.Args(group_size=4, max_new_tokens=6, kl_coef=0.0, normalize_std=False)
        losses, _ = module.policy_loss(new, old, advantages, mask, args)
        results.append((losses * module.token_weights(mask, totals, args)).sum())
    assert float(results[0]) == pytest.approx(float(results[1]), abs=1e-12)


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


def test_mask_truncated_leaves_the_row_in_the_mean(tmp_path, monkeypatch):
    # The official ignore_no_eos: the row's tokens leave the loss, the other rows keep their weight.
    seen = {}
    for masked in (False, True):
        args = ["--max_steps", "1", "--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "20"]
        args += ["--eval_prompts", "4", "--eval_samples", "4", "--output_dir", str(tmp_path / str(masked))]
        monkeypatch.setattr(dr_grpo, "update", lambda *a, m=masked: seen.update({m: a[4]}))
        dr_grpo.main(args + ["--mask_truncated"] * masked)
    plain, masked = seen[False], seen[True]
    truncated = masked["truncated"]
    assert truncated.any() and not truncated.all()
    assert torch.equal(plain["loss_mask"], plain["completion_mask"])
    assert not masked["loss_mask"][truncated].any()
    assert torch.equal(masked["loss_mask"][~truncated], masked["completion_mask"][~truncated])
    assert torch.equal(masked["completion_mask"], plain["completion_mask"])  # the metrics still count them
    assert torch.equal(masked["advantages"], plain["advantages"])  # their rewards stay in the group's mean


def test_masked_rows_contribute_nothing_and_change_no_other_gradient():
    module, args, tokenizer, policy = embedded("dr_grpo", group_size=4, prompts_per_step=8, num_minibatches=1)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    batch = fill(module, batch, rewards, args)
    truncated = batch["truncated"]
    assert truncated.any()
    (everything,), _ = gradients(module, args, policy, batch)
    only = {}
    for kind, rows in (("whole", ~truncated), ("cut", truncated)):
        (only[kind],), _ = gradients(
            module, args, policy, batch | {"loss_mask": batch["completion_mask"] & rows[:, None]}
        )
    summed = [a + b for a, b in zip(only["whole"], only["cut"], strict=True)]
    assert largest_difference(summed, everything) < 1e-6 and largest_difference(only["whole"], everything) > 1e-4
