"""examples/bugs: each bug fits its script, and changes what a run computes."""

import functools
import re

import pytest
import recipes
import torch

import grpo
from testbed import ROOT, metric_rows, script

SMALL = "--prompts_per_step 4 --max_new_tokens 24 --max_steps 2 --learning_rate 1e-3"
SMALL += " --eval_every 0 --eval_prompts 1 --eval_samples 4"
OPTIONS = {  # under which the bug shows
    "temperature": "--temperature 0.7",
    "old_logprobs": "--num_minibatches 4",
    "kl_sign": "--kl_coef 0.2",
    "micro_batches": "--micro_batch_size 4 --prompts_per_step 32",
}
BUGS = [name for name, path in recipes.files().items() if path.parent.name == "bugs"]


@functools.cache
def module_with(bug, base):
    return recipes.load(recipes.made(bug, f"{base}.py"), f"with_{bug}")


def rows_of(module, options, folder):
    module.main([*SMALL.split(), *options.split(), "--output_dir", str(folder)])
    return metric_rows(folder)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The rows of a script without a bug; most bugs have the same options."""
    return functools.cache(lambda base, options: rows_of(script(base), options, tmp_path_factory.mktemp("healthy")))


@pytest.mark.parametrize("bug", BUGS)
def test_bug_changes_the_run_not_its_start(bug, healthy, tmp_path):
    base, options = "ppo" if bug == "micro_batches" else "grpo", OPTIONS.get(bug, "")
    healthy = healthy(base, options)
    broken = rows_of(module_with(bug, base), options, tmp_path)
    assert healthy[0] == broken[0]  # the evaluation before the first step
    assert healthy[2] != broken[2] and broken[2]["optim/grad_norm"] > 0


def test_the_printed_command_gives_the_printed_numbers(tmp_path):
    page = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"^python grpo.py (.*--seed 0)$", page, re.MULTILINE)
    grpo.main([*words.split(), "--max_steps", "1", "--output_dir", str(tmp_path)])
    first = re.search(r"`policy/entropy` of step 1 is ([\d.]+),", page.split("### Pair 5")[1])[1]
    assert f"{metric_rows(tmp_path)[1]['policy/entropy']:.3f}" == first


def test_batch_mean_rewards_easy_prompts():
    rewards, args = torch.tensor([1.0, 1.0, 0.0, 0.0]), grpo.Args(group_size=2)
    assert grpo.compute_advantages(rewards, args).eq(0).all()
    assert module_with("batch", "grpo").compute_advantages(rewards, args).ne(0).all()


def test_wrong_sign_subtracts_the_kl():
    new, ref = torch.full((1, 2), -1.0), torch.full((1, 2), -1.5)
    mask, advantages = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 1)
    args = grpo.Args(kl_coef=0.2)
    right, _ = grpo.policy_loss(new, new, advantages, mask, args, ref)
    wrong, _ = module_with("kl_sign", "grpo").policy_loss(new, new, advantages, mask, args, ref)
    assert right.min() > 0 and torch.equal(wrong, -right)
