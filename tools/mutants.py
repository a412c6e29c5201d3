"""Bugs that people write, one at a time: does the test that is named for each of them fail?

    python tools/mutants.py [WORD ...]      all rows, or those whose name contains one of the words

Run it by hand after a change of the algorithms. The first rows are the bugs of docs/exercises.md;
each of the others puts one piece of code in the place of another, which must be in its file exactly
once. The rows run in a copy of the project, after their tests have passed without any bug. A bug
whose test passes as well survives: the test is missing.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples")]

import recipes  # noqa: E402

from piped import end_with_the_reader  # noqa: E402

WHOLE = "test_whole_updates.py::test_group_relative[grpo-GRPO-]"
SPLIT = (
    "test_invariances.py::test_gradient_is_invariant_to_micro_batches[{{'micro_batch_size': 5}}-{}]"
)
PAIR_SPLIT = "test_invariances.py::test_gradient_of_pairs_is_invariant_to_micro_batches[6-{}]"
PROCESSES = "test_invariances.py::test_gradient_is_invariant_to_processes[{}]"
VECTORS = "test_vectors.py::test_a_script_computes_what_the_cases_say[{}-float64]"
SEEDS = "test_suite.py::test_each_step_and_process_samples_with_a_seed_of_its_own[grpo]"
TWO = "test_launch.py::test_two_processes_take_the_same_step_as_one[{}]"
DAPO = "test_whole_updates.py::test_group_relative[dapo-DAPO-]"

BUGS = [  # of examples/bugs: (name, script, test)
    (
        "zero_grad",
        "grpo.py",
        "test_suite.py::test_minibatches_are_equal_runs_of_whole_groups_in_draw_order[grpo]",
    ),
    ("temperature", "grpo.py", WHOLE),
    ("order", "grpo.py", "test_grpo.py::test_each_group_has_its_own_mean_and_deviation"),
    ("old_logprobs", "grpo.py", WHOLE),
    ("eos", "grpo.py", WHOLE),
    ("kl_sign", "grpo.py", VECTORS.format("grpo")),
    ("micro_batches", "ppo.py", SPLIT.format("ppo")),
    ("batch", "grpo.py", "test_grpo.py::test_groups_are_adjacent_rows"),
    ("padding", "grpo.py", WHOLE),
]

MUTANTS = [  # (what is wrong, file, code, code with the bug, test)
    # The tenth bug of the exercises. Its test looks at what `main` asks of `rollout`.
    ("exercises: top_p", "grpo.py",
     "args.temperature, top_p=1.0, seed", "args.temperature, top_p=0.9, seed",
     SEEDS),
    # --- advantages ---
    ("the standard deviation has ddof 0", "grpo.py",
     "groups.std(dim=1, keepdim=True)", "groups.std(dim=1, keepdim=True, correction=0)",
     VECTORS.format("grpo")),
    ("the standard deviation is that of the batch", "grpo.py",
     "(groups.std(dim=1, keepdim=True) + args.std_eps)", "(groups.std() + args.std_eps)",
     "test_grpo.py::test_each_group_has_its_own_mean_and_deviation"),
    ("the mean is that of the batch", "dr_grpo.py",
     "groups - groups.mean(dim=1, keepdim=True)", "groups - groups.mean()",
     "test_whole_updates.py::test_group_relative[dr_grpo-DrGRPO-]"),
    ("a group that agrees is divided by its rounding", "grpo.py",
     "advantages.masked_fill(all_equal(groups), 0)", "advantages",
     "test_grpo.py::test_a_group_that_agrees_has_advantage_exactly_zero"),
    ("a row without a reward has the reward 0", "common/rewards.py",
     "torch.where(groups.isnan(), groups.nanmean(dim=1, keepdim=True), groups)", "groups.nan_to_num()",
     "test_rewards.py::test_a_row_without_a_reward_gets_the_mean_of_its_group"),
    ("rows of one prompt are taken to lie a stride apart", "gspo.py",
     "view(-1, args.group_size)", "view(args.group_size, -1).T",
     "test_whole_updates.py::test_group_relative[gspo-GSPO-]"),
    # --- ratio and clip ---
    ("the loss has the wrong sign", "grpo.py",
     "losses = -objective", "losses = objective",
     VECTORS.format("grpo")),
    ("the bounds of the clip are swapped", "grpo.py",
     "clamp(1 - args.clip_low, 1 + args.clip_high)", "clamp(1 - args.clip_high, 1 + args.clip_low)",
     "test_grpo.py::test_clip_table"),
    ("the clip is symmetric", "dapo.py",
     "clamp(1 - args.clip_low, 1 + args.clip_high)", "clamp(1 - args.clip_low, 1 + args.clip_low)",
     VECTORS.format("dapo")),
    ("the larger of the two objectives", "grpo.py",
     "torch.minimum(ratio * advantages,", "torch.maximum(ratio * advantages,",
     "test_grpo.py::test_clip_table"),
    ("the clipped objective without the minimum", "grpo.py",
     "torch.minimum(ratio * advantages, clipped * advantages)", "clipped * advantages",
     "test_grpo.py::test_clip_table"),
    ("dual clip acts on positive advantages too", "grpo.py",
     "torch.where(advantages < 0, bounded, objective)", "torch.where(advantages < 9, bounded, objective)",
     "test_grpo.py::test_clip_table"),
    ("the ratio is detached", "gspo.py",
     "log_s.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "log_s.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)",
     VECTORS.format("gspo")),
    ("a sequence's ratio is the sum of the logs", "gspo.py",
     "log_ratios.sum(dim=1, keepdim=True) / lengths", "log_ratios.sum(dim=1, keepdim=True)",
     VECTORS.format("gspo")),
    ("a sequence's ratio divides by the padded length", "gspo.py",
     "log_ratios.sum(dim=1, keepdim=True) / lengths", "log_ratios.mean(dim=1, keepdim=True)",
     VECTORS.format("gspo")),
    ("the dynamic clip has no upper bound", "dcpo.py",
     "high.clamp(max=args.max_ratio)", "high",
     "test_dcpo.py::test_clip_table"),
    ("the old log-probs have a gradient", "grpo.py",
     'micro.get("old_logprobs", logprobs.detach())', 'micro.get("old_logprobs", logprobs)',
     "test_suite.py::test_zero_advantages_move_nothing[grpo]"),
    ("several epochs have no old log-probs", "grpo.py",
     "args.num_epochs * args.num_minibatches > 1", "args.num_minibatches > 1",
     "test_grpo.py::test_the_old_log_probs_are_kept_over_epochs_of_one_minibatch"),
    ("the mask comes after the exp", "grpo.py",
     "log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)", "logprobs - old_logprobs",
     "test_grpo.py::test_garbage_under_the_mask_changes_nothing[grpo-{}]"),
    # --- KL and entropy ---
    ("the KL has its arguments swapped", "grpo.py",
     "kl_estimate(logprobs, ref_logprobs,", "kl_estimate(ref_logprobs, logprobs,",
     VECTORS.format("grpo")),
    ("the KL is against the old policy", "grpo.py",
     "kl_estimate(logprobs, ref_logprobs,", "kl_estimate(logprobs, old_logprobs,",
     VECTORS.format("grpo")),
    ("the KL has no gradient", "grpo.py",
     "losses + args.kl_coef * kl", "losses + args.kl_coef * kl.detach()",
     VECTORS.format("grpo")),
    ("the reference is the policy", "grpo.py",
     "= reference(micro,", "= model(micro,",
     WHOLE),
    ("the entropy bonus punishes entropy", "grpo.py",
     "losses - args.entropy_coef * entropy", "losses + args.entropy_coef * entropy",
     WHOLE),
    ("logits are divided by the temperature in bfloat16", "common/masked.py",
     "    logits = logits.float()\n    if temperature != 1:\n        logits = logits / temperature\n",
     "    if temperature != 1:\n        logits = logits / temperature\n    logits = logits.float()\n",
     "test_masked.py::test_logprobs_and_entropy_equal_their_definitions[0.6-dtype1]"),
    # --- masks and weights ---
    ("the stop token is no part of a completion", "common/masked.py",
     "is_stop.cumsum(dim=1) - is_stop.long()", "is_stop.cumsum(dim=1)",
     "test_masked.py::test_completion_mask_equals_a_loop_over_random_tables"),
    ("what stops before the last column is truncated", "common/masked.py",
     "~is_stop.any(dim=1)", "~is_stop[:, -1]",
     "test_masked.py::test_completion_mask_equals_a_loop_over_random_tables"),
    ("the loss stands beside the mask", "grpo.py",
     "torch.where(loss_mask, losses, 0)", "losses",
     "test_grpo.py::test_garbage_under_the_mask_changes_nothing[grpo-{}]"),
    ("rows are those of the micro-batch", "grpo.py",
     '/ lengths / totals["rows"]', "/ lengths / len(loss_mask)",
     SPLIT.format("grpo")),
    ("tokens are those of the micro-batch", "dapo.py",
     '/ totals["tokens"]', "/ loss_mask.sum()",
     SPLIT.format("dapo")),
    ("the length is the padded one", "grpo.py",
     "/ lengths /", "/ loss_mask.shape[1] /",
     VECTORS.format("grpo")),
    ("the constant is the width of the tensor", "dr_grpo.py",
     "/ args.max_new_tokens /", "/ loss_mask.shape[1] /",
     VECTORS.format("dr_grpo")),
    ("the loss is a mean over micro-batches", "grpo.py",
     "backward(loss *", "backward(loss / len(micro_batches) *",
     SPLIT.format("grpo")),
    ("a truncated completion keeps its reward", "dr_grpo.py",
     "part.masked_fill(truncated, 0)", "part",
     "test_dr_grpo.py::test_a_truncated_completion_scores_0_whatever_its_parts"),
    ("groups that are all right are kept", "dapo.py",
     "informative = ~all_equal(rewards.view(-1, args.group_size))[:, 0]",
     "informative = (rewards.view(-1, args.group_size) > 0).any(dim=1)",
     "test_dapo.py::test_each_process_fills_its_share_with_the_groups_that_are_neither_all_right_nor_all_wrong[1]"),
    ("the overlong penalty begins at the limit", "dapo.py",
     "start = args.max_new_tokens - args.overlong_cache", "start = args.max_new_tokens",
     VECTORS.format("dapo")),
    # --- numbers of the rows that happen to share a forward, or a process ---
    ("the clip is as wide as the micro-batch has rows", "grpo.py",
     "    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)",
     "    width = len(loss_mask) / 8\n"
     "    clipped = ratio.clamp(1 - args.clip_low * width, 1 + args.clip_high * width)",
     SPLIT.format("grpo")),
    ("only the tokens of the micro-batch with the highest entropy are in the loss", "grpo.py",
     "    return torch.where(loss_mask, losses, 0), stats",
     "    is_open = entropy >= entropy[loss_mask].quantile(0.8)\n"
     "    return torch.where(loss_mask & is_open, losses, 0), stats",
     SPLIT.format("grpo")),
    ("each process takes its own unlikely tokens into the loss", "grpo.py",
     "    for micro_batches in minibatches * args.num_epochs:",
     "    own = [micro for micro_batches in minibatches for micro in micro_batches]\n"
     "    likely = torch.cat([micro['old_logprobs'][micro['loss_mask']] for micro in own]).quantile(0.8)\n"
     "    for micro in own:\n"
     "        micro['advantages'] = micro['advantages'] * (micro['old_logprobs'] < likely)\n"
     "    for micro_batches in minibatches * args.num_epochs:",
     PROCESSES.format("grpo")),
    ("margins are centred in the micro-batch", "dpo.py",
     "    smoothing = args.label_smoothing\n", "    smoothing = args.label_smoothing\n    h = h - h.mean()\n",
     PAIR_SPLIT.format("dpo")),
    ("scores are centred in the micro-batch", "reward_model.py",
     "args.center_coef * (chosen + rejected).square()", "0.1 * (chosen.mean() + rejected.mean()).square()",
     PAIR_SPLIT.format("reward_model")),
    # --- ppo ---
    ("GAE has the value of the next token, off by one", "ppo.py",
     "gamma * next_value - values[:, t]", "gamma * next_value - values[:, t - 1]",
     VECTORS.format("ppo")),
    ("GAE does not discount the next value", "ppo.py",
     "gamma * next_value", "next_value",
     "test_ppo.py::test_gae_equals_its_definition_on_ragged_rows"),
    ("padding takes part in GAE", "ppo.py",
     "torch.where(mask[:, t], values[:, t], next_value)", "values[:, t]",
     "test_ppo.py::test_gae_equals_its_definition_on_ragged_rows"),
    ("the value clip takes the smaller error", "ppo.py",
     "torch.maximum(errors, clipped_errors)", "torch.minimum(errors, clipped_errors)",
     VECTORS.format("ppo")),
    ("values are clipped around the returns", "ppo.py",
     "clamp(old_values - args.value_clip, old_values", "clamp(returns - args.value_clip, returns",
     VECTORS.format("ppo")),
    ("each process whitens its own tokens", "ppo.py",
     "moments(advantages, 1, accelerator.reduce)", "moments(advantages, 1, lambda sums: sums)",
     TWO.format("ppo")),
    ("the KL in the reward pays for divergence", "ppo.py",
     "else -kl_coef * kl", "else kl_coef * kl",
     VECTORS.format("ppo")),
    # --- pairs ---
    ("chosen and rejected are swapped", "dpo.py",
     "(chosen - ref_chosen) - (rejected - ref_rejected)", "(rejected - ref_rejected) - (chosen - ref_chosen)",
     "test_dpo.py::test_gradient_in_closed_form"),
    ("the reference of what was rejected is missing", "dpo.py",
     "- (rejected - ref_rejected)", "- rejected",
     VECTORS.format("dpo")),
    ("the log-prob of a completion is a mean", "dpo.py",
     "chosen, rejected = logprobs.sum(dim=1)", "chosen, rejected = logprobs.mean(dim=1)",
     "test_dpo.py::test_losses_and_metrics_of_pairs_are_those_of_sums_over_the_completion_with_its_eos[dpo]"),
    ("IPO aims at 1 / beta", "dpo.py",
     "1 / (2 * args.beta)", "1 / args.beta",
     VECTORS.format("dpo")),
    ("truncated completions are in pairs", "dpo.py",
     "[row for row in rows if not texts[row].truncated]", "list(rows)",
     "test_dpo.py::test_pairs_are_made_by_reward_and_never_of_cut_completions"),
    ("a reward model prefers what was rejected", "reward_model.py",
     "logsigmoid(chosen - rejected)", "logsigmoid(rejected - chosen)",
     VECTORS.format("reward_model")),
    # --- sampling, steps and processes ---
    ("top-k 50, the default of transformers, is on", "common/sampling.py",
     "top_k=0", "top_k=50",
     "test_generation.py::test_more_than_fifty_tokens_can_be_sampled"),
    ("the seed of a rollout is ignored", "common/sampling.py",
     "torch.manual_seed(int(number))", "int(number)",
     "test_generation.py::test_rollout_depends_on_its_seed_alone"),
    ("each step samples with the same seed", "grpo.py",
     "seed=(args.seed, rank, step)", "seed=(args.seed, rank, 1)",
     SEEDS),
    ("each process samples with the same seed", "grpo.py",
     "seed=(args.seed, rank, step)", "seed=(args.seed, 0, step)",
     SEEDS),
    ("each process draws the same prompts", "grpo.py",
     "(train_prompts, args.seed, rank, processes)", "(train_prompts, args.seed, 0, processes)",
     "test_launch.py::test_two_processes_share_the_prompts_and_sample_different_completions"),
    ("the gradient is a mean over processes", "grpo.py",
     "backward(loss * accelerator.num_processes)", "backward(loss)",
     TWO.format("grpo")),
    ("the tokens of a step are those of one process", "common/batches.py",
     "int(counts[:, 0].sum())", "int(counts[0, 0])",
     TWO.format("dapo")),
    ("the learning rate is never set", "grpo.py",
     'group["lr"] = lr', 'group["rate"] = lr',
     "test_suite.py::test_the_optimizer_has_the_options_and_the_rate_of_each_step[grpo]"),
    ("gradients are not clipped", "grpo.py",
     "model.parameters(), args.max_grad_norm)", "model.parameters(), 0.0)",
     WHOLE),
    ("a resumed run draws from the beginning", "common/data.py",
     'self.drawn = state["drawn"]', "self.drawn = 0",
     "test_data.py::test_resume_continues_where_it_stopped"),
    ("the order of the data is not in the checkpoint", "grpo.py",
     "sampler=sampler)  #", ")  #",
     "test_suite.py::test_resume_equals_an_uninterrupted_run_bit_by_bit[grpo]"),
    ("pass@1 is the best of the samples", "common/evaluation.py",
     '"eval/pass@1", correct.mean(dim=1)', '"eval/pass@1", correct.amax(dim=1)',
     "test_evaluation.py::test_an_evaluation_by_hand"),
    ("pass@k is biased", "common/masked.py",
     "1 - chances_of_wrong.prod(dim=1)", "1 - (wrong[:, 0] / n) ** k",
     "test_masked.py::test_pass_at_k_equals_its_definition"),
]  # fmt: skip


def rows():
    """All bugs: (what is wrong, file, its text with the bug, test).

    The text is None if the code does not stand in the file once.
    """
    for name, script, test in BUGS:
        patch = recipes.files()[name].read_text(encoding="utf-8")
        source = (ROOT / script).read_text(encoding="utf-8")
        try:
            text = recipes.put(patch, source, pathlib.Path(script).stem)
        except ValueError:
            text = None
        yield f"exercises: {name}", script, text, test
    for name, file, old, new, test in MUTANTS:
        source = (ROOT / file).read_text(encoding="utf-8")
        yield name, file, source.replace(old, new) if source.count(old) == 1 else None, test


def run_tests(project, *tests):
    """The exit code of pytest, and what it printed."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    # A bug of the same second and size as the one before would run from the cache of that one.
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, encoding="utf-8"
    )
    return done.returncode, done.stdout + done.stderr


def verdict(code, output):
    """`killed`: the test failed; `survived`; `broken`: what ran was not the bug: mend the row."""
    if code == 0:
        return "survived"
    misspelt = any(
        f"E   {error}" in output for error in ("NameError", "SyntaxError", "ImportError")
    )
    return "killed" if code == 1 and not misspelt else "broken"


def main(words):
    chosen = [row for row in rows() if not words or any(word in row[0] for word in words)]
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs")
    with tempfile.TemporaryDirectory() as folder:
        project = pathlib.Path(
            shutil.copytree(ROOT, pathlib.Path(folder) / "project", ignore=ignored)
        )
        code, output = run_tests(project, *sorted({test for *_, test in chosen}))
        if code:
            print("these tests must pass before they can fail on a bug:", output[-3000:], sep="\n")
            return 2
        left = 0
        for name, file, text, test in chosen:
            if text is None:
                found = "not found once"
            else:
                healthy = (project / file).read_text(encoding="utf-8")
                (project / file).write_text(text, encoding="utf-8", newline="\n")
                found = verdict(*run_tests(project, test))
                (project / file).write_text(healthy, encoding="utf-8", newline="\n")
            print(f"{found}: {name} ({file}, {test})", flush=True)
            left += found != "killed"
    print(f"{len(chosen) - left} of {len(chosen)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main(sys.argv[1:]))
