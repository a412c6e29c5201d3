"""Named bugs that people write, and the tests that must fail on each: does the suite see them?

    python tests/mutants.py [NAME ...] [--jobs N]      by hand, not by CI; a NAME is a part of a mutant's name

Each row of the table puts a new text in the place of an old one, which must stand exactly once in each of its files,
and names the tests that kill it. First all these tests run without a mutant; then each mutant alone in a copy of the
project, until the first of its tests fails. A mutant whose tests all pass survives: a test is missing. One that ends in
a NameError is broken: its row is to be mended. One that runs into the time limit counts as killed, and says so. The
exit code is 1 if any mutant is left.

Tests that compare texts (copies of a function, the page of diffs) are not accepted: they see that something was
changed, not that it is wrong.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from typing import NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
sys.dont_write_bytecode = True  # a mutant of the same second and size would run from the cache of the one before

ROOT = pathlib.Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
TIMEOUT = 300  # seconds for each test
TEXT_TESTS = {"test_same_text.py", "test_diffs.py"}

FAMILY = "grpo dr_grpo dapo gspo dcpo"
RL = f"{FAMILY} ppo"
PAIRS = "dpo reward_model"
EVERY = f"{RL} {PAIRS}"
SAMPLING = f"{RL} dpo"  # the scripts with a rollout and an evaluation

# Tests with several cases, of which one is enough.
SPLIT = "test_suite.py::test_gradient_is_invariant_to_micro_batches[{}-0.04-{{'micro_batch_size': 4}}]"
PAPERS = dict(grpo="GRPO", dr_grpo="DrGRPO", dapo="DAPO", gspo="GSPO", dcpo="DCPO")
WHOLE = {name: f"test_whole_updates.py::test_group_relative[{name}-{paper}-]" for name, paper in PAPERS.items()}
WHOLE_PPO = "test_whole_updates.py::test_ppo[{}]"
WHOLE_PAIRS = "test_whole_updates.py::test_dpo_with_pairs_of_its_own"


class Mutant(NamedTuple):
    name: str
    files: str  # scripts without .py, each of which gets the same edit, or `common`: the one file below common/
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str  # why no test can see it; it is not run


def mutant(name, files, old, new, *tests, equivalent=""):
    return Mutant(name, files, old, new, tests, equivalent)


# fmt: off
MUTANTS = [
    # --- the update loop ---
    *[
        mutant(f"{script}: the old log-probs are those of the moment, so that no clip ever acts", script,
            'old_logprobs = micro.get("old_logprobs", logprobs.detach())',
            "old_logprobs = logprobs.detach()",
            WHOLE[script])
        for script in PAPERS
    ],
    mutant("the old log-probs are those of the moment, in all five", FAMILY,
        'old_logprobs = micro.get("old_logprobs", logprobs.detach())',
        "old_logprobs = logprobs.detach()",
        WHOLE["grpo"]),
    mutant("ppo: the old log-probs are those of the moment", "ppo",
        'mask, old_logprobs = micro["loss_mask"], micro["old_logprobs"]',
        'mask, old_logprobs = micro["loss_mask"], logprobs.detach()',
        WHOLE_PPO.format("target_kl")),
    mutant("the old log-probs are kept over minibatches, not over epochs", FAMILY,
        "several = args.num_epochs * args.num_minibatches > 1",
        "several = args.num_minibatches > 1",
        "test_grpo.py::test_the_old_log_probs_are_kept_over_epochs_of_one_minibatch"),
    mutant("num_epochs is ignored", FAMILY,
        "for epoch in range(args.num_epochs):",
        "for epoch in range(1):",
        WHOLE["grpo"]),
    mutant("ppo: num_epochs is ignored", "ppo",
        "for epoch in range(args.num_epochs):",
        "for epoch in range(1):",
        WHOLE_PPO.format("kl_in_loss")),
    mutant("weight_decay is ignored", EVERY,
        "weight_decay=args.weight_decay",
        "weight_decay=0.0",
        WHOLE["grpo"]),
    *[
        mutant(f"{script}: weight_decay is ignored", script,
            "weight_decay=args.weight_decay",
            "weight_decay=0.0",
            f"test_suite.py::test_the_optimizer_has_the_options[{script}]")
        for script in EVERY.split()
    ],
    *[
        mutant(f"{script}: the decays of the moments are ignored", script,
            "betas = (args.adam_beta1, args.adam_beta2)",
            "betas = (0.9, 0.999)",
            f"test_suite.py::test_the_optimizer_has_the_options[{script}]")
        for script in EVERY.split()
    ],
    mutant("the decays of the moments are swapped", EVERY,
        "betas = (args.adam_beta1, args.adam_beta2)",
        "betas = (args.adam_beta2, args.adam_beta1)",
        "test_suite.py::test_the_optimizer_has_the_options[grpo]"),
    mutant("max_grad_norm is ignored", FAMILY,
        "model.parameters(), args.max_grad_norm)",
        "model.parameters(), 0.0)",
        WHOLE["grpo"]),
    mutant("ppo: max_grad_norm is ignored", "ppo",
        "clip_grad_norm(accelerator, part, args.max_grad_norm)",
        "clip_grad_norm(accelerator, part, 0.0)",
        "test_ppo.py::test_each_has_its_own_gradient_clip_and_a_shared_model_one"),
    mutant("max_grad_norm 0 clips to 0", "common",
        "accelerator.clip_grad_norm_(parameters, max_norm or math.inf)",
        "accelerator.clip_grad_norm_(parameters, max_norm)",
        "test_pair_suite.py::test_padding_changes_nothing[dpo]"),
    mutant("clip_low is counted at half the bound", "grpo dr_grpo dapo",
        '"clip_low": (advantages < 0) & (ratio < 1 - args.clip_low),',
        '"clip_low": (advantages < 0) & (ratio < 1 - args.clip_low / 2),',
        WHOLE["grpo"]),
    mutant("gspo: clip_low is counted at half the bound", "gspo",
        '"clip_low": (advantages < 0) & (s < 1 - args.clip_low),',
        '"clip_low": (advantages < 0) & (s < 1 - args.clip_low / 2),',
        WHOLE["gspo"]),
    mutant("ppo: clip_low is counted at half the bound", "ppo",
        'stats["clip_low"] = (advantages < 0) & (ratio < 1 - args.clip_low)',
        'stats["clip_low"] = (advantages < 0) & (ratio < 1 - args.clip_low / 2)',
        WHOLE_PPO.format("kl_in_loss")),
    mutant("optim/loss is doubled", FAMILY,
        'metrics.add("optim/loss", step_loss * accelerator.num_processes)',
        'metrics.add("optim/loss", 2 * step_loss * accelerator.num_processes)',
        WHOLE["grpo"]),
    mutant("ppo: optim/loss is doubled", "ppo",
        'metrics.add("optim/loss", step_loss * accelerator.num_processes)',
        'metrics.add("optim/loss", 2 * step_loss * accelerator.num_processes)',
        WHOLE_PPO.format("kl_in_loss")),
    mutant("the optimizer is never cleared: gradients of all steps add up", FAMILY,
        "            optimizer.step()\n            optimizer.zero_grad()\n",
        "            optimizer.step()\n",
        "test_suite.py::test_minibatches_are_equal_runs_of_whole_groups_in_draw_order[grpo]"),
    mutant("the loss is a mean over micro-batches", FAMILY,
        "* weights).sum()\n",
        "* weights).sum() / len(micro_batches)\n",
        SPLIT.format("grpo")),
    mutant("ppo: the loss is a mean over micro-batches", "ppo",
        "* weights).sum()\n",
        "* weights).sum() / len(micro_batches)\n",
        SPLIT.format("ppo")),
    mutant("optim/loss is that of the last micro-batch", FAMILY,
        "step_loss = step_loss + loss.detach()",
        "step_loss = loss.detach()",
        SPLIT.format("grpo")),
    mutant("ppo: optim/loss is that of the last micro-batch", "ppo",
        "step_loss = step_loss + loss.detach()",
        "step_loss = loss.detach()",
        SPLIT.format("ppo")),
    mutant("the metrics are those of the last micro-batch", FAMILY,
        'metrics.add_stats("policy", stats',
        'i == len(micro_batches) - 1 and metrics.add_stats("policy", stats',
        "test_suite.py::test_metrics_equal_a_loop_over_all_tokens[grpo]"),
    mutant("ppo: the metrics are those of the last micro-batch", "ppo",
        'metrics.add_stats("policy", stats',
        'i == len(micro_batches) - 1 and metrics.add_stats("policy", stats',
        WHOLE_PPO.format("kl_in_loss")),
    mutant("the loss is not multiplied by the number of processes", FAMILY,
        "accelerator.backward(loss * accelerator.num_processes)",
        "accelerator.backward(loss)",
        "test_launch.py::test_two_processes_take_the_same_step_as_one[grpo]"),
    mutant("ppo: the loss is not multiplied by the number of processes", "ppo",
        "accelerator.backward(loss * accelerator.num_processes)",
        "accelerator.backward(loss)",
        "test_launch.py::test_two_processes_take_the_same_step_as_one[ppo]"),
    mutant("pairs: the loss is not multiplied by the number of processes", PAIRS,
        "accelerator.backward(loss * accelerator.num_processes)",
        "accelerator.backward(loss)",
        "test_pair_suite.py::test_two_processes_take_the_same_steps_as_one_and_resume[reward_model]"),
    mutant("gradients are never averaged over processes", "common",
        "with contextlib.nullcontext() if last or accelerator.is_fsdp2 else accelerator.no_sync(model):",
        "with contextlib.nullcontext() if accelerator.is_fsdp2 else accelerator.no_sync(model):",
        "test_launch.py::test_two_processes_take_the_same_step_as_one[grpo]"),
    mutant("the rows of an optimizer step are those of one process", "common",
        "step_rows = rows * accelerator.num_processes",
        "step_rows = rows",
        "test_launch.py::test_two_processes_take_the_same_step_as_one[grpo]"),
    mutant("the tokens of an optimizer step are those of one process", "common",
        'tokens = accelerator.reduce(tokens, "sum").tolist()',
        "tokens = tokens.tolist()",
        "test_launch.py::test_two_processes_take_the_same_step_as_one[dapo]"),
    mutant("the fillers of a process count in the loss", "common",
        'parts.append(filler | {"loss_mask": torch.zeros_like(filler["loss_mask"])})',
        "parts.append(filler)",
        "test_launch.py::test_two_processes_take_the_same_step_as_one[grpo]"),
    mutant("pairs: optim/loss is doubled", PAIRS,
        'metrics.add("optim/loss", step_loss * accelerator.num_processes)',
        'metrics.add("optim/loss", 2 * step_loss * accelerator.num_processes)',
        "test_whole_updates.py::test_reward_model"),
    mutant("pairs: the optimizer is never cleared", PAIRS,
        "    optimizer.step()\n    optimizer.zero_grad()\n",
        "    optimizer.step()\n",
        "test_pair_suite.py::test_gradient_is_the_mean_over_pairs_in_any_order[dpo]"),
    mutant("pairs: optim/loss is that of the last micro-batch", PAIRS,
        "step_loss = step_loss + loss.detach()",
        "step_loss = loss.detach()",
        "test_pair_suite.py::test_gradient_is_invariant_to_micro_batches[6-dpo]"),
    mutant("pairs: max_grad_norm is ignored", PAIRS,
        "model.parameters(), args.max_grad_norm)",
        "model.parameters(), 0.0)",
        "test_pair_suite.py::test_every_option_changes_the_run[max_grad_norm-0.001-dpo]"),
    mutant("ppo: a loss that is not finite goes on", "ppo",
        "if not torch.isfinite(sum(norms) + step_loss):",
        "if torch.isinf(sum(norms) + step_loss):",
        "test_suite.py::test_a_loss_that_is_not_finite_ends_the_run[ppo]"),
    mutant("pairs: a loss that is not finite goes on", PAIRS,
        "if not torch.isfinite(norm + step_loss):",
        "if torch.isinf(norm + step_loss):",
        "test_dpo.py::test_a_loss_of_pairs_that_is_not_finite_ends_the_run"),
    mutant("a loss that is not finite goes on", FAMILY,
        "if not torch.isfinite(norm + step_loss):",
        "if torch.isinf(norm + step_loss):",
        "test_suite.py::test_a_loss_that_is_not_finite_ends_the_run[grpo]"),
    mutant("the reference is the policy", FAMILY,
        'micro["ref_logprobs"], _ = reference(micro, with_entropy=False)',
        'micro["ref_logprobs"], _ = model(micro, with_entropy=False)[:2]',
        "test_suite.py::test_metrics_equal_a_loop_over_all_tokens[grpo]"),
    mutant("ppo: the reference is the policy", "ppo",
        'micro["ref_logprobs"], _ = reference(micro, with_entropy=False)',
        'micro["ref_logprobs"], _ = model(micro, with_entropy=False)[:2]',
        "test_ppo.py::test_the_kl_is_in_the_reward_or_in_the_loss"),
    mutant("the reference is scored at temperature 1", "common",
        "reference = load_policy(args, tokenizer, accelerator).requires_grad_(False).eval()",
        "reference = load_policy(args, tokenizer, accelerator).requires_grad_(False).eval()\n"
        "    reference.temperature = 1.0",
        WHOLE["grpo"]),
    mutant("ppo: the reference is scored at temperature 1", "ppo",
        "reference = load_reference(args, tokenizer, accelerator) if args.kl_coef else None",
        "reference = load_reference(args, tokenizer, accelerator) if args.kl_coef else None\n"
        "    if reference is not None:\n        reference.temperature = 1.0",
        WHOLE_PPO.format("kl_in_loss")),
    mutant("the warm-up is late by one step", "common",
        "(step + 1) / args.warmup_steps",
        "step / args.warmup_steps",
        "test_suite.py::test_the_rate_of_each_step_reaches_the_optimizer[grpo]"),
    mutant("the schedule is early by one step", "common",
        "progress = step / max(",
        "progress = (step + 1) / max(",
        "test_suite.py::test_the_rate_of_each_step_reaches_the_optimizer[grpo]"),
    mutant("the schedule counts updates and not steps", "common",
        "progress = step / max(",
        "progress = step * getattr(args, 'num_minibatches', 1) / max(",
        "test_suite.py::test_the_rate_of_each_step_reaches_the_optimizer[dapo]"),
    mutant("the cosine schedule goes below zero", "common",
        "(1 + math.cos(math.pi * progress)) / 2",
        "math.cos(math.pi * progress)",
        "test_args.py::test_the_schedules_in_closed_form"),
    mutant("the rate is logged and never set", FAMILY,
        'group["lr"] = learning_rate(run.step, args)',
        'group["rate"] = learning_rate(run.step, args)',
        "test_suite.py::test_the_rate_of_each_step_reaches_the_optimizer[grpo]"),
    mutant("pairs: the rate is logged and never set", PAIRS,
        'group["lr"] = learning_rate(run.step, args, ',
        'group["rate"] = learning_rate(run.step, args, ',
        "test_pair_suite.py::test_every_option_changes_the_run[warmup_steps-4-dpo]"),
    mutant("each process draws the same prompts", "grpo dr_grpo gspo ppo",
        "sampler.draw(args.prompts_per_step)[rank::processes]",
        "sampler.draw(args.prompts_per_step // processes)",
        "test_launch.py::test_two_processes_share_the_prompts_and_sample_different_completions"),
    *[
        mutant(f"{script}: each process samples with the same seed", script,
            "stream_seed(args.seed, rank, run.step + 1, 0)",
            "stream_seed(args.seed, 0, run.step + 1, 0)",
            f"test_suite.py::test_each_step_and_process_samples_with_a_seed_of_its_own[{script}]")
        for script in ("grpo", "dr_grpo", "gspo", "dcpo", "ppo")
    ],
    *[
        mutant(f"{script}: each step samples with the same seed", script,
            "stream_seed(args.seed, rank, run.step + 1, 0)",
            "stream_seed(args.seed, rank, 1, 0)",
            f"test_suite.py::test_each_step_and_process_samples_with_a_seed_of_its_own[{script}]")
        for script in ("grpo", "dr_grpo", "gspo", "dcpo", "ppo")
    ],
    # --- evaluation ---
    mutant("the evaluation ignores eval_top_p", SAMPLING,
        "args.eval_temperature, args.eval_top_p, seed, args)",
        "args.eval_temperature, 1.0, seed, args)",
        "test_grpo.py::test_an_evaluation_by_hand"),
    mutant("the evaluation samples at the temperature of training", SAMPLING,
        "args.eval_temperature, args.eval_top_p, seed, args)",
        "args.temperature, args.eval_top_p, seed, args)",
        "test_grpo.py::test_an_evaluation_by_hand"),
    mutant("the evaluation samples with the seed of a step", SAMPLING,
        "seed = stream_seed(args.seed, rank, 0, 0)",
        "seed = stream_seed(args.seed, rank, 1, 0)",
        "test_grpo.py::test_an_evaluation_by_hand"),
    mutant("the evaluation counts its fillers", SAMPLING,
        "real = torch.tensor([i < len(prompts) for i in indices])",
        "real = torch.tensor([True for i in indices])",
        "test_grpo.py::test_an_evaluation_by_hand"),
    mutant("pass@1 is the best of the samples", SAMPLING,
        'metrics.add("eval/pass@1", correct.mean(dim=1), answered)',
        'metrics.add("eval/pass@1", correct.amax(dim=1), answered)',
        "test_grpo.py::test_an_evaluation_by_hand"),
    mutant("a prompt without an answer counts as wrong in pass@1", SAMPLING,
        "answered, metrics = real & ~correct.isnan().any(dim=1), Metrics()",
        "answered, metrics, correct = real, Metrics(), correct.nan_to_num()",
        "test_grpo.py::test_an_evaluation_by_hand"),
    mutant("pass@k is biased", "common",
        "return 1 - ((wrong - drawn).clamp(min=0) / (n - drawn)).prod(dim=1)",
        "return 1 - (wrong[:, 0] / n) ** k",
        "test_masked.py::test_pass_at_k_equals_its_definition"),
    # --- advantages ---
    mutant("the mean is that of the batch and not of the group", "grpo dr_grpo dapo gspo",
        "advantages = groups - groups.mean(dim=1, keepdim=True)",
        "advantages = groups - groups.mean()",
        "test_grpo.py::test_each_group_has_its_own_mean_and_deviation"),
    mutant("the deviation is that of the batch and not of the group", "grpo dr_grpo dapo gspo",
        "groups.std(dim=1, keepdim=True, correction=args.std_ddof)",
        "groups.std(correction=args.std_ddof)",
        "test_grpo.py::test_each_group_has_its_own_mean_and_deviation"),
    mutant("std_ddof is ignored", "grpo dr_grpo dapo gspo",
        "groups.std(dim=1, keepdim=True, correction=args.std_ddof)",
        "groups.std(dim=1, keepdim=True, correction=0)",
        "test_grpo.py::test_advantages_equal_their_definition"),
    mutant("std_eps is ignored", "grpo dr_grpo dapo gspo",
        "+ args.std_eps)",
        "+ 1e-6)",
        "test_grpo.py::test_advantages_equal_their_definition"),
    mutant("a group that agrees has the advantage of its rounding", "grpo dr_grpo dapo gspo",
        "advantages.masked_fill(equal, 0)",
        "advantages",
        "test_grpo.py::test_a_group_that_agrees_has_advantage_exactly_zero"),
    mutant("rows of one prompt are taken to lie a stride apart", "grpo dr_grpo dapo gspo",
        "groups = rewards.double().view(-1, args.group_size)",
        "groups = rewards.double().view(args.group_size, -1).T",
        "test_grpo.py::test_groups_are_adjacent_rows"),
    mutant("statistics in float32", "grpo dr_grpo dapo gspo",
        "groups = rewards.double().view(-1, args.group_size)",
        "groups = rewards.float().view(-1, args.group_size)",
        "test_grpo.py::test_advantages_of_the_oracle"),
    # --- the loss of the family ---
    mutant("the loss has the wrong sign", "grpo dr_grpo dapo gspo dcpo",
        "losses = -objective",
        "losses = objective",
        "test_grpo.py::test_oracle_values"),
    mutant("the larger of the two objectives instead of the smaller", "grpo dr_grpo dapo gspo",
        "torch.minimum(ratio * advantages, clipped * advantages)",
        "torch.maximum(ratio * advantages, clipped * advantages)",
        "test_grpo.py::test_clip_table"),
    mutant("the bounds of the clip are swapped", "grpo dr_grpo dapo gspo",
        "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)",
        "ratio.clamp(1 - args.clip_high, 1 + args.clip_low)",
        "test_grpo.py::test_clip_table"),
    mutant("the clip is symmetric", "grpo dr_grpo dapo gspo",
        "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)",
        "ratio.clamp(1 - args.clip_low, 1 + args.clip_low)",
        "test_dapo.py::test_clip_higher_is_the_default_and_acts_above_only"),
    mutant("the clipped objective alone, without the minimum", "grpo dr_grpo dapo gspo",
        "torch.minimum(ratio * advantages, clipped * advantages)",
        "clipped * advantages",
        "test_grpo.py::test_clip_table"),
    mutant("the dual clip acts on positive advantages, too", "grpo dr_grpo dapo gspo",
        "torch.where(advantages < 0, torch.maximum(objective, args.dual_clip * advantages), objective)",
        "torch.maximum(objective, args.dual_clip * advantages)",
        "test_grpo.py::test_clip_table"),
    mutant("the dual clip takes the smaller one", "grpo dr_grpo dapo gspo ppo",
        "torch.maximum(objective, args.dual_clip * advantages)",
        "torch.minimum(objective, args.dual_clip * advantages)",
        "test_grpo.py::test_clip_table"),
    mutant("clip_high is counted for both signs", "grpo dr_grpo dapo",
        '"clip_high": (advantages > 0) & (ratio > 1 + args.clip_high),',
        '"clip_high": ratio > 1 + args.clip_high,',
        "test_grpo.py::test_clip_table"),
    mutant("approx_kl is k1", "grpo dr_grpo dapo",
        '"approx_kl": ratio - 1 - log_ratios,',
        '"approx_kl": -log_ratios,',
        "test_grpo.py::test_the_diagnostics_of_batch_b1"),
    mutant("the KL pays for divergence", FAMILY,
        "losses = losses + args.kl_coef * kl",
        "losses = losses - args.kl_coef * kl",
        "test_grpo.py::test_oracle_values"),
    mutant("the KL has no gradient", FAMILY,
        "losses = losses + args.kl_coef * kl",
        "losses = losses + args.kl_coef * kl.detach()",
        "test_grpo.py::test_oracle_gradients"),
    mutant("the KL is against the old policy", FAMILY,
        "kl = kl_estimate(logprobs, ref_logprobs,",
        "kl = kl_estimate(logprobs, old_logprobs,",
        "test_grpo.py::test_oracle_values"),
    mutant("the KL has its arguments swapped", FAMILY,
        "kl = kl_estimate(logprobs, ref_logprobs,",
        "kl = kl_estimate(ref_logprobs, logprobs,",
        "test_grpo.py::test_oracle_values"),
    mutant("the entropy bonus punishes entropy", FAMILY,
        "losses = losses - args.entropy_coef * entropy",
        "losses = losses + args.entropy_coef * entropy",
        "test_grpo.py::test_entropy_bonus_lowers_the_loss_by_its_weighted_mean"),
    mutant("the entropy bonus has no gradient", "common",
        'entropy_grad = getattr(args, "entropy_coef", 0) != 0',
        "entropy_grad = False",
        "test_policy.py::test_entropy_gradient_only_with_its_coefficient"),
    mutant("the loss stands beside the mask, too", "grpo dr_grpo dapo gspo dcpo ppo",
        "return torch.where(loss_mask, losses, 0), stats",
        "return losses, stats",
        "test_grpo.py::test_entropy_bonus_lowers_the_loss_by_its_weighted_mean"),
    mutant("the mask comes after the exp", "common",
        "return torch.where(mask, logprobs - old_logprobs, 0).clamp(-20, 20)",
        "return torch.where(mask, (logprobs - old_logprobs).clamp(-20, 20), 0)",
        equivalent="the clamp has gradient 0 at NaN, and the where takes its value away; before the exp it still is"),
    mutant("log-ratios are not clamped", "common",
        "return torch.where(mask, logprobs - old_logprobs, 0).clamp(-20, 20)",
        "return torch.where(mask, logprobs - old_logprobs, 0)",
        "test_grpo.py::test_a_huge_ratio_stays_finite"),
    # --- weights ---
    mutant("grpo: rows are those of the micro-batch", "grpo gspo",
        'loss_mask.double() / lengths / totals["rows"]',
        "loss_mask.double() / lengths / len(loss_mask)",
        SPLIT.format("grpo")),
    mutant("grpo: all tokens weigh the same", "grpo gspo",
        'loss_mask.double() / lengths / totals["rows"]',
        'loss_mask.double() / totals["tokens"]',
        "test_grpo.py::test_weights_are_the_mean_over_rows_of_the_mean_over_tokens"),
    mutant("grpo: the length is the padded one", "grpo",
        "lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (R, 1)",
        "lengths = loss_mask.shape[1]",
        "test_grpo.py::test_weights_are_the_mean_over_rows_of_the_mean_over_tokens"),
    mutant("dr_grpo: the constant is the width of the tensor", "dr_grpo",
        'loss_mask.double() / args.max_new_tokens / totals["rows"]',
        'loss_mask.double() / loss_mask.shape[1] / totals["rows"]',
        "test_dr_grpo.py::test_the_constant_is_an_option_and_never_a_width"),
    mutant("dr_grpo: no division by the rows", "dr_grpo",
        'loss_mask.double() / args.max_new_tokens / totals["rows"]',
        "loss_mask.double() / args.max_new_tokens",
        "test_dr_grpo.py::test_weights_equal_a_literal_loop"),
    mutant("dapo and ppo: tokens are those of the micro-batch", "dapo ppo",
        'loss_mask.double() / max(totals["tokens"], 1)',
        "loss_mask.double() / loss_mask.sum().clamp(min=1)",
        SPLIT.format("dapo")),
    mutant("dapo: the mean over groups divides by rows", "dapo",
        'totals["group_tokens"].clamp(min=1) / totals["prompts"]',
        'totals["group_tokens"].clamp(min=1) / totals["rows"]',
        "test_dapo.py::test_scope_of_the_token_mean"),
    mutant("the tokens of a group are those of another one", "common",
        "group_tokens.repeat_interleave(args.group_size)[:, None]",
        "group_tokens.repeat(args.group_size)[:, None]",
        "test_dapo.py::test_the_mean_over_groups_in_an_update"),
    mutant("dcpo: the mean over rows is the default", "dcpo",
        '"prompts" if args.only_token_mean else "rows"',
        '"rows" if args.only_token_mean else "prompts"',
        "test_dcpo.py::test_weights_are_the_mean_over_prompts_of_the_sum_over_the_group_of_the_mean_over_tokens"),
    # --- dr_grpo ---
    mutant("dr_grpo: truncated completions keep their reward", "dr_grpo",
        ".masked_fill(torch.tensor(truncated), 0)",
        "",
        "test_dr_grpo.py::test_a_truncated_completion_scores_0_whatever_its_parts"),
    mutant("dr_grpo: mask_truncated masks the others", "dr_grpo",
        'batch["completion_mask"] & ~batch["truncated"][:, None]',
        'batch["completion_mask"] & batch["truncated"][:, None]',
        "test_dr_grpo.py::test_mask_truncated_leaves_the_row_in_the_mean"),
    mutant("dr_grpo: advantages are divided by the deviation", "dr_grpo",
        "normalize_std: bool = option(False,",
        "normalize_std: bool = option(True,",
        "test_dr_grpo.py::test_the_defaults_are_the_papers"),
    # --- dapo ---
    mutant("dapo: groups that are all right are kept", "dapo",
        "(0 < right) & (right < G)",
        "0 < right",
        "test_dapo.py::test_exactly_the_groups_that_are_neither_all_right_nor_all_wrong_are_kept[accuracy-1]"),
    mutant("dapo: groups that are all wrong are kept", "dapo",
        "(0 < right) & (right < G)",
        "right < G",
        "test_dapo.py::test_exactly_the_groups_that_are_neither_all_right_nor_all_wrong_are_kept[accuracy-1]"),
    mutant("dapo: the filter is inverted", "dapo",
        "(0 < right) & (right < G)",
        "(right == 0) | (right == G)",
        "test_dapo.py::test_exactly_the_groups_that_are_neither_all_right_nor_all_wrong_are_kept[accuracy-1]"),
    mutant("dapo: accuracy is 1 and 0", "dapo",
        '2 * parts[name] - 1',
        'parts[name]',
        "test_dapo.py::test_accuracy_is_plus_or_minus_one_and_nothing_else_is_recoded"),
    mutant("dapo: long completions are paid", "dapo",
        "rewards = rewards + penalty",
        "rewards = rewards - penalty",
        "test_dapo.py::test_the_stop_token_counts_towards_the_length"),
    mutant("the overlong ramp begins at the cap", "common",
        "((max_length - cache - lengths.double()) / cache)",
        "((max_length - lengths.double()) / cache)",
        "test_dapo.py::test_soft_overlong_oracle"),
    mutant("the overlong punishment has no floor", "common",
        "lengths.double()) / cache).clamp(-1.0, 0.0)",
        "lengths.double()) / cache).clamp(max=0.0)",
        "test_rewards.py::test_soft_overlong_oracle"),
    mutant("dapo: each round samples with the same seed", "dapo",
        "stream_seed(args.seed, rank, metrics.step, sampling_round)",
        "stream_seed(args.seed, rank, metrics.step, 0)",
        "test_dapo.py::test_seeds_are_those_of_rank_step_and_round"),
    mutant("dapo: each process samples with the same seed", "dapo",
        "stream_seed(args.seed, rank, metrics.step, sampling_round)",
        "stream_seed(args.seed, metrics.step, sampling_round)",
        "test_dapo.py::test_seeds_are_those_of_rank_step_and_round"),
    mutant("dapo: training samples with the evaluation's top_p", "dapo",
        "rollout(model, prompts, G, args.temperature, 1.0, seed, args)",
        "rollout(model, prompts, G, args.temperature, args.eval_top_p, seed, args)",
        "test_dapo.py::test_seeds_are_those_of_rank_step_and_round"),
    mutant("dapo: drop resamples and resample drops", "dapo",
        'args.on_reject == "resample"',
        'args.on_reject == "drop"',
        "test_dapo.py::test_resample_puts_the_rejected_first[1]"),
    mutant("dapo: the batch is the last groups and not the first ones", "dapo",
        "kept[:used]",
        "kept[-used:]",
        "test_dapo.py::test_surplus_is_discarded_and_never_comes_back"),
    mutant("dapo: a short batch is cut at no multiple", "dapo",
        "used = min(len(kept), args.prompts_per_step) // unit * unit",
        "used = min(len(kept), args.prompts_per_step)",
        "test_dapo.py::test_a_short_batch_divides_over_processes_and_minibatches[1-6]"),
    mutant("dapo: one round more than the budget", "dapo",
        "for sampling_round in range(args.max_sampling_rounds):",
        "for sampling_round in range(args.max_sampling_rounds + 1):",
        "test_dapo.py::test_an_exhausted_budget_trains_on_the_largest_batch_that_divides[1]"),
    mutant("dapo: the overlong filter keeps the truncated rows alone", "dapo",
        'batch["completion_mask"] & ~batch["truncated"][:, None]',
        'batch["completion_mask"] & batch["truncated"][:, None]',
        "test_dapo.py::test_filter_takes_truncated_rows_out_of_the_loss_and_leaves_them_in_their_group"),
    mutant("dapo: a skipped step ends the run", "dapo",
        "none_kept = kept == 0",
        "none_kept = batch is None",
        "test_dapo.py::test_skipped_steps_change_nothing_and_the_run_goes_on"),
    # --- gspo ---
    mutant("gspo: the ratio is the sum and not the mean of logs", "gspo",
        "log_s = log_ratios.sum(dim=1, keepdim=True) / lengths",
        "log_s = log_ratios.sum(dim=1, keepdim=True)",
        "test_gspo.py::test_the_ratio_is_the_mean_and_not_the_sum_of_logs"),
    mutant("gspo: the length is the padded one", "gspo",
        "log_s = log_ratios.sum(dim=1, keepdim=True) / lengths",
        "log_s = log_ratios.mean(dim=1, keepdim=True)",
        "test_gspo.py::test_oracle"),
    mutant("gspo: one ratio for the whole micro-batch", "gspo",
        "log_s = log_ratios.sum(dim=1, keepdim=True) / lengths",
        "log_s = (log_ratios.sum() / lengths.sum()).expand(len(lengths), 1)",
        "test_gspo.py::test_each_row_has_its_own_ratio"),
    mutant("gspo: the ratio has no gradient", "gspo",
        "ratio = log_s.clamp(-20, 20).exp()",
        "ratio = log_s.detach().clamp(-20, 20).exp()",
        "test_gspo.py::test_oracle"),
    mutant("gspo: the token level has the ratio of the token", "gspo",
        "log_s = log_ratios - log_ratios.detach() + log_s.detach()",
        "log_s = log_ratios",
        "test_gspo.py::test_oracle"),
    mutant("gspo: approx_kl has its arguments swapped", "gspo",
        'kl_estimate(old_logprobs, logprobs, loss_mask, "k3")',
        'kl_estimate(logprobs, old_logprobs, loss_mask, "k3")',
        "test_gspo.py::test_metrics_of_the_example"),
    mutant("gspo: the clip is GRPO's", "gspo",
        "clip_low: float = option(3e-4,",
        "clip_low: float = option(0.2,",
        "test_gspo.py::test_the_defaults_are_the_papers_and_not_grpos"),
    # --- dcpo ---
    mutant("dcpo: the lower bound is not halved", "dcpo",
        "low = 0.5 + 0.5 * (1 - 4 * args.clip_low / q)",
        "low = 0.5 + (1 - 4 * args.clip_low / q)",
        "test_dcpo.py::test_bounds_of_the_oracle"),
    mutant("dcpo: both bounds have the lower epsilon", "dcpo",
        "(1 + 4 * args.clip_high / q).sqrt()",
        "(1 + 4 * args.clip_low / q).sqrt()",
        "test_dcpo.py::test_bounds_of_the_oracle"),
    mutant("dcpo: the upper bound has no cap", "dcpo",
        "return low, high.clamp(max=args.max_ratio)",
        "return low, high",
        "test_dcpo.py::test_clip_table"),
    mutant("dcpo: bounds by the new probability", "dcpo",
        "low, high = clip_bounds(old_logprobs, loss_mask, args)",
        "low, high = clip_bounds(logprobs.detach(), loss_mask, args)",
        "test_dcpo.py::test_bounds_of_batch_b1"),
    mutant("dcpo: no cap for negative advantages", "dcpo",
        "cap = args.max_ratio if args.dynamic_clip else args.dual_clip",
        "cap = args.dual_clip",
        "test_dcpo.py::test_clip_table"),
    mutant("dcpo: the pooled variance lacks the part between visits", "dcpo",
        "(visits * old_variance + variance + between) / i",
        "(visits * old_variance + variance) / i",
        "test_dcpo.py::test_four_visits_of_the_oracle"),
    mutant("dcpo: the part between visits has the wrong weight", "dcpo",
        "visits / i * (old_mean - mean).square()",
        "1 / i * (old_mean - mean).square()",
        "test_dcpo.py::test_four_visits_of_the_oracle"),
    mutant("dcpo: the last visit weighs as much as all before", "dcpo",
        "(visits * old_mean + mean) / i",
        "(visits.clamp(max=1) * old_mean + mean) / i.clamp(max=2)",
        "test_dcpo.py::test_four_visits_of_the_oracle"),
    mutant("dcpo: the first minimum is that of an empty table", "dcpo",
        "low = torch.where(visits > 0, torch.minimum(low, old_low), low)",
        "low = torch.minimum(low, old_low)",
        "test_dcpo.py::test_minimum_and_maximum_of_a_first_visit_are_its_own"),
    mutant("dcpo: the mixtures are swapped", "dcpo",
        "return (visits * new + total) / i, (new + visits * total) / i, history",
        "return (new + visits * total) / i, (visits * new + total) / i, history",
        "test_dcpo.py::test_a_tie_of_opposite_signs_takes_the_total"),
    mutant("dcpo: the larger of the two mixtures", "dcpo",
        "torch.where(new.abs() < total.abs(), new, total)",
        "torch.where(new.abs() > total.abs(), new, total)",
        "test_dcpo.py::test_four_visits_of_the_oracle"),
    mutant("dcpo: a tie takes the new one", "dcpo",
        "torch.where(new.abs() < total.abs(), new, total)",
        "torch.where(new.abs() <= total.abs(), new, total)",
        "test_dcpo.py::test_a_tie_of_opposite_signs_takes_the_total"),
    mutant("dcpo: each process has a history of its own", "dcpo",
        "sorted(accelerator.gather(rows).tolist())",
        "sorted(rows.tolist())",
        "test_dcpo.py::test_the_history_does_not_depend_on_the_number_of_processes[2]"),
    mutant("dcpo: the advantages see a visit twice", "dcpo",
        "new, total, _ = smoothed_advantages(rewards, args, before)",
        "new, total, _ = smoothed_advantages(rewards, args, after)",
        "test_dcpo.py::test_a_resumed_run_goes_on_with_the_history"),
    mutant("dcpo: the history is not in the checkpoint", "dcpo",
        "run.keep(sampler=sampler, history=history)",
        "run.keep(sampler=sampler)",
        "test_dcpo.py::test_a_resumed_run_goes_on_with_the_history"),
    mutant("dcpo: a missing answer is paid", "dcpo",
        'parts[name] - torch.tensor(missing).double()',
        'parts[name] + torch.tensor(missing).double()',
        "test_dcpo.py::test_an_answer_that_is_missing_costs_the_accuracy_part_one"),
    # --- ppo ---
    mutant("ppo: no discount of the next value", "ppo",
        "token_rewards[:, t] + gamma * next_value - values[:, t]",
        "token_rewards[:, t] + next_value - values[:, t]",
        "test_ppo.py::test_gae_equals_its_definition_on_ragged_rows"),
    mutant("ppo: advantages are not discounted", "ppo",
        "delta + gamma * gae_lambda * advantage",
        "delta + gae_lambda * advantage",
        "test_ppo.py::test_gae_equals_its_definition_on_ragged_rows"),
    mutant("ppo: a truncated episode is bootstrapped with its last value", "ppo",
        "advantage = next_value = torch.zeros_like(values[:, 0])",
        "advantage, next_value = torch.zeros_like(values[:, 0]), values[:, -1]",
        "test_ppo.py::test_gae_of_the_oracle"),
    mutant("ppo: padding takes part in the advantages", "ppo",
        "next_value = torch.where(mask[:, t], values[:, t], next_value)",
        "next_value = values[:, t]",
        "test_ppo.py::test_gae_equals_its_definition_on_ragged_rows"),
    mutant("ppo: the value is that of the next token, off by one", "ppo",
        "        delta = token_rewards[:, t] + gamma * next_value - values[:, t]\n",
        "        next_value = torch.where(mask[:, t], values[:, t], next_value)\n"
        "        delta = token_rewards[:, t] + gamma * next_value - values[:, t]\n",
        "test_ppo.py::test_gae_of_the_oracle"),
    mutant("ppo: returns have the actor's lambda", "ppo",
        "args.gamma, critic_lambda)",
        "args.gamma, actor_lambda)",
        "test_ppo.py::test_the_critic_may_have_a_lambda_of_its_own"),
    mutant("ppo: a lambda of 0 for the critic counts as not given", "ppo",
        "critic_lambda = args.gae_lambda if args.gae_lambda_critic is None else args.gae_lambda_critic",
        "critic_lambda = args.gae_lambda_critic or args.gae_lambda",
        "test_ppo.py::test_the_lambda_of_the_critic_may_be_0"),
    mutant("ppo: the length-adaptive lambda may be negative", "ppo",
        "(1 - 1 / (args.length_adaptive_alpha * lengths)).clamp(0, 1)",
        "1 - 1 / (args.length_adaptive_alpha * lengths)",
        "test_ppo.py::test_length_adaptive_lambda_is_clamped"),
    mutant("ppo: returns after whitening", "ppo",
        '        micro["advantages"] = torch.where(micro["loss_mask"], whitened, 0).to(torch.float32)\n',
        '        micro["advantages"] = torch.where(micro["loss_mask"], whitened, 0).to(torch.float32)\n'
        '        micro["returns"] = micro["advantages"] + micro["old_values"]\n',
        "test_ppo.py::test_advantages_are_whitened_over_the_tokens_of_the_whole_rollout"),
    mutant("ppo: advantages are not centred", "ppo",
        '(micro["advantages"] - mean) / deviation',
        'micro["advantages"] / deviation',
        "test_ppo.py::test_advantages_are_whitened_over_the_tokens_of_the_whole_rollout"),
    mutant("ppo: the epsilon stands outside of the root", "ppo",
        "(variance + args.std_eps).sqrt()",
        "variance.sqrt() + args.std_eps",
        "test_ppo.py::test_the_kl_to_the_reference_reaches_the_returns"),
    mutant("ppo: each process whitens its own tokens", "ppo",
        'moments(of_all_tokens("advantages"), args.std_ddof, accelerator.reduce)',
        'moments(of_all_tokens("advantages"), args.std_ddof, lambda x: x)',
        "test_launch.py::test_two_processes_take_the_same_step_as_one[ppo]"),
    mutant("moments: ddof is ignored", "common",
        "squares / (count - ddof).clamp(min=1)",
        "squares / count.clamp(min=1)",
        "test_ppo.py::test_moments_whiten_the_oracle"),
    mutant("ppo: the smaller of the two errors of a value", "ppo",
        "errors = torch.maximum(errors, clipped_errors)",
        "errors = torch.minimum(errors, clipped_errors)",
        "test_ppo.py::test_value_loss_of_the_oracle"),
    mutant("ppo: values are clipped around the returns", "ppo",
        "values.clamp(old_values - args.value_clip, old_values + args.value_clip)",
        "values.clamp(returns - args.value_clip, returns + args.value_clip)",
        "test_ppo.py::test_value_loss_of_the_oracle"),
    mutant("ppo: the value loss is not halved", "ppo",
        "return errors / 2, stats",
        "return errors, stats",
        "test_ppo.py::test_value_loss_of_the_oracle"),
    mutant("ppo: value_coef is ignored", "ppo",
        "args.value_coef * value_losses",
        "value_losses",
        "test_ppo.py::test_a_separate_critic_leaves_the_policy_alone"),
    mutant("ppo: the larger of the two objectives instead of the smaller", "ppo",
        "objective = torch.minimum(objective, clipped * advantages)",
        "objective = torch.maximum(objective, clipped * advantages)",
        "test_ppo.py::test_oracle_values_and_gradients"),
    mutant("ppo: approx_kl is k1", "ppo",
        '"approx_kl": ratio - 1 - log_ratios,',
        '"approx_kl": -log_ratios,',
        "test_ppo.py::test_oracle_values_and_gradients"),
    mutant("ppo: the penalty pays for divergence", "ppo",
        "if penalty_coef is None else penalty_coef) * log_ratios",
        "if penalty_coef is None else penalty_coef) * -log_ratios",
        "test_ppo.py::test_the_penalty_is_k1_of_old_against_new"),
    mutant("ppo: the critic has the policy's rate", "ppo",
        "rate / args.learning_rate * args.critic_learning_rate",
        "rate",
        WHOLE_PPO.format("kl_in_loss")),
    mutant("ppo: policy and critic have each other's rate", "ppo",
        "zip(optimizer.param_groups, rates.values(), strict=True)",
        "zip(optimizer.param_groups[::-1], rates.values(), strict=True)",
        WHOLE_PPO.format("kl_in_loss")),
    mutant("ppo: the KL in the loss ignores its controller", "ppo",
        "                        coefficients.kl,\n",
        "                        args.kl_coef,\n",
        WHOLE_PPO.format("kl_in_loss")),
    mutant("ppo: the KL in the reward ignores its controller", "ppo",
        'micro["completion_mask"], args, coefficients.kl',
        'micro["completion_mask"], args, args.kl_coef',
        "test_ppo.py::test_the_kl_to_the_reference_reaches_the_returns"),
    mutant("ppo: the penalty ignores its controller", "ppo",
        "                        coefficients.penalty,\n",
        "                        args.penalty_coef,\n",
        WHOLE_PPO.format("penalty")),
    mutant("ppo: target_kl forgets its stop at the next epoch", "ppo",
        "    for epoch in range(args.num_epochs):\n",
        "    for epoch in range(args.num_epochs):\n        too_far = False\n",
        WHOLE_PPO.format("target_kl")),
    mutant("ppo: a step that target_kl stops is taken", "ppo",
        "            if too_far:\n                optimizer.zero_grad()\n",
        "            if too_far:\n                optimizer.step()\n                optimizer.zero_grad()\n",
        "test_ppo.py::test_target_kl_stops_the_updates_of_a_rollout"),
    mutant("ppo: truncation is paid", "ppo",
        "rewards = rewards - args.missing_eos_penalty * truncated",
        "rewards = rewards + args.missing_eos_penalty * truncated",
        "test_ppo.py::test_the_reward_stands_on_the_stop_token_and_truncation_costs"),
    mutant("ppo: the reward stands on the last column", "ppo",
        "last = completion_mask.sum(dim=1, keepdim=True).clamp(min=1) - 1",
        "last = torch.full_like(completion_mask[:, :1], completion_mask.shape[1] - 1, dtype=torch.long)",
        "test_ppo.py::test_the_reward_stands_on_the_stop_token_and_truncation_costs"),
    mutant("ppo: the KL in the reward pays for divergence", "ppo",
        "else -kl_coef * kl",
        "else kl_coef * kl",
        "test_ppo.py::test_shaped_rewards_of_the_oracle"),
    mutant("ppo: the KL is in the reward and in the loss", "ppo",
        'torch.zeros_like(kl) if args.kl_in == "loss" else',
        "",
        "test_ppo.py::test_the_reward_stands_on_the_stop_token_and_truncation_costs"),
    mutant("ppo: the KL controller steers the wrong way", "ppo",
        "kl / args.kl_target - 1",
        "1 - kl / args.kl_target",
        "test_ppo.py::test_adaptive_kl_of_the_oracle"),
    mutant("ppo: the penalty is halved where it is to be doubled", "ppo",
        "if kl < args.penalty_target / 1.5:",
        "if kl > args.penalty_target * 1.5:",
        "test_ppo.py::test_the_penalty_is_halved_and_doubled"),
    mutant("ppo: the warm-up of the critic ends a step early", "ppo",
        "policy_coef = 0.0 if metrics.step <= args.critic_warmup_steps else 1.0",
        "policy_coef = 0.0 if metrics.step < args.critic_warmup_steps else 1.0",
        "test_ppo.py::test_controllers_follow_what_was_logged_and_survive_a_resume"),
    mutant("ppo: AdamW counts the policy's steps in the warm-up", "ppo",
        "                    parameter.grad = None\n",
        "                    parameter.grad.zero_()\n",
        "test_ppo.py::test_controllers_follow_what_was_logged_and_survive_a_resume"),
    mutant("ppo: explained variance is the unexplained one", "ppo",
        "1 - unexplained / variance",
        "unexplained / variance",
        "test_ppo.py::test_explained_variance_by_hand"),
    mutant("ppo: policy and critic are clipped together", "ppo",
        'parts = [policy, critic] if args.critic == "separate" else [policy + critic]',
        "parts = [policy + critic] * 2",
        "test_ppo.py::test_each_has_its_own_gradient_clip_and_a_shared_model_one"),
    mutant("ppo: a shared critic leaves the backbone alone", "ppo",
        "return logprobs, entropy, self.critic(batch, *states)",
        "return logprobs, entropy, self.critic(batch, states[0], states[1].detach())",
        "test_ppo.py::test_a_shared_critic_trains_the_joint_loss"),
    mutant("ppo: the head of the critic starts at random", "ppo",
        "        nn.init.zeros_(self.weight)\n",
        "",
        "test_ppo.py::test_the_first_values_are_zero_and_so_the_critic_starts_neutral"),
    mutant("reward-model scoring ignores --system_prompt", "common",
        'rows = tokenize([Row("a prompt", prompt, None, {}) for prompt in prompts], args, tokenizer)',
        "own = type(args)(prompt_template=args.prompt_template)\n"
        '        rows = tokenize([Row("a prompt", prompt, None, {}) for prompt in prompts], own, tokenizer)',
        "test_whole_updates.py::test_ppo_with_a_reward_model"),
    mutant("reward-model scoring ignores --prompt_template", "common",
        'rows = tokenize([Row("a prompt", prompt, None, {}) for prompt in prompts], args, tokenizer)',
        "own = type(args)(system_prompt=args.system_prompt)\n"
        '        rows = tokenize([Row("a prompt", prompt, None, {}) for prompt in prompts], own, tokenizer)',
        "test_whole_updates.py::test_ppo_with_a_reward_model"),
    # --- dpo ---
    mutant("dpo: the reference is missing", "dpo",
        "chosen_ratio, rejected_ratio = chosen - ref_chosen, rejected - ref_rejected",
        "chosen_ratio, rejected_ratio = chosen, rejected",
        "test_dpo.py::test_oracle"),
    mutant("dpo: chosen and rejected are swapped", "dpo",
        "h = chosen_ratio - rejected_ratio",
        "h = rejected_ratio - chosen_ratio",
        "test_dpo.py::test_gradient_in_closed_form"),
    mutant("dpo: log-probs are means and not sums", "dpo",
        "chosen, rejected = logprobs.sum(dim=1).chunk(2)",
        'chosen, rejected = (logprobs.sum(dim=1) / batch["completion_mask"].sum(dim=1)).chunk(2)',
        "test_dpo.py::test_log_probs_are_sums_over_the_completion_with_its_eos"),
    mutant("dpo: label smoothing has the wrong sign", "dpo",
        "- smoothing * logsigmoid(-args.beta * h)  # Eq. 7",
        "+ smoothing * logsigmoid(-args.beta * h)  # Eq. 7",
        "test_dpo.py::test_oracle"),
    mutant("dpo: the robust loss is not divided", "dpo",
        "losses = losses / (1 - 2 * smoothing)",
        "losses = losses / 1",
        "test_dpo.py::test_oracle"),
    mutant("dpo: IPO aims at 1 / beta", "dpo",
        "(h - 1 / (2 * args.beta)).square()",
        "(h - 1 / args.beta).square()",
        "test_dpo.py::test_oracle"),
    mutant("dpo: per-token IPO divides both by one length", "dpo",
        "chosen_ratio / chosen_lengths, rejected_ratio / rejected_lengths",
        "chosen_ratio / chosen_lengths, rejected_ratio / chosen_lengths",
        "test_dpo.py::test_oracle"),
    mutant("dpo: nll_coef pushes the chosen completion down", "dpo",
        "losses - args.nll_coef * chosen / chosen_lengths",
        "losses + args.nll_coef * chosen / chosen_lengths",
        "test_dpo.py::test_a_literal_loop_over_pairs"),
    mutant("dpo: nll_coef is not normalised by length", "dpo",
        "losses - args.nll_coef * chosen / chosen_lengths",
        "losses - args.nll_coef * chosen",
        "test_dpo.py::test_a_literal_loop_over_pairs"),
    mutant("dpo: the logged rewards lack beta", "dpo",
        "args.beta * (chosen - ref_chosen), args.beta * (rejected - ref_rejected)",
        "chosen - ref_chosen, rejected - ref_rejected",
        "test_dpo.py::test_log_probs_are_sums_over_the_completion_with_its_eos"),
    mutant("pairs: the loss is the mean over the micro-batch", PAIRS,
        "loss = losses.sum() / args.pairs_per_step",
        "loss = losses.mean()",
        "test_pair_suite.py::test_gradient_is_invariant_to_micro_batches[6-dpo]"),
    mutant("dpo: log-probs are at the temperature of sampling", "dpo",
        "policy.temperature = 1.0",
        "policy.temperature = args.temperature",
        "test_dpo.py::test_the_temperature_is_that_of_sampling_alone"),
    mutant("dpo: truncated completions are in pairs", "dpo",
        "if not truncated[row]]",
        "]",
        "test_dpo.py::test_pairs_are_made_by_reward_and_never_of_cut_completions"),
    mutant("dpo: the worst completion is the chosen one", "dpo",
        "pair = Pair(prompt.ids, completions[best], completions[worst])",
        "pair = Pair(prompt.ids, completions[worst], completions[best])",
        "test_dpo.py::test_pairs_are_made_by_reward_and_never_of_cut_completions"),
    mutant("dpo: a step that the pairs do not fill is counted", "dpo",
        "- self.sampler.drawn) // self.args.pairs_per_step",
        "- self.sampler.drawn) // self.args.pairs_per_step + 1",
        "test_dpo.py::test_pairs_that_do_not_fill_a_step_are_left_for_the_next_pass"),
    mutant("dpo: every round draws the same prompts", "dpo",
        "sampler.draw(min(args.pair_prompts, len(train_prompts)))",
        "PromptSampler(len(train_prompts), args.seed).draw(min(args.pair_prompts, len(train_prompts)))",
        WHOLE_PAIRS),
    mutant("dpo: every round samples with the same seed", "dpo",
        "seed = stream_seed(args.seed, rank, number, 1)",
        "seed = stream_seed(args.seed, rank, 1, 1)",
        WHOLE_PAIRS),
    mutant("dpo: the optimizer is cleared each round", "dpo",
        "            current.begin(with_reference(accelerator, model, pairs, args), eval_pairs)\n",
        "            current.begin(with_reference(accelerator, model, pairs, args), eval_pairs)\n"
        "            optimizer.state.clear()\n",
        WHOLE_PAIRS),
    mutant("dpo: the reference is that of the first round", "dpo",
        "            current.begin(with_reference(accelerator, model, pairs, args), eval_pairs)\n",
        "            if number == 1:\n"
        "                import copy\n\n"
        "                first = copy.deepcopy(policy)\n"
        "            current.begin(with_reference(accelerator, first, pairs, args), eval_pairs)\n",
        "test_dpo.py::test_the_first_loss_of_each_round_is_ln_2"),
    # --- reward_model ---
    mutant("reward_model: chosen and rejected are swapped", "reward_model",
        "-logsigmoid(chosen_scores - rejected_scores)",
        "-logsigmoid(rejected_scores - chosen_scores)",
        "test_reward_model.py::test_oracle"),
    mutant("reward_model: the centre is that of the difference", "reward_model",
        "args.center_coef * (chosen_scores + rejected_scores).square()",
        "args.center_coef * (chosen_scores - rejected_scores).square()",
        "test_reward_model.py::test_center_coef_in_closed_form"),
    mutant("reward_model: a tie counts as wrong", "reward_model",
        "(margins.sign() + 1) / 2",
        "(margins > 0).double()",
        "test_reward_model.py::test_scores_start_equal_and_the_loss_at_ln_2"),
    mutant("reward_model: what stands beside the mask decides where the score is read", "reward_model",
        "ids = torch.where(mask, ids, self.pad_token)",
        "ids = ids + 0",
        "test_reward_model.py::test_a_score_depends_on_neither_padding_nor_its_neighbours"),
    mutant("the head of a reward model starts at random", "common",
        "nn.init.zeros_(lm.get_parameter(name))",
        "lm.get_parameter(name)",
        "test_reward_model.py::test_scores_start_equal_and_the_loss_at_ln_2"),
    # --- sampling ---
    mutant("the completion mask leaves the stop token out", "common",
        "stops_before = is_stop.cumsum(dim=1) - is_stop.long()",
        "stops_before = is_stop.cumsum(dim=1)",
        "test_masked.py::test_completion_mask_by_position"),
    mutant("the completion mask has one token after the stop token", "common",
        "return stops_before == 0,",
        "return stops_before - (is_stop.long().roll(1, dims=1)) <= 0,",
        "test_masked.py::test_completion_mask_by_position"),
    mutant("truncated is what does not stop with its last token", "common",
        "~is_stop.any(dim=1)",
        "~is_stop[:, -1]",
        "test_masked.py::test_completion_mask_by_position"),
    mutant("rollout: the top_k 50 of transformers", "common",
        "temperature=temperature, top_k=0, top_p=top_p",
        "temperature=temperature, top_k=50, top_p=top_p",
        "test_generation.py::test_more_than_fifty_tokens_can_be_sampled"),
    mutant("rollout: top_p is ignored", "common",
        "temperature=temperature, top_k=0, top_p=top_p",
        "temperature=temperature, top_k=0, top_p=1.0",
        "test_generation.py::test_top_p_reaches_the_loop"),
    mutant("rollout: the temperature is ignored", "common",
        "temperature=temperature, top_k=0, top_p=top_p",
        "temperature=1.0, top_k=0, top_p=top_p",
        "test_generation.py::test_rollout_logprobs_equal_the_training_forward[qwen2-0.6]"),
    mutant("rollout: one stop token of several", "common",
        "finished |= torch.isin(tokens[:, 0], stop_tokens)",
        "finished |= tokens[:, 0] == stop_tokens[0]",
        "test_generation.py::test_greedy_with_dropping_equals_stock_generate[qwen2]"),
    mutant("rollout: the seed is ignored", "common",
        "        torch.manual_seed(seed)\n",
        "",
        "test_generation.py::test_rollout_depends_on_its_seed_alone"),
    mutant("rollout: the training stream is disturbed", "common",
        'with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):',
        "with contextlib.nullcontext():",
        "test_generation.py::test_rollout_leaves_the_training_streams_untouched"),
    mutant("rollout: in training mode", SAMPLING,
        "    model.eval()  # generate() does not",
        "    # generate() does not",
        "test_generation.py::test_rollout_with_gradient_checkpointing_is_not_garbage"),
    mutant("rollout: the mode is not put back", SAMPLING,
        "    model.train(training)\n",
        "",
        "test_generation.py::test_rollout_with_gradient_checkpointing_is_not_garbage"),
    mutant("rollout: what does not fill a call is lost", SAMPLING,
        "for start in range(0, len(prompts), size):",
        "for start in range(0, len(prompts) - size + 1, size):",
        "test_generation.py::test_rollout_batch_size_caps_the_rows_of_a_call[shared]"),
    mutant("rollout: positions do not know of the padding", "common",
        "position_ids = (positions.cumsum(dim=1) - 1).clamp(min=0)",
        "position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)",
        "test_generation.py::test_rollout_logprobs_equal_the_training_forward[gpt2-1.0]"),
    mutant("rollout: the position stands still", "common",
        "        position_ids = position_ids + 1\n",
        "",
        "test_generation.py::test_greedy_with_dropping_equals_stock_generate[qwen2]"),
    mutant("the end of a turn is no stop token", "common",
        "{tokenizer.eos_token_id, end_of_turn(tokenizer), *configured}",
        "{tokenizer.eos_token_id, *configured}",
        "test_loading.py::test_stop_tokens"),
    # --- the forward ---
    mutant("log-probs are at temperature 1", "common",
        "logits = logits.float() if temperature == 1 else logits.float() / temperature",
        "logits = logits.float()",
        "test_masked.py::test_logprobs_and_entropy_equal_their_definitions"),
    mutant("entropy has the wrong sign", "common",
        "entropy = logsumexp - (logits.softmax(dim=-1) * logits).sum(dim=-1)",
        "entropy = (logits.softmax(dim=-1) * logits).sum(dim=-1) - logsumexp",
        "test_masked.py::test_logprobs_and_entropy_equal_their_definitions"),
    mutant("k1 has the wrong sign", "common",
        "        return -difference\n",
        "        return difference\n",
        "test_masked.py::test_kl_estimators_by_enumeration[k1]"),
    mutant("k3 is that of the other direction", "common",
        "return torch.expm1(difference) - difference",
        "return torch.expm1(-difference) + difference",
        "test_masked.py::test_kl_estimators_by_enumeration[k3]"),
    mutant("k2 is not halved", "common",
        "return difference.square() / 2",
        "return difference.square()",
        "test_masked.py::test_kl_estimators_by_enumeration[k2]"),
    mutant("the shift by one is forgotten", "common",
        "last_hidden_state[:, -before:-1]",
        "last_hidden_state[:, 1 - before :]",
        "test_policy.py::test_first_token_is_predicted_at_the_last_prompt_position"),
    mutant("positions do not know of the padding", "common",
        "return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)",
        "return torch.arange(attention_mask.shape[1]).expand(attention_mask.shape)",
        "test_policy.py::test_extra_padding_and_garbage_change_nothing"),
    mutant("a completion attends to the padding of its prompt", "common",
        'attention_mask = torch.cat([batch["prompt_mask"], mask], dim=1)  # (R, P + T)',
        'attention_mask = torch.cat([torch.ones_like(batch["prompt_mask"]), mask], dim=1)',
        "test_policy.py::test_extra_padding_and_garbage_change_nothing"),
    mutant("a shared prompt is that of the first row", "common",
        "owner = [index.index(i) for i in distinct], torch.tensor([distinct.index(i) for i in index])",
        "owner = [index.index(i) for i in distinct], torch.tensor([0 for i in index])",
        "test_shared_prompts.py::test_shared_prompts_give_the_plain_log_probs_and_gradients[True-qwen2]"),
    mutant("dropout stays on", "common",
        "            setattr(config, name, 0.0)\n",
        "            pass\n",
        "test_loading.py::test_dropout_of_a_checkpoint_is_switched_off"),
    mutant("model/ is in the dtype of training", "common",
        "x.to(policy.saved_dtype) if x.is_floating_point() else x",
        "x",
        "test_loading.py::test_model_is_saved_in_its_dtype_with_its_own_generation_config"),
    mutant("rows are cut at the wrong side", "common",
        "part[name] = tensor[:, -left:]",
        "part[name] = tensor[:, :left]",
        "test_batches.py::test_take_rows_cuts_shared_padding_and_keeps_every_token"),
    mutant("minibatches are taken in strides", "common",
        "cuts = [[[start + i for i in part] for part in cut] for start, cut in zip(starts, cuts, strict=True)]",
        "cuts = [[[i * len(starts) + j for i in part] for part in cut] for j, cut in enumerate(cuts)]",
        "test_suite.py::test_minibatches_are_equal_runs_of_whole_groups_in_draw_order[grpo]"),
    # --- data ---
    mutant("the order of the prompts is the same in each epoch", "common",
        "np.random.default_rng([self.seed, epoch]).permutation(self.n)",
        "np.random.default_rng(self.seed).permutation(self.n)",
        "test_data.py::test_each_epoch_is_another_permutation"),
    mutant("prompts are drawn with replacement", "common",
        "np.random.default_rng([self.seed, epoch]).permutation(self.n)",
        "np.random.default_rng([self.seed, epoch]).integers(self.n, size=self.n)",
        "test_data.py::test_each_epoch_is_another_permutation"),
    mutant("a resumed run draws from the beginning", "common",
        'self.drawn = state["drawn"]',
        "self.drawn = 0",
        "test_data.py::test_resume_continues_where_it_stopped"),
    mutant("the sampler is not in the checkpoint", "grpo dr_grpo dapo gspo",
        "run.keep(sampler=sampler)",
        "sampler",
        "test_suite.py::test_resume_equals_an_uninterrupted_run_bit_by_bit[grpo]"),
    mutant("held-out prompts are trained on", "common",
        "return [p for i, p in enumerate(prompts) if i not in held], [prompts[i] for i in sorted(held)]",
        "return prompts, [prompts[i] for i in sorted(held)]",
        "test_data.py::test_five_percent_are_held_out_by_seed"),
    mutant("prompts with another answer merge", "common",
        "key = prompt_key(prompt), answer",
        "key = prompt_key(prompt)",
        "test_data.py::test_rows_with_the_same_prompt_and_answer_merge"),
    mutant("the chat template does not open the answer", "common",
        "add_generation_prompt=not begun",
        "add_generation_prompt=False",
        "test_data.py::test_chat_template_opens_the_answer"),
    mutant("the prompt begins with BOS twice", "common",
        "if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:",
        "if False:",
        "test_data.py::test_one_bos_and_no_eos"),
    mutant("a pair that is too long loses the end of its prompt", "common",
        "prompt = pair.prompt[-max(1, room) :]",
        "prompt = pair.prompt[: max(1, room)]",
        "test_pairs.py::test_what_is_too_long_loses_its_prompt_first_and_never_eos"),
    mutant("a completion that is too long loses its EOS", "common",
        "[*ids[: most - 1], ids[-1]]",
        "ids[:most]",
        "test_pairs.py::test_what_is_too_long_loses_its_prompt_first_and_never_eos"),
    # --- rewards ---
    mutant("the first marker counts", "common",
        "for marker in reversed(list(MARKER.finditer(text))[-MAX_EMPTY:]):",
        "for marker in list(MARKER.finditer(text))[-MAX_EMPTY:]:",
        "test_answers.py::test_extraction"),
    mutant("half an answer of a truncated completion counts", "common",
        "if truncated and end is None and stop == len(text):",
        "if False:",
        "test_answers.py::test_truncated_completion"),
    mutant("accuracy does not know of truncation", "common",
        "predicted = extract_answer(completion, truncated)\n",
        "predicted = extract_answer(completion)\n",
        "test_rewards.py::test_weighted_sum_of_format_and_accuracy"),
    mutant("answers within the thinking count", "common",
        'text = text.rpartition("</think>")[2]',
        "text = text.strip()",
        "test_answers.py::test_extraction"),
    mutant("units are not compared", "common",
        " or (a.unit and b.unit and a.unit != b.unit)",
        "",
        "test_answers.py::test_different_answers_do_not_match"),
    mutant("lists compare in their order", "common",
        "tuple(sorted(parsed, key=lambda item: (item.kind, str(item.value))))",
        "tuple(parsed)",
        "test_answers.py::test_same_answers_match"),
    mutant("numbers compare as floats", "common",
        "    return a.value == b.value\n",
        '    return abs(a.value - b.value) < 1e-3 if a.kind == "number" else a.value == b.value\n',
        "test_answers.py::test_different_answers_do_not_match"),
    mutant("the weights of the rewards are ignored", "common",
        "reward.weight * parts[reward.name] for",
        "parts[reward.name] for",
        "test_rewards.py::test_weighted_sum_of_format_and_accuracy"),
    mutant("None is 0", "common",
        "    if value is None:\n        return math.nan\n",
        "    if value is None:\n        return 0.0\n",
        "test_rewards.py::test_none_is_nan_and_counts_as_nothing"),
    mutant("rewards are averaged and not added", "common",
        "return values.nansum(dim=0)",
        "return values.nanmean(dim=0)",
        "test_rewards.py::test_weighted_sum_of_format_and_accuracy"),
    mutant("what math_verify accepts is not correct", "common",
        'for name in ("math_verify", "accuracy") if',
        'for name in ("accuracy", "math_verify") if',
        "test_rewards.py::test_correctness_whatever_the_rewards_are"),
    # --- metrics ---
    mutant("metrics are those of the first process", "common",
        'pairs = accelerator.reduce(pairs, "sum").tolist()',
        "pairs = pairs.tolist()",
        "test_dapo.py::test_exactly_the_groups_that_are_neither_all_right_nor_all_wrong_are_kept[accuracy-2]"),
    mutant("a maximum is that of the last micro-batch", "common",
        "torch.maximum(self.maxima[name], value) if name in self.maxima else value",
        "value",
        "test_metrics.py::test_metrics_equal_their_definitions_over_several_calls"),
    mutant("a deviation is a variance", "common",
        'max(0.0, means[name, "square"] - mean**2) ** 0.5',
        'max(0.0, means[name, "square"] - mean**2)',
        "test_metrics.py::test_metrics_equal_their_definitions_over_several_calls"),
    mutant("a metric counts what lies beside the mask", "common",
        "self.add_ratio(name, torch.where(mask, values, 0).sum(), mask.sum())",
        "self.add_ratio(name, torch.where(mask, values, 0).sum(), mask.numel())",
        "test_metrics.py::test_metrics_equal_their_definitions_over_several_calls"),
    mutant("the lengths of right and wrong completions are swapped", "common",
        'metrics.add("completion/length_correct", lengths, right == 1)',
        'metrics.add("completion/length_correct", lengths, right == 0)',
        "test_metrics.py::test_the_metrics_of_a_rollout_by_hand"),
    mutant("completion/unique counts over all prompts", "common",
        "len(set(rows[start : start + group_size])) / group_size",
        "len(set(rows)) / group_size",
        "test_metrics.py::test_the_metrics_of_a_rollout_by_hand"),
    mutant("advantage/zero_groups counts the others", "common",
        'metrics.add("advantage/zero_groups", agree(',
        'metrics.add("advantage/zero_groups", ~agree(',
        "test_metrics.py::test_the_metrics_of_a_rollout_by_hand"),
    # --- checkpoints ---
    mutant("a resumed run repeats the last step's rows", "common",
        'json.loads(text)["step"] > step',
        'json.loads(text)["step"] > step + 1',
        "test_checkpoints.py::test_what_was_logged_after_the_checkpoint_is_cut"),
    mutant("the newest checkpoints are deleted", "common",
        "[: -self.args.keep_checkpoints]",
        "[self.args.keep_checkpoints :]",
        "test_checkpoints.py::test_old_checkpoints_are_pruned"),
    mutant("other options are accepted on a resume", "common",
        "        if differing:\n",
        "        if not differing:\n",
        "test_checkpoints.py::test_resume_with_other_options_names_them"),
    mutant("an evaluation is skipped at the end", "common",
        "return (at_end and self.step >= self.args.max_steps) or (every > 0 and self.step % every == 0)",
        "return every > 0 and self.step % every == 0",
        "test_run.py::test_an_evaluation_is_due_at_the_end"),
]
# fmt: on


# --- the table is checked ---


@functools.cache
def read(path):
    return path.read_text(encoding="utf-8")


def places(mutant):
    """Where its old text stands, {path relative to the project: how often}; `common` is any file below common/."""
    counts = {}
    for name in mutant.files.split():
        paths = sorted((ROOT / "common").rglob("*.py")) if name == "common" else [ROOT / f"{name}.py"]
        found = {path: read(path).count(mutant.old) for path in paths}
        counts |= {path: count for path, count in found.items() if count or name != "common"}
    return {str(path.relative_to(ROOT)): count for path, count in counts.items()}


def problems(mutants):
    """What is wrong with the rows of the table, a line each."""
    lines, names = [], set()
    for mutant in mutants:
        found = places(mutant)
        if mutant.name in names:
            lines.append(f"{mutant.name}: two rows have this name")
        names.add(mutant.name)
        if not found or set(found.values()) != {1}:
            lines.append(f"{mutant.name}: the old text must stand once in {mutant.files}, found {found or 'nowhere'}")
        if bool(mutant.tests) == bool(mutant.equivalent):
            lines.append(f"{mutant.name}: name the tests that kill it, or why nothing can")
        for test in mutant.tests:
            file, _, function = test.partition("::")
            path = ROOT / "tests" / file
            if file in TEXT_TESTS or not path.is_file() or f"\ndef {function.split('[')[0]}(" not in read(path):
                lines.append(f"{mutant.name}: no test {test} that may kill it")
    return lines


def edits(mutant):
    """{path: mutated text}."""
    return {path: read(ROOT / path).replace(mutant.old, mutant.new) for path in places(mutant)}


# --- the mutants are run ---


class Failures:
    """A plugin of pytest that keeps (test, first line of the reason) of what failed."""

    def __init__(self):
        self.found = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = (crash.message if crash else str(report.longrepr)).strip().splitlines()
            self.found.append((report.nodeid.removeprefix("tests/"), (reason or ["?"])[0]))


def run_tests(tree, tests, options, result):
    """In a process of its own, forked from one that has imported torch: pytest's exit code and its failures."""
    import pytest

    os.setsid()  # with the processes that the tests start it is one group, which `Task.end` ends
    sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() not in (ROOT, ROOT / "tests")]
    os.chdir(tree)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    failures = Failures()
    tests = [f"tests/{test}" for test in tests]
    code = pytest.main([*tests, "-q", "-p", "no:cacheprovider", *options], plugins=[failures])
    result.send((int(code), failures.found))


class Task:
    """The tests of one mutant, or of no mutant, in a tree of their own."""

    def __init__(self, name, tests, texts, options=("-x",)):
        self.name, self.tests, self.texts, self.options = name, tests, texts, options
        self.limit = TIMEOUT * len(tests)

    def start(self, tree):
        self.tree, self.started = tree, time.perf_counter()
        self.originals = {path: (tree / path).read_text() for path in self.texts}
        for path, text in self.texts.items():
            (tree / path).write_text(text)
        self.result, sender = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=run_tests, args=(tree, self.tests, self.options, sender))
        self.process.start()
        sender.close()

    def end(self):
        """(exit code of pytest or None, failures, seconds); the tree is as before."""
        seconds = time.perf_counter() - self.started
        try:
            code, failures = self.result.recv() if self.result.poll() else (None, [("", f"no end in {self.limit} s")])
        except EOFError:
            code, failures = -1, [("", "the process died")]
        with contextlib.suppress(ProcessLookupError):  # what the tests may have left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        for path, text in self.originals.items():
            (self.tree / path).write_text(text)
        return code, failures, seconds


def run(tasks, jobs):
    """Yield each task as it ends, with what `Task.end` returns; `jobs` at a time, each in a copy of the project."""
    with tempfile.TemporaryDirectory() as folder:
        free, waiting, running = [], collections.deque(tasks), []
        for i in range(jobs):
            free.append(pathlib.Path(folder) / str(i) / "project")
            shutil.copytree(ROOT, free[-1], ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        while waiting or running:
            while waiting and free:
                running.append(waiting.popleft())
                running[-1].start(free.pop())
            ready = multiprocessing.connection.wait([task.result for task in running], timeout=1)
            for task in list(running):
                if task.result in ready or time.perf_counter() - task.started > task.limit:
                    running.remove(task)
                    yield task, *task.end()
                    free.append(task.tree)


def verdict(code, failures):
    """killed: a test failed; survived; broken: what ran was not the mutant, so nothing is known of it."""
    if code == 0:
        return "survived", ""
    test, reason = failures[0] if failures else ("", f"pytest ended with {code}")
    killed = code in (None, 1) and not reason.startswith(("NameError", "SyntaxError", "UnboundLocalError"))
    return "killed" if killed else "broken", f"{test}: {reason}" if test else reason


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants whose name holds one of these texts")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.names or any(name in m.name for name in args.names)]
    if lines := problems(chosen) if chosen else ["no mutant has such a name"]:
        print(*lines, sep="\n")
        return 2
    import accelerate  # noqa: F401 the processes below are forked from here: they need not import it again
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    mutants = [mutant for mutant in chosen if not mutant.equivalent]
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = [list(group) for _, group in itertools.groupby(tests, key=lambda test: test.partition("::")[0])]
    print(f"{len(tests)} tests without any mutant", flush=True)
    failing = []
    for _, code, failures, _ in run([Task("", group, {}, ()) for group in files], args.jobs):
        failing += [f"{test}: {reason}" for test, reason in failures] or [f"pytest ended with {code}"] * (code != 0)
    if failing:
        print("they must pass before they can kill anything:", *failing, sep="\n")
        return 2
    left = []
    for task, code, failures, seconds in run([Task(m.name, m.tests, edits(m)) for m in mutants], args.jobs):
        word, why = verdict(code, failures)
        print(f"{word:8} {seconds:6.1f} s  {task.name}" + (f"  ({why[:160]})" if why else ""), flush=True)
        if word != "killed":
            left.append(f"{word}: {task.name}")
    for mutant in chosen:
        if mutant.equivalent:
            print(f"equivalent         {mutant.name}  ({mutant.equivalent})")
    print(f"{len(mutants) - len(left)} of {len(mutants)} killed", *sorted(left), sep="\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
