"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476, Eq. 7-13, Algorithm 1).

GRPO for long reasoning, without a reference model. For each prompt with gold answer a, sample a group of G completions
o_1..o_G and maximize, with the token ratio r_it = pi(o_it) / pi_old(o_it),

    J = E[ 1/sum_i |o_i| sum_i sum_t min(r_it A_i, clip(r_it, 1-eps_low, 1+eps_high) A_i) ]                       Eq. 8
        over prompts with 0 < #{i: o_i is correct} < G                                                  Eq. 8, Eq. 11
    A_i = (R_i - mean(R)) / std(R)                                                                                Eq. 9
    R_i = (1 if o_i is correct, else -1) + R_length(|o_i|)                                                 Eq. 7, Eq. 13

Against grpo.py: eps_high 0.28 is larger than eps_low 0.2, so that unlikely tokens can become likely and entropy lasts
(clip-higher). `dynamic_batch` drops groups that are all right or all wrong (their gradient is 0 or of length alone) and
samples until the batch is full. `token_weights` gives every token one weight, so a completion counts by its length.
`overlong_penalty` lowers the reward of completions close to the limit; `--overlong filter` takes the truncated ones out
of the loss instead. Accuracy is +1 or -1, there is no KL, and evaluation samples with top-p 0.7. A rollout has several
updates: with one, the ratio is 1 and nothing is clipped.

Deviations from the paper: the token mean is that of the optimizer step, as in verl 0.9.0 (--token_mean group is Eq. 8
as printed); filter and penalty exclude each other (Table 1 stacks them); what is sampled beyond a full batch is
discarded; sampling ends after max_sampling_rounds rounds; --filter_by reward is for tasks without gold answers.
Standard deviation and log-ratios are those of grpo.py. Sizes, rates and overlong_cache are presets for the small model,
warm-up (paper: 20 steps) is off.

Left out: the rewriting of the data's answers into integers (section 3.5), which is done once, before any training.

    accelerate launch dapo.py                              a small embedded model learns to think; nothing is downloaded
    accelerate launch --mixed_precision bf16 dapo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset openai/gsm8k --dataset_config main --learning_rate 1e-6 --max_new_tokens 512 --overlong_cache 128 \\
        --micro_batch_size 8 --generate_batch_size 256 --eval_prompts 200             # 22 GiB of a GPU, by --dry_run

docs/dapo.md has usage, results, and the details of the implementation one by one.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from accelerate.utils import gather_object

from common.batches import completion_texts, left_pad, pack_group, rollout_batch, split_rollout, unpack_groups
from common.errors import InputError, clean_exit
from common.generation import decode, eval_mode, sampling_config, seeded
from common.harness.args import RolloutArgs, learning_rate, option
from common.harness.command_line import parse_args
from common.harness.data import DataDigest, PromptSampler, load_prompts
from common.harness.distributed import clip_grad_norm, gradient_sync, launch, unsharded
from common.harness.evaluation import evaluate
from common.harness.loading import load_policy, load_reference, load_tokenizer
from common.harness.metrics import Metrics
from common.harness.run import Run
from common.masked import MAX_LOG_RATIO, group_statistics, kl_estimate, log_ratio
from common.rewards import check_signatures, deciding_part, load_rewards, score_rewards, weighted_sum


@dataclass
class Args(RolloutArgs):  # the options that no algorithm changes are declared there, once for all scripts
    # After 20 steps most groups have only right answers, and sampling would take most of the time.
    max_steps: int = option(20, "rollouts with their updates; 0 only evaluates", "run", ge=0)
    eval_top_p: float = option(0.7, "top-p of the evaluation's sampling (DAPO: 0.7)", "evaluation", gt=0, le=1)

    prompts_per_step: int = option(
        32, "prompts in a sampling round, and in the batch to train on (DAPO: 512)", "batch", gt=0
    )
    group_size: int = option(8, "completions per prompt, G (DAPO: 16)", "batch", gt=0)
    num_epochs: int = option(1, "passes over a rollout (DAPO's mu: 1)", "batch", gt=0)
    # With one update a rollout the ratio would be 1 and the clip would never act.
    num_minibatches: int = option(4, "optimizer steps in a pass (DAPO: 16)", "batch", gt=0)
    micro_batch_size: int = option(
        64, "completions in one forward pass of a process; does not change the gradient", "batch", gt=0
    )
    micro_batch_tokens: int = option(
        0, "tokens in one forward pass, padding included; replaces --micro_batch_size (0: off)", "batch", ge=0
    )

    temperature: float = option(1.0, "temperature of sampling and of the log-probs in the loss", "sampling", gt=0)
    max_new_tokens: int = option(64, "maximum tokens in a completion, including its stop token", "sampling", gt=0)

    learning_rate: float = option(1e-4, "peak learning rate (DAPO 32B: 1e-6)", "optimizer", gt=0)
    # This is the default of all scripts, with the paper's value in the help.
    warmup_steps: int = option(0, "steps of linear warm-up (DAPO: 20)", "optimizer", ge=0)

    clip_low: float = option(0.2, "the ratio is clipped at 1 - this where A < 0 (DAPO: 0.2)", gt=0, le=1)
    # Clip-higher: an unlikely token has more room to grow than to shrink, so that entropy lasts
    # (Section 3.1).
    clip_high: float = option(0.28, "the ratio is clipped at 1 + this where A > 0 (DAPO: 0.28)", gt=0)
    dual_clip: float = option(0.0, "upper bound c > 1 of the ratio where A < 0 (0: off; verl's recipe: 10)", ge=0)
    # No KL: a policy that learns to reason at length has to leave its start (Section 2.3).
    kl_coef: float = option(0.0, "beta of the KL to the reference in the loss (0: no reference is loaded)", ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = option(
        "k3", "gradient in a loss: k1 only noise, k2 of KL(pi||ref), k3 of KL(ref||pi), k3_weighted r times k2's (TRL)"
    )
    entropy_coef: float = option(0.0, "weight of an entropy bonus", ge=0)
    normalize_std: bool = option(True, "divide advantages by the group's standard deviation (Dr. GRPO: no)")
    std_ddof: Literal[0, 1] = option(1, "ddof of that standard deviation (verl, TRL: 1; numpy: 0)")
    std_eps: float = option(1e-6, "added to that standard deviation (verl: 1e-6, TRL: 1e-4)", ge=0)
    overlong: Literal["none", "filter", "soft"] = option(
        "soft", "filter: truncated completions are left out of the loss; soft: the reward falls near the limit (Eq. 13)"
    )
    overlong_cache: int = option(16, "soft: it falls by 1 over the last tokens, this many (DAPO: 4096 of 20480)")
    max_sampling_rounds: int = option(
        10, "maximum sampling rounds to fill a batch, of --prompts_per_step prompts each (verl's recipe: 10)", gt=0
    )
    on_reject: Literal["drop", "resample"] = option(
        "drop", "prompts that are all right or all wrong: drop them, or resample them in the step's next round"
    )
    filter_by: Literal["accuracy", "reward"] = option(
        "accuracy", "keep groups that are neither all right nor all wrong (Eq. 11), or whose rewards are not all equal"
    )
    token_mean: Literal["step", "group"] = option(
        "step",
        "mean over the tokens of the optimizer step (verl), or of each group and then over groups (Eq. 8 as printed)",
    )


@torch.no_grad()
def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """Sample n completions of each prompt from `policy`; rows of one prompt are adjacent.

    `seed`, one or several numbers, selects the random stream. Returns a batch of R = n x len(prompts) rows: prompts
    (R, P) padded on the left, prompt_mask (R, P), completions (R, T), completion_mask (R, T) and truncated (R,). Where
    an update may compute a prompt once for all its rows, prompt_index (R, 1) numbers the prompts. Unless stock
    `generate` sampled, rollout_logprobs (R, T) has the log-probs of the tokens.
    """
    ids, mask = left_pad([prompt.ids for prompt in prompts], policy.pad_token, policy.lm.device)  # (R / n, P)
    stock_generate = args.rollout == "hf" or not policy.plain_cache
    config = sampling_config(policy, temperature, top_p, args.max_new_tokens, n if stock_generate else 1)
    prompts_per_call = len(prompts)
    if args.generate_batch_size:
        prompts_per_call = max(1, args.generate_batch_size // n)
    completions, logprobs = [], []
    with eval_mode(policy), seeded(seed, policy.lm.device):
        for start in range(0, len(prompts), prompts_per_call):
            part = slice(start, start + prompts_per_call)
            inputs = dict(input_ids=ids[part], attention_mask=mask[part].long(), generation_config=config)
            if stock_generate:
                tokens = policy.lm.generate(**inputs)[:, ids.shape[1] :]
            else:
                tokens, token_logprobs = policy.lm.generate(
                    **inputs, custom_generate=decode, **policy.decoding(n, args)
                )
                logprobs.extend(token_logprobs.unbind())
            completions.extend(tokens.unbind())
    return rollout_batch(policy, ids, mask, completions, logprobs, n)


def compute_rewards(reward_functions, prompts, texts, truncated):
    """Score R completions; rows of one prompt are adjacent. A reward is the weighted sum of its parts, of which the one
    that decides what is correct is +1 or -1 (Eq. 7).

    Returns rewards (R,); correct (R,), which is 1 or 0 whatever the rewards are, or None without gold answers; and
    parts {name: (R,)}. NaN marks rows without a gold answer, or to which a reward function does not apply.
    """
    parts, correct = score_rewards(reward_functions, prompts, texts, truncated)
    if name := deciding_part(parts):
        # The overlong penalty, at most 1, is meant for this scale. `correct` stays 1 or 0.
        parts[name] = 2 * parts[name] - 1  # +1/-1, Eq. 7
    rewards = weighted_sum(reward_functions, parts)
    return rewards, correct, parts


def overlong_penalty(lengths, args):
    """The penalty (R,), 0 or negative, on completions of `lengths` tokens (R,), the stop token included (Eq. 13)."""
    if args.overlong != "soft":
        return torch.zeros(len(lengths), dtype=torch.float64)
    # It grows with each token near the limit, so the policy learns to stop before it is cut off.
    return ((args.max_new_tokens - args.overlong_cache - lengths.double()) / args.overlong_cache).clamp(-1, 0)


def dynamic_batch(accelerator, sample, sampler, step, args, metrics):
    """Sample until `prompts_per_step` groups have 0 < correct < G (Algorithm 1: sample, score, filter, until full).

    `sample` is `sample_round` with its first four arguments bound. Returns this process's part of the kept groups, to
    be joined by `unpack_groups`, or none if there are too few for an update; the number of completion tokens that this
    process sampled; and completions of the last round to show.

    Prompt i of a round and kept group i of the step go to process i mod W. All processes draw the same prompts, gather
    once a round, and stop by what they gathered, so they cannot deadlock, whatever each of them kept.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    G = args.group_size
    kept, rejected = [], []
    tokens = 0
    # A group that agrees has no gradient, and such groups become frequent as the policy learns
    # (Section 3.2).
    for sampling_round in range(args.max_sampling_rounds):
        drawn = rejected + sampler.draw(args.prompts_per_step - len(rejected))
        prompts = [sampler.rows[i] for i in drawn[rank::processes]]
        seed = (args.seed, rank, step, sampling_round)
        batch, informative, shown = sample(prompts, seed, args, metrics)
        tokens += int(batch["completion_mask"].sum())
        groups = []
        for i in informative.nonzero()[:, 0].tolist():
            place = rank + i * processes  # in the draw
            groups.append((place, pack_group(batch, slice(i * G, (i + 1) * G))))
        groups = sorted(gather_object(groups), key=lambda group: group[0])  # of all processes, in the order of the draw
        for place, group in groups:
            kept.append((sampler.rows[drawn[place]], group))
        if args.on_reject == "resample":
            places = {place for place, _ in groups}
            rejected = [prompt for place, prompt in enumerate(drawn) if place not in places]
        if len(kept) >= args.prompts_per_step:
            break

    unit = processes * args.num_minibatches  # a short batch must be a multiple of this
    used = min(len(kept), args.prompts_per_step) // unit * unit
    metrics.add("sampling/rounds", sampling_round + 1)
    metrics.add("sampling/surplus", len(kept) - used)  # one step later it would be off-policy
    metrics.add("sampling/short", 0 < used < args.prompts_per_step)
    metrics.add("sampling/skipped", used == 0)
    return kept[:used][rank::processes], tokens, shown


def correct_in_group(correct, rewards, args):
    """How many completions of each group are right (R / G,); NaN without gold answers."""
    if correct is None:
        correct = torch.full_like(rewards, torch.nan)
    return correct.view(-1, args.group_size).sum(dim=1)


def sample_round(accelerator, policy, tokenizer, reward_functions, prompts, seed, args, metrics):
    """Sample and score a group of G completions of each prompt.

    Returns their rows as a batch with `rewards` (R,), the penalty included; which groups are informative (R / G,);
    and the prompts, completions, rewards and their parts to show. A group is informative if 0 < correct < G: accuracy
    decides, whatever the rewards are. With `--filter_by reward` the rewards before the penalty decide: a group in
    which only the penalties differ would train on length alone.
    """
    with accelerator.autocast():
        batch = rollout(policy, prompts, args.group_size, args.temperature, 1.0, seed, args)
    texts = completion_texts(tokenizer, batch)
    rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])
    right = correct_in_group(correct, rewards, args)
    informative = (0 < right) & (right < args.group_size)  # Eq. 11
    if args.filter_by == "reward":
        informative = compute_advantages(rewards, args).view(-1, args.group_size).any(dim=1)
    penalty = overlong_penalty(batch["completion_mask"].sum(dim=1).cpu(), args)
    rewards = rewards + penalty
    batch["rewards"] = rewards.to(batch["completions"].device)
    metrics.add_rollout(batch, rewards, correct, parts, args.group_size)
    metrics.add("sampling/keep_rate", informative)
    metrics.add("sampling/dropped_right", ~informative & (right == args.group_size), ~right.isnan())
    metrics.add("sampling/dropped_wrong", ~informative & (right == 0), ~right.isnan())
    metrics.add("overlong/fraction", batch["truncated"].cpu() if args.overlong == "filter" else penalty < 0)
    metrics.add("overlong/penalty", penalty)
    return batch, informative, (prompts, texts, rewards, parts)


def compute_advantages(rewards, args):
    """Advantages (R, 1), float64, of rewards (R,), a group's rows adjacent; 0 where all are equal (DeepSeekMath)."""
    groups = rewards.double().view(-1, args.group_size)
    mean, _, std, no_signal = group_statistics(groups, args.std_ddof)
    advantages = groups - mean
    if args.normalize_std:
        advantages = advantages / (std + args.std_eps)
    return advantages.masked_fill(no_signal, 0).view(-1, 1)


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None, entropy=None):
    """The loss of each token (R, T), -J of DeepSeekMath Eq. 3 before averaging, and diagnostics {name: (R, T)}.

    Log-probs are (R, T), advantages (R, 1) or (R, T), the mask is boolean.

    With one update per rollout old_logprobs equals logprobs: the ratio is 1, nothing is clipped, and the gradient is
    that of -A log pi. A token's loss is then -A plus the KL; a group's advantages sum to 0, so the mean is near 0.
    """
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if args.dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, args.dual_clip * advantages), objective)
    losses = -objective
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new): the old policy drew the samples
        "clip_fraction_low": (advantages < 0) & (ratio < 1 - args.clip_low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1 + args.clip_high),
        "dual_clip": (advantages < 0) & (ratio > (args.dual_clip or torch.inf)),
        "ratio_max": ratio,
        "clamped": log_ratios.abs() >= MAX_LOG_RATIO,  # there `log_ratio` clamps, and such a token has no gradient
    }
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)  # DeepSeekMath Eq. 4
        losses = losses + args.kl_coef * kl
        stats["kl_ref"] = kl
        stats["clamped_ref"] = log_ratio(logprobs, ref_logprobs, loss_mask).abs() >= MAX_LOG_RATIO
    if args.entropy_coef:
        losses = losses - args.entropy_coef * entropy
    return torch.where(loss_mask, losses, 0), stats


def token_weights(loss_mask, totals, args):
    """Weights (R, T) whose sum over a whole optimizer step is 1: the mean over its tokens, or over groups (Eq. 8).

    The denominators count all processes and micro-batches, so the gradient does not depend on how the rows are split.
    """
    if args.token_mean == "group":
        return loss_mask.double() / totals["group_tokens"].clamp(min=1) / totals["prompts"]
    # Under GRPO's mean over rows a token counts less the longer its completion is (Section 3.3).
    return loss_mask.double() / max(totals["tokens"], 1)


@torch.no_grad()
def add_fixed_logprobs(accelerator, model, reference, micro_batches, several_updates):
    """Put the log-probs (R, T) that stay fixed during the updates into each micro-batch.

    Those of the old policy come from the same forward on the same rows as those of the first update: the first ratio is
    exactly 1. With one update per rollout the update takes its own log-probs for them.
    """
    for micro in micro_batches:
        if several_updates:
            micro["old_logprobs"], _ = model(micro, with_entropy=False)
        if reference is not None:
            with accelerator.autocast():  # `prepare` puts the forward of `model` under it, and not the reference
                micro["ref_logprobs"], _ = reference(micro, with_entropy=False)


def update(accelerator, model, reference, optimizer, batch, step, args, metrics):
    """Train on one rollout: num_epochs passes of num_minibatches optimizer steps (DeepSeekMath, Algorithm 1)."""
    # 4. Cut the rows into optimizer steps and micro-batches. There are none if nothing got a reward on any process.
    minibatches = split_rollout(accelerator, batch, args)
    metrics.add("reward/skipped", float(not minibatches))
    # 5. Log-probs of the old policy and the reference; those of the new weights follow in each micro-batch.
    several_updates = args.num_epochs * args.num_minibatches > 1
    for micro_batches, _ in minibatches:
        add_fixed_logprobs(accelerator, model, reference, micro_batches, several_updates)
    for epoch in range(args.num_epochs):
        for micro_batches, totals in minibatches:
            step_loss = 0.0
            for micro in micro_batches:
                mask = micro["loss_mask"]
                with gradient_sync(accelerator, model, last=micro is micro_batches[-1]):
                    # A gradient through the entropy keeps every chunk of logits.
                    logprobs, entropy = model(micro, entropy_grad=args.entropy_coef > 0)
                    old_logprobs = micro.get("old_logprobs", logprobs.detach())  # with one update the ratio is 1
                    # 6. The loss of each token.
                    losses, stats = policy_loss(
                        logprobs, old_logprobs, micro["advantages"], mask, args, micro.get("ref_logprobs"), entropy
                    )
                    # 7. How much each token counts. The mean over groups of DAPO's Eq. 8 needs the tokens of a group.
                    weights = token_weights(mask, totals | {"group_tokens": micro["group_tokens"]}, args)
                    loss = (losses * weights).sum()
                    # Accelerate averages gradients over processes, but the weights count all processes: make it a sum.
                    accelerator.backward(loss * accelerator.num_processes)
                step_loss = step_loss + loss.detach()
                metrics.add_stats("policy", stats | {"entropy": entropy, "mean_prob": old_logprobs.exp()}, mask)
                if epoch == 0 and "rollout_logprobs" in micro:
                    metrics.add("rollout/logprob_gap", (micro["rollout_logprobs"] - old_logprobs).abs(), mask)
            # 8. The optimizer's step.
            norm = clip_grad_norm(accelerator, model.parameters(), args.max_grad_norm)
            if not torch.isfinite(norm + step_loss):
                raise InputError(f"step {step}: loss {float(step_loss)}, gradient norm {float(norm)}: not finite")
            optimizer.step()
            optimizer.zero_grad()
            metrics.add("optim/loss", step_loss * accelerator.num_processes)
            metrics.add("optim/grad_norm", norm)
            metrics.add("optim/empty_steps", float(totals["tokens"] == 0))


def why_none_was_kept(metrics, args):
    """Why a step has no group to train on, in words."""
    why = "the rewards of every group agree"
    if args.filter_by == "accuracy":
        right, wrong = metrics["sampling/dropped_right"], metrics["sampling/dropped_wrong"]
        why = f"{right:.0%} all right and {wrong:.0%} all wrong"
        if not args.needs_answers:
            why += " by the rule `accuracy` (--filter_by reward goes by your own rewards)"
    return f"{why} in {args.max_sampling_rounds} rounds"


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    if args.group_size < 2:
        raise InputError(f"--group_size {args.group_size}: a group of one has no baseline, at least 2 are needed")
    if args.overlong == "soft" and not 0 < args.overlong_cache <= args.max_new_tokens:
        sizes = f"--overlong_cache {args.overlong_cache}, --max_new_tokens {args.max_new_tokens}"
        raise InputError(f"{sizes}: the cache must be between 1 and the longest completion")
    reward_functions = load_rewards(args)
    accelerator = launch(args)
    run = Run(accelerator, args, "dapo", reward_functions)
    tokenizer = load_tokenizer(args)
    train_prompts, eval_prompts, data_summary = load_prompts(args, tokenizer, args.needs_answers)
    check_signatures(reward_functions, train_prompts, eval_prompts)
    if args.filter_by == "accuracy" and any(prompt.answer is None for prompt in train_prompts):
        where = f"--filter_by accuracy: {args.dataset} has prompts without an answer"
        raise InputError(f"{where}; name the column with --answer_column, or take --filter_by reward")
    policy = load_policy(args, tokenizer, accelerator)
    reference = load_reference(policy, args, accelerator)
    betas = (args.adam_beta1, args.adam_beta2)
    fused = True if accelerator.device.type == "cuda" else None  # the fused kernel copies no second moments
    optimizer = torch.optim.AdamW(
        policy.parameters(), args.learning_rate, betas, weight_decay=args.weight_decay, fused=fused
    )
    # `model` wraps `policy` (DDP, FSDP2) and runs what needs a gradient. `policy` samples completions and is saved.
    model, optimizer = accelerator.prepare(policy, optimizer)
    sampler = PromptSampler(train_prompts, args.seed)
    run.keep(data=DataDigest(train_prompts), sampler=sampler)  # parts of every checkpoint
    run.start(data_summary, *policy.notes(tokenizer))
    run.save_step_model(model, policy, tokenizer)  # if a crash has prevented that of the step that is resumed

    evaluation = partial(
        evaluate, accelerator, model, policy, tokenizer, reward_functions, eval_prompts, args, rollout, compute_rewards
    )
    run.first_evaluation(evaluation, tokenizer)
    sample = partial(sample_round, accelerator, policy, tokenizer, reward_functions)
    while run.step < args.max_steps and not run.interrupted:
        step = run.step + 1
        metrics = Metrics()
        start = time.perf_counter()
        # 1 and 2. Sample and score groups of completions until enough of them are informative.
        with unsharded(accelerator, model):  # sharded weights are whole while it samples
            groups, drawn_tokens, shown = dynamic_batch(accelerator, sample, sampler, step, args, metrics)
        rollout_end = time.perf_counter()
        lr = learning_rate(run.step, args)
        if groups:
            batch = unpack_groups(groups, policy)
            # 3. Compare each completion with its group.
            batch["advantages"] = compute_advantages(batch["rewards"], args).to(accelerator.device, torch.float32)
            batch["loss_mask"] = batch["completion_mask"]
            if args.overlong == "filter":  # the rows still count in their group's mean and std
                batch["loss_mask"] = batch["completion_mask"] & ~batch["truncated"][:, None]
            # 4 to 8. Update the policy.
            for group in optimizer.param_groups:
                group["lr"] = lr
            update(accelerator, model, reference, optimizer, batch, step, args, metrics)
            metrics.add_times(batch, start, rollout_end, args, drawn_tokens)
            metrics.add_rewards(batch["rewards"], args.group_size)
        # Log the step, and evaluate and save where that is due.
        run.step = step
        result = metrics.reduce(accelerator, reward_functions) | {"optim/lr": lr}
        none_kept = not groups and result["sampling/surplus"] == 0  # too few groups would be surplus
        run.end_step(result, evaluation, shown, last=step == args.max_steps or none_kept)
        run.save_step_model(model, policy, tokenizer)
        if none_kept:
            run.print(f"step {step}: {why_none_was_kept(result, args)}, nothing to train on: the run ends")
            if not optimizer.state:  # AdamW has one after the first update, and after a resume
                run.exit_code = 1
            break

    run.finish(model, policy, tokenizer)
    # gloo can hang if the prepared model outlives Accelerate's end.
    del policy, model, reference, optimizer, evaluation, sample
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
