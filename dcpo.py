"""DCPO: Dynamic Clipping Policy Optimization (arXiv 2509.02333v2, Eq. 3-4, 8, 15, 27-30, A.7).

GRPO without the KL, with a clip of its own for each token (DAC), an advantage that remembers a prompt's earlier visits
(SAS), a loss that sums over the group (OTM), and a third reward. With q = pi_old(o_it) and r_it = pi(o_it) / q maximize

    J = E[ sum_i 1/|o_i| sum_t min(r_it A_i, clip(r_it, lo(q), hi(q)) A_i) ],  for A_i < 0 at least r_max A_i    Eq. 8
    lo(q) = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q, 0)),  hi(q) = min(1/2 + 1/2 sqrt(1 + 4 eps_high / q), r_max)   Eq. 27

On visit i of a prompt let A_new standardize its G rewards by their own mean and standard deviation, and A_tot by those
of all its i G rewards so far (Eq. 29-30). Each completion takes the smaller of two mixtures of them:

    SA_new = (i-1)/i A_new + 1/i A_tot,  SA_tot = 1/i A_new + (i-1)/i A_tot,  A = SA_tot unless |SA_new| < |SA_tot|

Against grpo.py: `clip_bounds` limits |r - 1| r q (Eq. 3-4), so a rare token may move far and a likely one nearly as
far as in GRPO; `smoothed_advantages` learns from groups of equal rewards once their prompt has had others; `History`
keeps the statistics in the checkpoint; `token_weights` is G times GRPO's; `compute_rewards` gives -1 to a wrong format,
that is where no answer is found, and 0 to a wrong answer (Eq. 15).

Deviations from the paper: the mean over prompts is ours, the paper gives none; equal rewards have A_new (and, over all
visits, A_tot) exactly 0, by their min and max, not by a rounded standard deviation; a prompt drawn twice in a step
counts as one visit, of which the last group is kept; log-ratios are clamped to +-20. Sizes and rates are presets.

Left out: the settings of the official script, which switch SAS off and so are not the paper's algorithm; docs/dcpo.md
has the nearest options, results, and details.

    accelerate launch dcpo.py                              a small embedded model learns to think; nothing is downloaded
    accelerate launch --mixed_precision bf16 dcpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset openai/gsm8k --dataset_config main --learning_rate 1e-6 --max_new_tokens 512 \\
        --micro_batch_size 8 --generate_batch_size 256 --eval_prompts 200             # 22 GiB of a GPU, by --dry_run
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from common.answers import extract_answer
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
from common.harness.tokens import record_tokens
from common.masked import MAX_LOG_RATIO, group_statistics, kl_estimate, log_ratio, nearly_equal
from common.rewards import check_signatures, deciding_part, load_rewards, score_rewards, weighted_sum


@dataclass
class Args(RolloutArgs):  # the options that no algorithm changes are declared there, once for all scripts
    prompts_per_step: int = option(32, "prompts in a rollout", "batch", gt=0)
    group_size: int = option(8, "completions per prompt, G (DCPO: 16)", "batch", gt=0)
    num_epochs: int = option(1, "passes over a rollout (DCPO: 1)", "batch", gt=0)
    # With one update a rollout the ratio would be 1 and the clip would never act.
    num_minibatches: int = option(4, "optimizer steps in a pass (DCPO: 16)", "batch", gt=0)
    micro_batch_size: int = option(
        64, "completions in one forward pass of a process; does not change the gradient", "batch", gt=0
    )
    micro_batch_tokens: int = option(
        0, "tokens in one forward pass, padding included; replaces --micro_batch_size (0: off)", "batch", ge=0
    )

    temperature: float = option(1.0, "temperature of sampling and of the log-probs in the loss", "sampling", gt=0)
    max_new_tokens: int = option(64, "maximum tokens in a completion, including its stop token", "sampling", gt=0)

    learning_rate: float = option(1e-4, "peak learning rate (DCPO: 1e-6)", "optimizer", gt=0)

    # With 0.16 and 0.2 the bounds meet GRPO's: 0.8 for a token of probability 1, and 1.2 for one of
    # probability 1/1.2 (Eq. 28).
    clip_low: float = option(0.16, "eps_low of Eq. 27 (with --no_dynamic_clip: clip at 1 - this for A < 0)", gt=0, le=1)
    clip_high: float = option(0.2, "eps_high of Eq. 27 (with --no_dynamic_clip: clip at 1 + this for A > 0)", gt=0)
    dual_clip: float = option(0.0, "with --no_dynamic_clip: upper bound c > 1 of the ratio where A < 0 (0: off)", ge=0)
    kl_coef: float = option(0.0, "beta of the KL to the reference in the loss (0: no reference is loaded)", ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = option(
        "k3", "gradient in a loss: k1 only noise, k2 of KL(pi||ref), k3 of KL(ref||pi), k3_weighted r times k2's (TRL)"
    )
    entropy_coef: float = option(0.0, "weight of an entropy bonus", ge=0)
    normalize_std: bool = option(True, "divide advantages by the standard deviation (no: needs --no_smooth_advantage)")
    # Only the statistics of the population pool exactly over visits (Eq. 29-30).
    std_ddof: Literal[0, 1] = option(0, "ddof of that standard deviation (DCPO's code: 1)")
    std_eps: float = option(0.0, "added to that standard deviation (verl: 1e-6, TRL: 1e-4)", ge=0)
    dynamic_clip: bool = option(True, "ratio bounds from a token's old probability (no: 1 - clip_low, 1 + clip_high)")
    max_ratio: float = option(10.0, "with --dynamic_clip: limit of hi, and of the ratio where A < 0 (r_max)", gt=1)
    smooth_advantage: bool = option(True, "mix in the statistics of a prompt's earlier visits (no: of its group alone)")
    only_token_mean: bool = option(True, "sum over the group, mean over prompts (no: mean over rows, GRPO's)")


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
    if name := deciding_part(parts):  # Eq. 15: 1 right, 0 wrong, -1 without an answer to judge
        missing = [extract_answer(text, cut) is None for text, cut in zip(texts, truncated.tolist(), strict=True)]
        parts[name] = parts[name] - torch.tensor(missing).double()
    rewards = weighted_sum(reward_functions, parts)
    return rewards, correct, parts


class History:
    """The visits of each prompt, and mean, variance, min and max of its rewards so far: `table` (prompts, 5), float64.

    Row i is that of training prompt i; prompts of the same text and answer were merged when they were loaded.
    """

    def __init__(self, prompts):
        self.table = torch.zeros(prompts, 5, dtype=torch.float64)

    def write(self, accelerator, draw, rows):
        """Write the rows of all processes on every process, in draw order: the last row of a repeated prompt wins."""
        positions = torch.arange(accelerator.process_index, len(draw), accelerator.num_processes).double()
        rows = torch.cat([positions[:, None], rows], dim=1).to(accelerator.device)
        for position, *row in sorted(accelerator.gather(rows).tolist()):
            self.table[draw[int(position)]] = torch.tensor(row, dtype=torch.float64)

    def state_dict(self):
        return {"table": self.table.tolist()}

    def load_state_dict(self, state):
        self.table = torch.tensor(state["table"], dtype=torch.float64)


def standardize(groups, mean, variance, low, high, args):
    """Advantages (prompts, G) of rewards by the statistics (prompts, 1); 0 where `low` equals `high`."""
    advantages = groups - mean
    if args.normalize_std:
        advantages = advantages / (variance.sqrt() + args.std_eps)
    return advantages.masked_fill(nearly_equal(low, high) | groups.isnan(), 0)  # the variance of 24 times 0.1 is not 0


def smoothed_advantages(rewards, args, history):
    """SA_new and SA_tot (prompts, G) of rewards (R,), R = prompts x group_size, and the history after this visit (A.7).

    `history` (prompts, 5) holds the prompts' rows of the table before it. Pooling is exact for ddof 0 and a constant G.
    """
    groups = rewards.double().view(-1, args.group_size)
    visits, old_mean, old_variance, old_low, old_high = history.split(1, dim=1)  # (prompts, 1) each
    mean, variance, _, _ = group_statistics(groups, args.std_ddof)
    low, high = torch.where(groups.isnan(), mean, groups).aminmax(dim=1, keepdim=True)  # of rows that have a reward
    new = standardize(groups, mean, variance, low, high, args)
    i = visits + 1  # this visit is the i-th: by the prompt's own count, not by steps
    between = visits / i * (old_mean - mean).square()
    mean = (visits * old_mean + mean) / i  # Eq. 29
    variance = (visits * old_variance + variance + between) / i  # Eq. 30
    low = torch.where(visits > 0, torch.minimum(low, old_low), low)
    high = torch.where(visits > 0, torch.maximum(high, old_high), high)
    history = torch.where(mean.isnan(), history, torch.cat([i, mean, variance, low, high], dim=1))  # else no visit
    if not args.smooth_advantage:
        return new, new, history
    total = standardize(groups, mean, variance, low, high, args)
    # The more visits, the less one unusual group weighs; and a group that agrees still trains.
    return (visits * new + total) / i, (new + visits * total) / i, history


def compute_advantages(rewards, args, history):
    """Smoothed advantages (R, 1) of rewards (R,), SA_new or SA_tot, whichever is closer to 0; and the history after."""
    new, total, history = smoothed_advantages(rewards, args, history)
    # The smaller of both damps the swings of either.
    advantages = torch.where(new.abs() < total.abs(), new, total)  # a tie takes SA_tot
    return advantages.view(-1, 1), history


def clip_bounds(old_logprobs, loss_mask, args):
    """Lowest and highest ratio of each token (R, T) by its old probability q, where |r - 1| r q = eps (Eq. 4, 27)."""
    q = torch.where(loss_mask, old_logprobs, 0).exp()
    if not args.dynamic_clip:
        return torch.full_like(q, 1 - args.clip_low), torch.full_like(q, 1 + args.clip_high)
    # A fixed band would keep an unlikely token at nearly its old probability.
    low = 0.5 + 0.5 * (1 - 4 * args.clip_low / q).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * args.clip_high / q).sqrt()
    return low, high.clamp(max=args.max_ratio)  # (0.5, max_ratio) where q underflows to 0


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None, entropy=None):
    """The loss of each token (R, T), -J of Eq. 8 before averaging, and diagnostics {name: (R, T)}.

    Log-probs are (R, T), advantages (R, 1) or (R, T), the mask is boolean.

    With one update per rollout old_logprobs equals logprobs: the ratio is 1, nothing is clipped, and the gradient is
    that of -A log pi. Smoothed advantages of a group need not sum to 0, so the loss is not 0.
    """
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    low, high = clip_bounds(old_logprobs, loss_mask, args)  # (R, T) each, without gradient
    # No bound stops a ratio that grows under a negative advantage: one cap holds both signs.
    cap = args.max_ratio if args.dynamic_clip else args.dual_clip
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if cap:
        objective = torch.where(advantages < 0, torch.maximum(objective, cap * advantages), objective)
    losses = -objective
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new): the old policy drew the samples
        "clip_fraction_low": (advantages < 0) & (ratio < low),
        "clip_fraction_high": (advantages > 0) & (ratio > high),
        "dual_clip": (advantages < 0) & (ratio > (args.dual_clip or torch.inf)) & (not args.dynamic_clip),
        "token_clip_ratio": objective != ratio * advantages,  # Eq. 9: either bound, or the cap
        "bound_low": low,
        "bound_high": high,
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
    """Weights (R, T) of the mean over prompts of the sum over a group of the mean over tokens (Eq. 8), G times GRPO's.

    The denominators count all processes and micro-batches, so the gradient does not depend on how the rows are split.
    """
    lengths = loss_mask.sum(dim=1, keepdim=True).clamp(min=1)  # (R, 1)
    return loss_mask.double() / lengths / totals["prompts" if args.only_token_mean else "rows"]


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
    if args.smooth_advantage and not args.normalize_std:
        raise InputError("--no_normalize_std needs --no_smooth_advantage, which mixes standardized advantages")
    reward_functions = load_rewards(args)
    accelerator = launch(args)
    run = Run(accelerator, args, "dcpo", reward_functions, dead={"dcpo/response_utilization": 0})
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
    history = History(len(train_prompts))
    # These are parts of every checkpoint.
    run.keep(data=DataDigest(train_prompts), sampler=sampler, history=history)
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
        draw = sampler.draw(args.prompts_per_step)
        prompts = [train_prompts[i] for i in draw[rank::processes]]
        with accelerator.autocast(), unsharded(accelerator, model):  # sharded weights are whole while it samples
            seed = (args.seed, rank, step, 0)  # the last number is the sampling round, of which dapo.py has several
            batch = rollout(policy, prompts, args.group_size, args.temperature, 1.0, seed, args)
        # 2. Score the completions.
        texts = completion_texts(tokenizer, batch)
        rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        batch["rewards"] = rewards.to(accelerator.device)
        # 3. Compare each completion with its group, and with all visits of its prompt.
        before = history.table[draw[rank::processes]]
        advantages, after = compute_advantages(rewards, args, before)
        history.write(accelerator, draw, after)
        new, total, _ = smoothed_advantages(rewards, args, before)
        metrics.add("dcpo/smooth_new", new.abs() < total.abs())
        metrics.add("dcpo/response_utilization", advantages != 0)  # Eq. 10
        metrics.add("dcpo/visit", after[:, 0])
        batch["advantages"] = advantages.to(accelerator.device, torch.float32)
        batch["loss_mask"] = batch["completion_mask"]
        rollout_end = time.perf_counter()
        # 4 to 8. Update the policy.
        lr = learning_rate(run.step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        # tokens.jsonl gets what the update does to each token of a few rows.
        with record_tokens(run, metrics, model, batch, prompts, tokenizer, policy_loss):
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
