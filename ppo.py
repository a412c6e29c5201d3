"""PPO: Proximal Policy Optimization (arXiv 1707.06347) with a critic, as used for language models (arXiv 2203.02155).

For each prompt, sample one completion y_1..y_T from the policy. Its reward R arrives with the last token. A critic V
predicts it from every prefix; a token's advantage is how much better it came out (GAE, with V_{T+1} = 0):

    R_t = 1[t = T] R - beta log(pi_old / pi_ref)                      the KL to the reference, where it is in the reward
    delta_t = R_t + gamma V_{t+1} - V_t                                                                          Eq. 12
    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t                                                Eq. 11

The policy maximizes, with the ratio r_t = pi(y_t) / pi_old(y_t), the mean over tokens of

    min(r_t A_t, clip(r_t, 1-eps, 1+eps) A_t)                             or r_t A_t - b KL(pi_old, pi)       Eq. 7 or 8

and the critic minimizes 1/2 max((V - return)^2, (clip(V, V_old-eps_v, V_old+eps_v) - return)^2), at its own learning
rate and, with a backbone of its own, with its own gradient clip. Advantages are whitened over the tokens of a rollout;
the returns are not.

Against grpo.py: a critic in place of the group, an advantage for each token, policy and critic prepared as one module,
the mean over tokens, several minibatches. By default gamma = lambda = 1: A_t = R - V_t.

Deviations from the paper: whitening, value clipping, KL to a reference and missing-EOS penalty come from RLHF; the
critic starts from the policy's weights with a head of zeros (InstructGPT: from the reward model, --critic_path); a
truncated completion ends an episode like a finished one; the KL of Eq. 8 is estimated from the samples.

Left out: PPO-ptx, since its mix with pretraining gradients needs pretraining data; InstructGPT's normalisation of the
reward by a bias, which the whitening of the advantages makes up for; TRPO, of which Eq. 7 and 8 are the first-order
forms; a mean over sequences, which is GRPO's; a KL in the reward and in the loss, which would count it twice; rewards
of a reward model for every token, as it is trained to score whole completions. A lambda of the critic's own (VC-PPO)
and one that grows with the length (VAPO) are a recipe of docs/your_own.md.

    accelerate launch ppo.py                               a small embedded model learns to think; nothing is downloaded
    accelerate launch ppo.py --reward_model_path runs/rm/model --kl_coef 0.05 --gae_lambda 0.95

docs/ppo.md has usage, results, and the details of the implementation one by one.
"""

import copy
import time
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import nn

from common.batches import completion_texts, left_pad, rollout_batch, split_rollout
from common.errors import InputError, clean_exit
from common.generation import decode, eval_mode, sampling_config, seeded
from common.harness.args import RolloutArgs, learning_rate, option
from common.harness.command_line import parse_args
from common.harness.data import DataDigest, PromptSampler, load_prompts
from common.harness.distributed import clip_grad_norm, gradient_sync, launch, unsharded
from common.harness.evaluation import evaluate
from common.harness.loading import load_policy, load_reference, load_tokenizer
from common.harness.metrics import Metrics, add_explained_variance
from common.harness.run import Run
from common.harness.scorers import learned_reward, load_scorer
from common.masked import MAX_LOG_RATIO, kl_estimate, log_ratio, moments
from common.policy import Backbone
from common.rewards import check_signatures, load_rewards, score_rewards, weighted_sum


@dataclass
class Args(RolloutArgs):  # the options that no algorithm changes are declared there, once for all scripts
    prompts_per_step: int = option(256, "prompts in a rollout (InstructGPT: 512)", "batch", gt=0)
    group_size: int = option(1, "completions per prompt; the critic needs no group", "batch", gt=0)
    num_epochs: int = option(1, "passes over a rollout (InstructGPT: 1, TRL: 4)", "batch", gt=0)
    # With one update a rollout the ratio would be 1 and the clip would never act.
    num_minibatches: int = option(4, "optimizer steps in a pass (InstructGPT: 8)", "batch", gt=0)
    micro_batch_size: int = option(
        64, "completions in one forward pass of a process; does not change the gradient", "batch", gt=0
    )
    micro_batch_tokens: int = option(
        0, "tokens in one forward pass, padding included; replaces --micro_batch_size (0: off)", "batch", ge=0
    )

    temperature: float = option(1.0, "temperature of sampling and of the log-probs in the loss", "sampling", gt=0)
    max_new_tokens: int = option(64, "maximum tokens in a completion, including its stop token", "sampling", gt=0)

    learning_rate: float = option(1e-4, "peak learning rate of the policy (verl: 1e-6)", "optimizer", gt=0)

    clip_low: float = option(0.2, "the ratio is clipped at 1 - this where A < 0 (the paper's eps)", gt=0, le=1)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + this where A > 0 (DAPO: 0.28)", gt=0)
    dual_clip: float = option(0.0, "upper bound c > 1 of the ratio where A < 0 (0: off; verl: 3)", ge=0)
    # A rule that checks answers stays valid however far the policy moves; a learned reward needs
    # the KL.
    kl_coef: float = option(
        0.0, "beta of the KL to the reference, see --kl_in (0: no reference is loaded; RLHF: 0.05)", ge=0
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = option(
        "k3", "gradient in a loss: k1 only noise, k2 of KL(pi||ref), k3 of KL(ref||pi), k3_weighted r times k2's (TRL)"
    )
    entropy_coef: float = option(0.0, "weight of an entropy bonus", ge=0)
    normalize_std: bool = option(
        True, "divide advantages by their standard deviation over the tokens (they are always centred)"
    )
    std_ddof: Literal[0, 1] = option(1, "ddof of that standard deviation (verl, TRL: 1; OpenAI's code: 0)")
    std_eps: float = option(1e-8, "added to its square, the variance", ge=0)
    critic: Literal["separate", "shared"] = option(
        "separate", "separate: a backbone of its own (verl); shared: a head on the policy's backbone, trained jointly"
    )
    critic_path: str | None = option(
        None, "reward model that a separate critic starts from (InstructGPT) [the policy with a head of zeros]"
    )
    critic_learning_rate: float = option(0.001, "peak learning rate of the critic (verl: 1e-5)", gt=0)
    critic_warmup_steps: int = option(0, "first steps, which train only the critic (VC-PPO: 50)", ge=0)
    value_coef: float = option(
        1.0, "weight of the value loss (TRL: 0.1; a separate critic has its own learning rate)", gt=0
    )
    value_clip: float = option(
        0.2, "in the loss, values move at most this far from the old ones (0: off; verl: 0.5)", ge=0
    )
    gamma: float = option(1.0, "discount per token", ge=0, le=1)
    gae_lambda: float = option(1.0, "lambda of the advantages (RLHF: 0.95; 1: the return minus the value)", ge=0, le=1)
    kl_in: Literal["reward", "loss"] = option(
        "reward", "reward: k1 of the old policy, fixed during the updates (RLHF); loss: --kl_estimator of the new one"
    )
    kl_target: float = option(0.0, "--kl_coef is adjusted towards this KL per token (0: it stays)", ge=0)
    kl_horizon: float = option(10000.0, "completions over which it is adjusted (verl: 10000)", gt=0)
    objective: Literal["clip", "penalty"] = option("clip", "Eq. 7, or Eq. 8: a penalty on KL(old, new)")
    penalty_coef: float = option(1.0, "initial coefficient of that penalty; a rollout may double or halve it", gt=0)
    penalty_target: float = option(0.01, "KL(old, new) per token that it is adjusted towards", gt=0)
    target_kl: float = option(0.0, "stop a rollout's updates when KL(old, new) per token is above this (0: off)", ge=0)
    missing_eos_penalty: float = option(0.0, "subtracted from the reward of a truncated completion", ge=0)
    reward_model_path: str | None = option(
        None, "folder or hub id of a reward model (reward_model.py), in place of --reward"
    )


class ValueHead(nn.Linear):
    """A linear map to one value that starts at zero and computes in float32, in whatever dtype its weights are held
    (sharding may gather them in bfloat16)."""

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1)
        # From zeros the first advantages are those of the rewards alone.
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden):
        # A value is fitted by regression, and bfloat16 has too few digits for that.
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class Critic(nn.Module):
    """A scalar head on the states of a backbone of its own, or (`backbone` None) of the policy's."""

    def __init__(self, hidden_size, backbone=None):
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(hidden_size)

    def forward(self, batch, rows, columns, hidden):
        """Float32 values (R, T) from the states of the completions' tokens (`Backbone.states`), 0 outside the mask."""
        empty = torch.zeros(batch["completions"].shape, device=hidden.device)
        return empty.index_put((rows, columns), self.head(hidden)[:, 0])


class ActorCritic(nn.Module):
    """Policy and critic as one module, which Accelerate prepares once."""

    def __init__(self, policy, critic):
        super().__init__()
        self.policy, self.critic = policy, critic
        self._no_split_modules = set(policy._no_split_modules or ())  # FSDP2 wraps by these
        if critic.backbone is not None:
            self._no_split_modules |= set(critic.backbone.lm._no_split_modules or ())

    def forward(self, batch, with_entropy=True, entropy_grad=False):
        """What `Policy` returns, and float32 values (R, T), 0 outside the mask.

        The value of a token is read where its log-prob is, one position before it: that state has not seen the token.
        """
        states = self.policy.states(batch)
        logprobs, entropy = self.policy(batch, with_entropy, entropy_grad, states)
        if self.critic.backbone is not None:
            states = self.critic.backbone.states(batch)
        return logprobs, entropy, self.critic(batch, *states)


def load_critic(args, policy):
    """The critic of `--critic`: shared, or separate on a backbone of its own: that of `--critic_path` with its head, or
    the policy's with a head of zeros."""
    if args.critic_path:  # InstructGPT (arXiv 2203.02155, C.4): a value is at first the score of the text so far
        lm = load_scorer(args, "critic_path", policy.lm.device)
        backbone = Backbone(lm.base_model, shares_prompts=False)  # whole rows are exact for any architecture
        critic = Critic(lm.score.in_features, backbone)
        critic.head.load_state_dict({"bias": torch.zeros(1)} | lm.score.state_dict())
        critic.head.to(policy.lm.device, policy.lm.dtype)  # the backbone has rotary frequencies in float32
        return critic.train()
    hidden_size = policy.lm.get_output_embeddings().weight.shape[1]
    if args.critic == "shared":
        if not policy.head_is_last:
            raise InputError("--critic shared: this model changes its logits after the head, take --critic separate")
        return Critic(hidden_size).to(policy.lm.device, policy.lm.dtype).train()
    if policy.lm.base_model is policy.lm:
        raise InputError(f"--critic separate: the base model of a {type(policy.lm).__name__} contains the head")
    backbone = Backbone(copy.deepcopy(policy.lm.base_model), policy.shares_prompts, packs=policy.packs)
    critic = Critic(hidden_size, backbone)
    critic.head.to(policy.lm.device, policy.lm.dtype)  # as above
    return critic.train()


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


def shape_rewards(rewards, truncated, kl, completion_mask, args, kl_coef):
    """Rewards of the tokens (R, T): the completion's (R,) on its last token, minus the KL (R, T) to the reference."""
    # Each token pays for its own log-ratio here; GRPO has the KL in the loss.
    token_rewards = torch.zeros_like(kl) if args.kl_in == "loss" else -kl_coef * kl
    last = completion_mask.sum(dim=1, keepdim=True).clamp(min=1) - 1  # the stop token, or the last one before the cut
    rewards = rewards - args.missing_eos_penalty * truncated
    return token_rewards.scatter_add(1, last, rewards[:, None].to(kl.dtype))


def gae(token_rewards, values, mask, gamma, gae_lambda):
    """sum_k (gamma lambda)^k delta_{t+k} (R, T) (arXiv 1506.02438, Eq. 16); tokens outside the mask are skipped."""
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])  # (R,) of the token after t; nothing follows the last one
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0)
    return advantages


def compute_advantages(token_rewards, values, completion_mask, args):
    """Advantages and returns (R, T) by GAE, before whitening; 0 where the mask is false."""
    advantages = gae(token_rewards, values, completion_mask, args.gamma, args.gae_lambda)
    returns = torch.where(completion_mask, advantages + values, 0)
    return advantages, returns


def whiten(accelerator, micro_batches, args):
    """Centre the advantages over the completion tokens of the rollout, on all processes, and scale their variance to 1.

    The returns stay as they are: they were made of the advantages before.
    """
    advantages = torch.cat([micro["advantages"][micro["loss_mask"]] for micro in micro_batches])
    mean, variance = moments(advantages, args.std_ddof, accelerator.reduce)
    deviation = (variance + args.std_eps).sqrt() if args.normalize_std else 1.0
    for micro in micro_batches:
        whitened = (micro["advantages"] - mean) / deviation
        micro["advantages"] = torch.where(micro["loss_mask"], whitened, 0).to(torch.float32)


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    loss_mask,
    args,
    ref_logprobs=None,
    entropy=None,
    kl_coef=None,
    penalty_coef=None,
):
    """The loss of each token (R, T), the negative of Eq. 7 or 8 before the mean, and diagnostics {name: (R, T)}.

    Log-probs are (R, T), advantages (R, 1) or (R, T), the mask is boolean.

    The coefficients are those of `args` unless a controller has moved them. `ref_logprobs` is given only if the KL to
    the reference is in the loss. In the first minibatch the ratio is 1 and nothing is clipped.
    """
    log_ratios = log_ratio(logprobs, old_logprobs, loss_mask)  # (R, T)
    ratio = log_ratios.exp()
    objective = ratio * advantages
    stats = {
        "approx_kl": ratio - 1 - log_ratios,  # k3 of KL(old || new): the old policy drew the samples
        "ratio_max": ratio,
        "clamped": log_ratios.abs() >= MAX_LOG_RATIO,  # there `log_ratio` clamps, and such a token has no gradient
    }
    if args.objective == "clip":
        clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
        objective = torch.minimum(objective, clipped * advantages)
        if args.dual_clip:
            objective = torch.where(advantages < 0, torch.maximum(objective, args.dual_clip * advantages), objective)
        stats["clip_fraction_low"] = (advantages < 0) & (ratio < 1 - args.clip_low)
        stats["clip_fraction_high"] = (advantages > 0) & (ratio > 1 + args.clip_high)
        stats["dual_clip"] = (advantages < 0) & (ratio > (args.dual_clip or torch.inf))
    else:  # k1 of KL(old || new): under samples of old its gradient is that of the KL
        objective = objective + (args.penalty_coef if penalty_coef is None else penalty_coef) * log_ratios
    losses = -objective
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, loss_mask, args.kl_estimator, old_logprobs)
        losses = losses + (args.kl_coef if kl_coef is None else kl_coef) * kl
        stats["kl_ref"] = kl
        stats["clamped_ref"] = log_ratio(logprobs, ref_logprobs, loss_mask).abs() >= MAX_LOG_RATIO
    if args.entropy_coef:
        losses = losses - args.entropy_coef * entropy
    return torch.where(loss_mask, losses, 0), stats


def value_loss(values, old_values, returns, loss_mask, args):
    """Half the squared error of each token (R, T), the larger of the value's and the clipped value's; diagnostics."""
    errors = torch.where(loss_mask, values - returns, 0).square()
    stats = {"mean": values}
    if args.value_clip:
        clipped = values.clamp(old_values - args.value_clip, old_values + args.value_clip)
        clipped_errors = torch.where(loss_mask, clipped - returns, 0).square()
        stats["clip"] = clipped_errors > errors
        # A value gains nothing by moving farther than --value_clip in one rollout.
        errors = torch.maximum(errors, clipped_errors)
    return errors / 2, stats | {"loss": errors / 2}


def token_weights(loss_mask, totals, args):
    """Weights (R, T) whose sum over a whole optimizer step is 1: the mean over its tokens.

    The denominator counts all processes and micro-batches, so the gradient does not depend on how the rows are split.
    """
    # The expectation of Eq. 7 is over time steps: all tokens of a step weigh the same.
    return loss_mask.double() / max(totals["tokens"], 1)


class Coefficients:
    """The coefficients that controllers move once per rollout. They are a part of every checkpoint."""

    def __init__(self, args):
        self.kl, self.penalty = args.kl_coef, args.penalty_coef

    def steer(self, metrics, args):
        """Move them after a rollout, by its metrics. The log has those that the rollout used."""
        if args.kl_target:
            self.steer_kl(metrics["policy/kl_old_ref"], args.prompts_per_step * args.group_size, args)
        if args.objective == "penalty":
            self.steer_penalty(metrics["policy/kl_old_new"], args)

    def steer_kl(self, kl, completions, args):
        """Move towards --kl_target, by at most 0.2 / horizon a completion (arXiv 1909.08593, 2.2, there with the KL of
        a whole completion; per token as in verl) and a factor of 2 per rollout. Below 0 it would reward the KL."""
        error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
        self.kl *= min(max(1 + error * completions / args.kl_horizon, 0.5), 2)

    def steer_penalty(self, kl, args):
        """Halve or double it if KL(old, new) is off --penalty_target by more than a factor of 1.5 (section 4)."""
        if kl < args.penalty_target / 1.5:
            self.penalty /= 2
        elif kl > args.penalty_target * 1.5:
            self.penalty *= 2

    def state_dict(self):
        return {"kl": self.kl, "penalty": self.penalty}

    def load_state_dict(self, state):
        self.kl, self.penalty = state["kl"], state["penalty"]


@torch.no_grad()
def assign_advantages(accelerator, model, reference, micro_batches, args, metrics, coefficients):
    """Put old log-probs and values, and from them whitened advantages and returns, into every micro-batch.

    This comes before the first update and runs the same forward as the updates: the first ratio is exactly 1.
    """
    for micro in micro_batches:
        mask = micro["loss_mask"]
        micro["old_logprobs"], _, micro["old_values"] = model(micro, with_entropy=False)
        if reference is not None:
            with accelerator.autocast():  # `prepare` puts the forward of `model` under it, and not the reference
                micro["ref_logprobs"], _ = reference(micro, with_entropy=False)
        # The KL of the old policy to the reference; without a reference it is 0.
        kl = kl_estimate(micro["old_logprobs"], micro.get("ref_logprobs", micro["old_logprobs"]), mask, "k1")
        token_rewards = shape_rewards(
            micro["rewards"], micro["truncated"], kl, micro["completion_mask"], args, coefficients.kl
        )
        micro["advantages"], micro["returns"] = compute_advantages(
            token_rewards, micro["old_values"], micro["completion_mask"], args
        )
        rows = mask.any(dim=1)
        metrics.add("reward/shaped", token_rewards.sum(dim=1), rows)
        if reference is not None:
            metrics.add("policy/kl_old_ref", kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1), rows)
    whiten(accelerator, micro_batches, args)
    add_explained_variance(accelerator, micro_batches, metrics)


def update(accelerator, model, reference, optimizer, batch, step, args, metrics, coefficients):
    """Train on one rollout: num_epochs passes, each cut into num_minibatches optimizer steps of policy and critic."""
    # 4. Cut the rows into optimizer steps and micro-batches: none if no completion of any process has a reward.
    minibatches = split_rollout(accelerator, batch, args)
    metrics.add("reward/skipped", float(not minibatches))
    if not minibatches:
        return
    # 3 and 5. Log-probs and values before the first update, and the advantages that follow from them.
    everything = list(chain.from_iterable(micro_batches for micro_batches, _ in minibatches))
    assign_advantages(accelerator, model, reference, everything, args, metrics, coefficients)
    policy_coef = 0.0 if step <= args.critic_warmup_steps else 1.0
    too_far = False
    for epoch in range(args.num_epochs):
        for micro_batches, totals in minibatches:
            if too_far:
                metrics.add("optim/skipped_steps", 1.0)
                continue
            step_loss = step_kl = 0.0
            for micro in micro_batches:
                mask, old_logprobs = micro["loss_mask"], micro["old_logprobs"]
                with gradient_sync(accelerator, model, last=micro is micro_batches[-1]):
                    # A gradient through the entropy keeps every chunk of logits.
                    logprobs, entropy, values = model(micro, entropy_grad=args.entropy_coef > 0)
                    # 6. The loss of each token, of the policy and of the critic.
                    ref_logprobs = micro.get("ref_logprobs") if args.kl_in == "loss" else None
                    losses, stats = policy_loss(
                        logprobs,
                        old_logprobs,
                        micro["advantages"],
                        mask,
                        args,
                        ref_logprobs,
                        entropy,
                        coefficients.kl,
                        coefficients.penalty,
                    )
                    value_losses, value_stats = value_loss(values, micro["old_values"], micro["returns"], mask, args)
                    # 7. How much each token counts.
                    weights = token_weights(mask, totals, args)
                    loss = ((policy_coef * losses + args.value_coef * value_losses) * weights).sum()
                    # Accelerate averages gradients over processes, but the weights count all processes: make it a sum.
                    accelerator.backward(loss * accelerator.num_processes)
                step_loss = step_loss + loss.detach()
                step_kl = step_kl + torch.where(mask, stats["approx_kl"], 0).sum().detach()
                metrics.add_stats("policy", stats | {"entropy": entropy, "mean_prob": old_logprobs.exp()}, mask)
                metrics.add_stats("value", value_stats, mask)
                if epoch == 0 and "rollout_logprobs" in micro:
                    metrics.add("rollout/logprob_gap", (micro["rollout_logprobs"] - old_logprobs).abs(), mask)
            # 8. The optimizer's step, unless the policy has moved too far.
            if args.target_kl:
                too_far = bool(accelerator.reduce(step_kl, "sum") > args.target_kl * totals["tokens"])
            metrics.add("optim/skipped_steps", float(too_far))
            if too_far:
                optimizer.zero_grad()
                continue
            norms = clip_gradients(accelerator, optimizer, args)
            if policy_coef == 0:  # zero gradients would advance Adam's step count, and with it the bias correction
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = None
            if not torch.isfinite(sum(norms) + step_loss):
                raise InputError(
                    f"step {step}: loss {float(step_loss)}, gradient norms {[float(x) for x in norms]}: not finite"
                )
            optimizer.step()
            optimizer.zero_grad()
            metrics.add("optim/loss", step_loss * accelerator.num_processes)
            metrics.add("optim/grad_norm", norms[0])
            if args.critic == "separate":
                metrics.add("optim/critic_grad_norm", norms[1])
            metrics.add("optim/empty_steps", float(totals["tokens"] == 0))
    if args.objective == "penalty":
        add_policy_change(accelerator, model, everything, metrics)


def clip_gradients(accelerator, optimizer, args):
    """Clip policy and critic separately, a shared model as one; the norms before (DeepSpeed: one joint norm)."""
    policy, critic = (group["params"] for group in optimizer.param_groups)
    # The critic's gradients have another size, and in one norm they would shrink the policy's.
    parts = [policy, critic] if args.critic == "separate" else [policy + critic]
    return [clip_grad_norm(accelerator, part, args.max_grad_norm) for part in parts]


@torch.no_grad()
def add_policy_change(accelerator, model, micro_batches, metrics):
    """KL(old, new) after the last update (k3), which steers the penalty."""
    for micro in micro_batches:
        logprobs, _, _ = model(micro, with_entropy=False)
        log_ratios = log_ratio(logprobs, micro["old_logprobs"], micro["loss_mask"])
        metrics.add("policy/kl_old_new", log_ratios.exp() - 1 - log_ratios, micro["loss_mask"])


def check_own_args(args):
    """Refuse options that exclude each other."""
    if args.normalize_std and args.std_eps == 0:
        raise InputError("--std_eps 0: advantages that all agree would be divided by 0")
    if args.kl_target and not args.kl_coef:
        raise InputError(f"--kl_target {args.kl_target} steers --kl_coef, which is 0: no reference is loaded")
    if args.critic == "shared" and args.critic_warmup_steps:
        raise InputError(f"--critic_warmup_steps {args.critic_warmup_steps}: a shared backbone cannot be trained alone")
    if args.critic == "shared" and args.critic_path:
        raise InputError(f"--critic_path {args.critic_path}: --critic shared has no backbone of its own")
    if args.objective == "penalty" and args.dual_clip:
        raise InputError(f"--dual_clip {args.dual_clip}: --objective penalty has no clip")
    if args.reward_model_path and (args.reward != ["accuracy"] or args.reward_weights):
        raise InputError("--reward_model_path replaces --reward: give one of them")


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    check_own_args(args)
    reward_functions = load_rewards(args)
    accelerator = launch(args)
    if args.target_kl and accelerator.distributed_type == "DEEPSPEED":
        raise InputError("--target_kl: DeepSpeed steps within the last backward pass, before the KL is known")
    run = Run(accelerator, args, "ppo", reward_functions, dead={})
    tokenizer = load_tokenizer(args)
    needs_answers = args.needs_answers and args.reward_model_path is None
    train_prompts, eval_prompts, data_summary = load_prompts(args, tokenizer, needs_answers)
    check_signatures(reward_functions, train_prompts, eval_prompts)
    if args.reward_model_path:
        reward_functions = [learned_reward(args, train_prompts or eval_prompts, accelerator.device)]
    policy = load_policy(args, tokenizer, accelerator)
    reference = load_reference(policy, args, accelerator)
    critic = load_critic(args, policy)
    betas = (args.adam_beta1, args.adam_beta2)
    groups = [{"params": policy.parameters()}, {"params": critic.parameters()}]  # with a rate and a clip each
    fused = True if accelerator.device.type == "cuda" else None  # the fused kernel copies no second moments
    optimizer = torch.optim.AdamW(groups, args.learning_rate, betas, weight_decay=args.weight_decay, fused=fused)
    # `model` wraps `policy` (DDP, FSDP2) and runs what needs a gradient. `policy` samples completions and is saved.
    model, optimizer = accelerator.prepare(ActorCritic(policy, critic), optimizer)
    sampler = PromptSampler(train_prompts, args.seed)
    coefficients = Coefficients(args)
    # These are parts of every checkpoint.
    run.keep(data=DataDigest(train_prompts), sampler=sampler, coefficients=coefficients)
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
        # 1. Draw prompts, and sample completions of each; this process takes its share.
        drawn = sampler.draw(args.prompts_per_step)[rank::processes]
        prompts = [train_prompts[i] for i in drawn]
        with accelerator.autocast(), unsharded(accelerator, model):  # sharded weights are whole while it samples
            seed = (args.seed, rank, step, 0)  # the last number is the sampling round, of which dapo.py has several
            batch = rollout(policy, prompts, args.group_size, args.temperature, 1.0, seed, args)
        # 2. Score the completions.
        texts = completion_texts(tokenizer, batch)
        rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        batch["rewards"] = rewards.to(accelerator.device)
        batch["loss_mask"] = batch["completion_mask"]
        rollout_end = time.perf_counter()
        # 3 to 8. Compute advantages, and update policy and critic.
        lr = learning_rate(run.step, args)
        policy_lr = 0.0 if run.step < args.critic_warmup_steps else lr
        critic_lr = lr / args.learning_rate * args.critic_learning_rate
        for group, group_lr in zip(optimizer.param_groups, (policy_lr, critic_lr), strict=True):
            group["lr"] = group_lr
        update(accelerator, model, reference, optimizer, batch, step, args, metrics, coefficients)
        # Log the step, and evaluate and save where that is due.
        run.step = step
        metrics.add_times(batch, start, rollout_end, args)
        metrics.add_rewards(rewards, args.group_size)
        metrics.add_rollout(batch, rewards, correct, parts, args.group_size)
        result = metrics.reduce(accelerator, reward_functions) | {"optim/lr": policy_lr, "optim/critic_lr": critic_lr}
        result |= {"policy/kl_coef": coefficients.kl, "policy/penalty_coef": coefficients.penalty}
        if step > args.critic_warmup_steps and not result.get("reward/skipped"):  # else the policy has not moved
            coefficients.steer(result, args)
        run.end_step(result, evaluation, (prompts, texts, rewards, parts), last=step == args.max_steps)
        run.save_step_model(model, policy, tokenizer)

    run.finish(model, policy, tokenizer)
    # gloo can hang if the prepared model outlives Accelerate's end.
    del policy, critic, model, reference, optimizer, groups, evaluation
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
