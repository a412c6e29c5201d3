"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, Eq. 3-4, Algorithm 1).

For each prompt q, sample a group of G completions o_1..o_G from the policy, and score each with a reward R_i. There is
no critic: a completion's advantage compares it with its group, and is the same at each of its tokens,

    A_i = (R_i - mean(R)) / std(R)                                                          outcome supervision, 4.1.2

and the policy maximizes, with the ratio r_it = pi(o_it) / pi_old(o_it),

    J = E[ 1/G sum_i 1/|o_i| sum_t { min(r_it A_i, clip(r_it, 1-eps, 1+eps) A_i) - beta KL_it } ]                 Eq. 3
    KL_it = pi_ref/pi - log(pi_ref/pi) - 1                                                  k3, against ref, Eq. 4

The KL to the frozen reference is part of the loss, per token and with the same weights. |o_i| counts the stop token. A
truncated completion, which has none, stays in the loss; the reward functions are told that it is truncated.

Deviations from the paper: the reference is the model at the start of the run and is not refreshed; eps is 0.2 by
convention, the standard deviation has ddof 1 and an epsilon of 1e-6 (the paper gives none of these); a group of
equal rewards has advantage exactly 0; log-ratios are clamped to +-20. Sizes and rates are presets for the small model.

Left out: process supervision (4.1.3), which needs a reward model that scores single steps; and iterative GRPO, which
retrains the reward model and renews the reference, since a rule that checks answers does not age.

    accelerate launch grpo.py                              a small embedded model learns to think; nothing is downloaded
    accelerate launch --mixed_precision bf16 grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset openai/gsm8k --dataset_config main --learning_rate 1e-6 --max_new_tokens 512 \\
        --micro_batch_size 8 --generate_batch_size 256 --eval_prompts 200             # 23 GiB of a GPU, by --dry_run

docs/grpo.md has usage, results, and the details of the implementation one by one.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from common.batches import completion_texts, left_pad, rollout_batch, split_rollout
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
from common.rewards import check_signatures, load_rewards, score_rewards, weighted_sum


@dataclass
class Args(RolloutArgs):  # the options that no algorithm changes are declared there, once for all scripts
    prompts_per_step: int = option(32, "prompts in a rollout", "batch", gt=0)
    group_size: int = option(8, "completions per prompt, G (DeepSeekMath: 64)", "batch", gt=0)
    num_epochs: int = option(1, "passes over a rollout (DeepSeekMath's mu: 1)", "batch", gt=0)
    num_minibatches: int = option(
        1, "optimizer steps in a pass; with one update per rollout the clip never acts", "batch", gt=0
    )
    micro_batch_size: int = option(
        64, "completions in one forward pass of a process; does not change the gradient", "batch", gt=0
    )
    micro_batch_tokens: int = option(
        0, "tokens in one forward pass, padding included; replaces --micro_batch_size (0: off)", "batch", ge=0
    )

    temperature: float = option(1.0, "temperature of sampling and of the log-probs in the loss", "sampling", gt=0)
    max_new_tokens: int = option(64, "maximum tokens in a completion, including its stop token", "sampling", gt=0)

    learning_rate: float = option(1e-4, "peak learning rate (DeepSeekMath 7B: 1e-6)", "optimizer", gt=0)

    clip_low: float = option(0.2, "the ratio is clipped at 1 - this where A < 0 (DeepSeekMath's eps)", gt=0, le=1)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + this where A > 0 (DAPO: 0.28)", gt=0)
    dual_clip: float = option(0.0, "upper bound c > 1 of the ratio where A < 0 (0: off; verl: 3)", ge=0)
    kl_coef: float = option(0.04, "beta of the KL to the reference in the loss (0: no reference is loaded)", ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = option(
        "k3", "gradient in a loss: k1 only noise, k2 of KL(pi||ref), k3 of KL(ref||pi), k3_weighted r times k2's (TRL)"
    )
    entropy_coef: float = option(0.0, "weight of an entropy bonus", ge=0)
    normalize_std: bool = option(True, "divide advantages by the group's standard deviation (Dr. GRPO: no)")
    std_ddof: Literal[0, 1] = option(1, "ddof of that standard deviation (verl, TRL: 1; numpy: 0)")
    std_eps: float = option(1e-6, "added to that standard deviation (verl: 1e-6, TRL: 1e-4)", ge=0)


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
    """Score R completions; rows of one prompt are adjacent. A reward is the weighted sum of its parts.

    Returns rewards (R,); correct (R,), which is 1 or 0 whatever the rewards are, or None without gold answers; and
    parts {name: (R,)}. NaN marks rows without a gold answer, or to which a reward function does not apply.
    """
    parts, correct = score_rewards(reward_functions, prompts, texts, truncated)
    rewards = weighted_sum(reward_functions, parts)
    return rewards, correct, parts


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
    """Weights (R, T) of sum 1 over an optimizer step: the mean over rows of the mean over tokens (DeepSeekMath Eq. 3).

    The denominators count all processes and micro-batches, so the gradient does not depend on how the rows are split.
    """
    lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (R, 1)
    return loss_mask.double() / lengths / totals["rows"]


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


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    if args.group_size < 2:
        raise InputError(f"--group_size {args.group_size}: a group of one has no baseline, at least 2 are needed")
    reward_functions = load_rewards(args)
    accelerator = launch(args)
    run = Run(accelerator, args, "grpo", reward_functions)
    tokenizer = load_tokenizer(args)
    train_prompts, eval_prompts, data_summary = load_prompts(args, tokenizer, args.needs_answers)
    check_signatures(reward_functions, train_prompts, eval_prompts)
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
    rank, processes = accelerator.process_index, accelerator.num_processes

    evaluation = partial(
        evaluate, accelerator, model, policy, tokenizer, reward_functions, eval_prompts, args, rollout, compute_rewards
    )
    run.first_evaluation(evaluation, tokenizer)
    while run.step < args.max_steps and not run.interrupted:
        step = run.step + 1
        metrics = Metrics()
        start = time.perf_counter()
        # 1. Draw prompts, and sample a group of completions of each; this process takes its share.
        drawn = sampler.draw(args.prompts_per_step)[rank::processes]
        prompts = [train_prompts[i] for i in drawn]
        with accelerator.autocast(), unsharded(accelerator, model):  # sharded weights are whole while it samples
            seed = (args.seed, rank, step, 0)  # the last number is the sampling round, of which dapo.py has several
            batch = rollout(policy, prompts, args.group_size, args.temperature, 1.0, seed, args)
        # 2. Score the completions.
        texts = completion_texts(tokenizer, batch)
        rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        batch["rewards"] = rewards.to(accelerator.device)
        # 3. Compare each completion with its group.
        batch["advantages"] = compute_advantages(rewards, args).to(accelerator.device, torch.float32)
        batch["loss_mask"] = batch["completion_mask"]
        rollout_end = time.perf_counter()
        # 4 to 8. Update the policy.
        lr = learning_rate(run.step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        update(accelerator, model, reference, optimizer, batch, step, args, metrics)
        # Log the step, and evaluate and save where that is due.
        run.step = step
        metrics.add_times(batch, start, rollout_end, args)
        metrics.add_rewards(rewards, args.group_size)
        metrics.add_rollout(batch, rewards, correct, parts, args.group_size)
        result = metrics.reduce(accelerator, reward_functions) | {"optim/lr": lr}
        run.end_step(result, evaluation, (prompts, texts, rewards, parts), last=step == args.max_steps)
        run.save_step_model(model, policy, tokenizer)

    run.finish(model, policy, tokenizer)
    # gloo can hang if the prepared model outlives Accelerate's end.
    del policy, model, reference, optimizer, evaluation
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
