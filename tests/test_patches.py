"""lab/patches: what each of them puts in the place of a script's function; lab/patched.py puts it there."""

import sys

import pytest
import torch
from accelerate import Accelerator

import dapo
import grpo
import gspo
import patched
from common.harness.metrics import Metrics
from small_run import QUICK
from testbed import ROOT, metric_rows

MASK = torch.arange(4) < torch.tensor([[2], [4]])
TOTALS = {"tokens": 6, "rows": 2, "prompts": 2, "group_tokens": torch.tensor([[2], [4]])}


def names_of(script, name):
    """The names of a script after a patch."""
    names = dict(vars(script))
    exec((ROOT / "lab" / "patches" / f"{name}.py").read_text(encoding="utf-8"), names)
    return names


@pytest.mark.parametrize(
    "script, name, short, long",
    [(grpo, "token_mean", 1 / 6, 1 / 6), (grpo, "group_token_mean", 1 / 4, 1 / 8), (dapo, "row_mean", 1 / 4, 1 / 8)],
)
def test_weights(script, name, short, long):
    weights = names_of(script, name)["token_weights"](MASK, TOTALS, script.Args())
    assert weights[0].tolist() == pytest.approx([short, short, 0, 0]) and weights[1].tolist() == pytest.approx(
        [long] * 4
    )
    if name != "group_token_mean":  # the sibling's own weights
        other = dapo if script is grpo else grpo
        assert weights.equal(other.token_weights(MASK, TOTALS, other.Args()))


def test_noise_on_the_old_log_probs():
    torch.manual_seed(0)
    logprobs, mask = torch.full((50, 80), -1.0), torch.ones(50, 80, dtype=torch.bool)
    loss = names_of(grpo, "noisy_old_logprobs")["policy_loss"]
    _, stats = loss(logprobs, logprobs, torch.ones(50, 1), mask, grpo.Args())
    noise = stats["ratio_max"].log()
    assert float(noise.std()) == pytest.approx(0.05, rel=0.05) and abs(float(noise.mean())) < 0.005


def test_clipped_tokens_are_those_of_clipped_rows_and_the_loss_stays():
    advantages, args = torch.tensor([[1.0], [1.0]]), gspo.Args()
    old_logprobs = torch.full((2, 4), -1.0)
    logprobs = old_logprobs + torch.tensor([[0.0], [0.1]])  # the second row, of four tokens, is clipped
    losses, stats = names_of(gspo, "clipped_tokens")["policy_loss"](logprobs, old_logprobs, advantages, MASK, args)
    assert stats["clipped_tokens"].tolist() == [[False] * 4, [True] * 4]
    assert losses.equal(gspo.policy_loss(logprobs, old_logprobs, advantages, MASK, args)[0])
    metrics = Metrics()
    metrics.add_stats("policy", stats, MASK)
    assert metrics.reduce(Accelerator(cpu=True))["policy/clipped_tokens"] == pytest.approx(4 / 6)


def test_the_punishment_on_top_of_the_filter():
    args = dapo.Args(overlong="filter", max_new_tokens=64, overlong_cache=13)
    lengths = torch.tensor([10, 51, 64])
    assert dapo.overlong_penalty(lengths, args).tolist() == [0, 0, 0]
    assert names_of(dapo, "stacked_overlong")["overlong_penalty"](lengths, args).tolist() == [0, 0, -1]


def test_a_step_of_all_groups_has_one_round_and_those_that_agree(monkeypatch, tmp_path):
    monkeypatch.setattr(dapo, "dynamic_batch", names_of(dapo, "all_groups")["dynamic_batch"])
    options = "--prompts_per_step 8 --group_size 2 --num_minibatches 1 --max_steps 1 --overlong soft"
    dapo.main([*QUICK, *options.split(), "--output_dir", str(tmp_path / "run")])
    row = metric_rows(tmp_path / "run")[-1]
    assert row["sampling/rounds"] == 1 and row["advantage/zero_groups"] > 0
    punishment = -row["completion/length"] / 16  # the cache is as long as the completions: each token costs
    assert row["reward/mean"] == pytest.approx(2 * row["reward/accuracy"] - 1 + punishment)


def test_patches_are_put_on_a_script_one_after_the_other(tmp_path, monkeypatch):
    (tmp_path / "patches").mkdir()
    script, one, two = tmp_path / "script.py", tmp_path / "patches" / "one.py", tmp_path / "patches" / "two.py"
    script.write_text(
        "import contextlib\nclean_exit, seen = contextlib.nullcontext, []\ndef f():\n    return 'f'\n"
        "def g():\n    return 'g'\ndef main(options):\n    seen.extend([f(), g(), *options])\n",
        encoding="utf-8",
    )
    one.write_text("def f():\n    return 'first'\ndef g():\n    return 'first'\n", encoding="utf-8")
    two.write_text("old = g\ndef g():\n    return old() + 'second'\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["patched.py", str(one), str(two), str(script), "--option"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    patched.main()
    assert sys.modules["script"].seen == ["first", "firstsecond", "--option"]
