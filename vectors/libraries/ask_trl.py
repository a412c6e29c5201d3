"""What TRL computes: the loss methods of its trainers, and the statements of its rollout.

A method that reads options and counters of its trainer gets an object with just these. Options come
from TRL's own configuration. What a case does not need has its default.
"""

import functools
import importlib.metadata
import math
import os
import pathlib
from collections import defaultdict
from types import SimpleNamespace

import torch
import transformers.trainer

from library import Library, refuse_if
from sources import Source
from tensors import (
    Processes,
    Rows,
    flat,
    grouped,
    has_uneven_pieces,
    padded,
    pair_answer,
    pieces_of,
    policy_answer,
    score_pairs,
)

LOSS_TYPES = {"tokens": "dapo", "rows": "grpo", "constant": "dr_grpo", "sums": "luspo"}
MOST_TOKENS = 100  # of a micro-batch here
OBJECTIVES = {"soft_gate": "sapo", "weighted_logprob": "cispo"}  # `loss_type`, whatever the mean
ESTIMATORS = {  # `scale_rewards` of GRPO, or RLOO
    ("group_mean", "group"): "group",
    ("group_mean", "none"): "none",
    ("group_mean", "batch_of_rewards"): "batch",
    ("leave_one_out", "none"): "rloo",
}


class Adapter(Library):
    objectives = ("clip", "soft_gate")
    means = LOSS_TYPES
    kl_estimators = ("k3", "k3_weighted")
    estimators = ESTIMATORS
    group_size = "num_generations"

    def __init__(self, packages):
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl import DPOConfig, GRPOConfig
        from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
        from trl.rewards import get_soft_overlong_punishment
        from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer, rloo_trainer

        self.name = f"TRL {importlib.metadata.version('trl')}"
        self.soft_punishment = get_soft_overlong_punishment
        self.nanstd = grpo_trainer.nanstd
        self.GRPO = grpo_trainer.GRPOTrainer
        self.GMPO = GMPOTrainer
        self.DPO = dpo_trainer.DPOTrainer
        self.RewardModel = reward_trainer.RewardTrainer
        self.configs = {self.GRPO: GRPOConfig, self.GMPO: GMPOConfig, self.DPO: DPOConfig}

        grpo = Source(pathlib.Path(grpo_trainer.__file__))
        rollout = "_generate_and_score_completions"
        scores = "unscorable_mask ="
        last = "advantages = torch.nan_to_num"
        self.grpo_advantages = grpo.statements(rollout, scores, last)
        self.count_tokens = grpo.statements(rollout, "loss_mask =", "num_items_in_batch =")
        self.sampler_ratio = grpo.statements(
            rollout,
            "mask = completion_mask if tool_mask is None",
            "if self.vllm_importance_sampling_mode in",
        )
        self.window = grpo.statements(
            "_compute_loss", 'normalizer = inputs["num_items_in_batch"]', 'if mode == "train"'
        )
        self.masks = grpo.statements("_generate_single_turn", "is_eos =", "completion_ids = [")
        self.truncated = grpo.statements("_generate", "eos_and_pad =", "is_truncated =")
        rloo = Source(pathlib.Path(rloo_trainer.__file__))
        self.rloo_advantages = rloo.statements(rollout, scores, last)
        trainer = Source(pathlib.Path(transformers.trainer.__file__))
        self.accumulate = trainer.statements(
            "training_step",
            "if self.loss_is_scaled_for_ga is not None",
            "if not loss_is_scaled_for_ga",
        )

    # --- settings ---

    def config(self, trainer_class, needed, micro_batches=1):
        """Return the configuration of a trainer with the chosen settings."""
        return self.configs[trainer_class](
            "unused",
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_accumulation_steps=micro_batches,
            **self.chosen(needed),
        )

    # --- advantages ---

    def advantages(self, groups, estimator, options):
        if estimator == "rloo":
            config = SimpleNamespace(
                reward_weights=[1.0],
                reward_clip_range=None,
                beta=0.0,
                normalize_advantages=False,
            )
            return self.advantages_by(self.rloo_advantages, [groups], config)
        config = self.config(self.GRPO, {"scale_rewards": estimator})
        return self.advantages_by(self.grpo_advantages, [groups], config)

    def decoupled_advantages(self, inputs, options):
        needed = {"multi_objective_aggregation": "normalize_then_sum"}
        needed["reward_weights"] = options["weights"]
        parts = inputs["parts"]
        advantages = self.advantages_by(self.grpo_advantages, parts, self.config(self.GRPO, needed))
        return {"advantages": grouped(advantages, parts[0])}

    def advantages_by(self, statements, parts, config):
        """Run the statements on float32 rewards, with NaN where a reward function gave None."""
        columns = []
        for groups in parts:
            columns.append([math.nan if reward is None else reward for reward in flat(groups)])
        weights = config.reward_weights or [1.0] * len(parts)
        own = {"reward_funcs": parts, "reward_weights": torch.tensor(weights)}
        names = statements(
            self=SimpleNamespace(**vars(config) | own),
            rewards_per_func=torch.tensor(columns).T,
            device="cpu",
            num_generations=len(parts[0][0]),
            nanstd=self.nanstd,
        )
        return names.advantages.tolist()

    def completion_mask(self, inputs, options):
        tokenizer = SimpleNamespace(pad_token_id=options["pad_token"])
        trainer = SimpleNamespace(eos_token_ids=options["stop_tokens"], _tokenizer=tokenizer)
        tokens = torch.tensor(inputs["tokens"])
        names = self.masks(self=trainer, device="cpu", completion_ids=tokens)
        width = tokens.shape[1]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in names.completion_ids]
        truncated = self.truncated(**vars(names)).is_truncated
        return {"mask": mask, "truncated": truncated.tolist()}

    # --- one optimizer step ---

    def items(self, mask, processes):
        """Return the tokens of a whole rollout, from the mask (R, T) of one process."""
        trainer = SimpleNamespace(accelerator=SimpleNamespace(gather=processes.gather))
        names = self.count_tokens(self=trainer, completion_mask=mask.long(), tool_mask=None)
        return names.num_items_in_batch

    def step_totals(self, inputs, options):
        """Return dapo's denominators, times the processes, over which gradients are averaged."""
        mask = padded(inputs["mask"])
        steps = inputs["steps"]
        # A process generates the rows of its micro-batches in all steps.
        rollout = [flat(process) for process in zip(*steps, strict=True)]

        def items_of(pieces, processes):
            return self.items(mask[flat(pieces)], processes)

        items = Processes(rollout).run(items_of)
        answer = {"tokens": []}
        for step in steps:
            numbers = []
            for process, counted, generated in zip(step, items, rollout, strict=True):
                trainer = SimpleNamespace(
                    accelerator=SimpleNamespace(num_processes=len(step)),
                    current_gradient_accumulation_steps=len(process),
                    args=SimpleNamespace(steps_per_generation=len(generated)),
                )
                given = {"num_items_in_batch": counted}
                names = self.window(inputs=given, self=trainer, mode="train")
                numbers.append([float(names.normalizer) * len(step)] * len(process))
            answer["tokens"].append(numbers)
        return answer

    def policy_step(self, inputs, options):
        inputs = without_advantage(inputs)
        self.refuse_step(inputs, options)
        return self.step_by(self.GRPO, inputs, needed_for(options))

    def top_entropy_step(self, inputs, options):
        needed = needed_for(options) | {"top_entropy_quantile": options["share"]}
        return self.step_by(self.GRPO, inputs, needed)

    def off_policy_mask_step(self, inputs, options):
        needed = needed_for(options) | {"off_policy_mask_threshold": options["max_divergence"]}
        return self.step_by(self.GRPO, inputs, needed)

    def weighted_logprob_step(self, inputs, options):
        options = options | {"objective": "weighted_logprob", "ratio": "token"}
        needed = needed_for(options) | {"epsilon_high": 1 + options["clip_high"]}
        return self.step_by(self.GRPO, inputs, needed)

    def geometric_mean_step(self, inputs, options):
        options = options | {"objective": "clip", "ratio": "token"}
        return self.step_by(self.GMPO, inputs, needed_for(options))

    def step_by(self, trainer_class, inputs, needed):
        uneven = has_uneven_pieces(inputs)
        refuse_if(uneven, "micro-batches have the same size, per_device_train_batch_size")
        has_moved = inputs["logprobs"] != inputs["old_logprobs"]

        def losses_of(parts, processes):
            config = self.config(trainer_class, needed, micro_batches=len(parts))
            one_update = config.num_iterations * config.steps_per_generation <= len(parts)
            refuse_if(has_moved and one_update, "with one update of a rollout all ratios are 1")
            items = self.items(torch.cat([part.mask for part in parts]), processes)
            trainer = loss_trainer(config, processes.count)
            self.add_masks(trainer, processes)
            for part in parts:
                given = {"num_items_in_batch": items}
                if trainer_class is self.GMPO:
                    given["advantages"] = part.advantages[:, 0]
                if config.use_vllm and config.vllm_importance_sampling_correction:
                    given["importance_sampling_ratio"] = self.sampler_weights(part, config)
                loss = micro_batch_loss(trainer_class, trainer, part, given)
                yield self.accumulated(loss, trainer_class, len(parts))

        return policy_answer(inputs, losses_of)

    def add_masks(self, trainer, processes):
        """Give a trainer its methods that select rows or tokens, and the processes they gather."""

        def to_one_length(tensor, dim, pad_index):  # of all processes, cut off again by the method
            room = (0, MOST_TOKENS - len(tensor))
            return torch.nn.functional.pad(tensor, room, value=pad_index)

        accelerator = SimpleNamespace(
            pad_across_processes=to_one_length, gather=lambda tensor: processes.gather(tensor)
        )
        gathering = SimpleNamespace(accelerator=accelerator)
        trainer.get_high_entropy_mask = functools.partial(
            self.GRPO.get_high_entropy_mask, gathering
        )
        trainer.get_off_policy_mask = self.GRPO.get_off_policy_mask

    def accumulated(self, loss, trainer_class, micro_batches):
        """Return what a micro-batch adds to the step's loss, by transformers' Trainer."""
        trainer = SimpleNamespace(
            loss_is_scaled_for_ga=trainer_class.loss_is_scaled_for_ga,
            current_gradient_accumulation_steps=micro_batches,
        )
        return self.accumulate(self=trainer, loss=loss).loss

    def sampler_weights(self, part, config):
        names = self.sampler_ratio(
            self=config,
            math=math,
            completion_mask=part.mask.long(),
            tool_mask=None,
            old_per_token_logps=part.old,
            sampling_per_token_logps=part.sampler,
        )
        return names.vllm_importance_sampling_ratio

    # --- KL ---

    def kl(self, logprobs, old, ref, estimator):
        """Return the KL of each token (R, T): the loss of that token alone, with advantage 0."""
        needed = {"loss_type": "dr_grpo", "max_completion_length": 1, "beta": 1.0}
        needed["use_bias_correction_kl"] = estimator == "k3_weighted"
        trainer = loss_trainer(self.config(self.GRPO, needed))
        advantages = torch.zeros_like(logprobs)
        table = Rows(logprobs=logprobs, old=old, ref=ref, advantages=advantages, entropies=None)
        values = []
        for row in range(len(logprobs)):
            for place in range(logprobs.shape[1]):
                part = table.piece([row])
                part.mask = torch.zeros_like(part.old).bool()
                part.mask[0, place] = True
                values.append(micro_batch_loss(self.GRPO, trainer, part, {}))
        return torch.stack(values).view(logprobs.shape)

    def soft_overlong(self, inputs, options):
        reward = self.soft_punishment(options["max_tokens"], options["cache"])
        return {"penalties": reward([[0] * length for length in inputs["lengths"]])}

    # --- pairs ---

    def preference_loss(self, inputs, options):
        ignored = options["label_smoothing"] and options["loss"] == "sigmoid"
        refuse_if(ignored, "label_smoothing is for robust and exo_pair; sigmoid ignores it")
        refuse_if(options["reference_free"], "there is a reference")
        tables = inputs["chosen_logprobs"] + inputs["rejected_logprobs"]
        logprobs = padded(tables).requires_grad_()
        # Each completion follows a prompt of one token.
        mask = padded([[0, *[1] * len(row)] for row in tables]).long()
        trainer = self.pair_trainer(options)

        def loss_of(pairs, rows):
            return self.pair_loss(trainer, logprobs[rows], mask[rows], pairs, inputs)

        loss = self.accumulated_pairs(inputs, len(tables) // 2, self.DPO, loss_of)
        return pair_answer(loss, logprobs, tables)

    def pair_trainer(self, options):
        losses = {options["loss"]: 1.0}
        if options["nll_coef"]:
            losses["sft"] = options["nll_coef"]
        needed = {
            "loss_type": list(losses),
            "loss_weights": list(losses.values()),
            "beta": options["beta"],
            "label_smoothing": options["label_smoothing"],
        }
        config = self.config(self.DPO, needed)
        own = {
            "loss_types": config.loss_type,
            "loss_weights": config.loss_weights or [1.0] * len(config.loss_type),
            "precompute_ref_logps": True,
        }
        return SimpleNamespace(**vars(config) | trainer_basics() | own)

    def accumulated_pairs(self, inputs, count, trainer_class, loss_of):
        """Return the loss of a step from `loss_of(pairs, rows)`; of rows the chosen come first."""
        pieces = pieces_of(inputs, count)[0]
        total = 0.0
        for pairs in pieces:
            loss = loss_of(pairs, pairs + [pair + count for pair in pairs])
            total = total + self.accumulated(loss, trainer_class, len(pieces))
        return total

    def pair_loss(self, trainer, logprobs, mask, pairs, inputs):
        zeros = torch.zeros_like(logprobs)
        outputs = SimpleNamespace(
            log_probs=logprobs,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            aux_loss=None,
        )
        batch = {
            "input_ids": mask,
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": padded(inputs["ref_chosen_logprobs"]).sum(dim=1)[pairs],
            "ref_rejected_logps": padded(inputs["ref_rejected_logprobs"]).sum(dim=1)[pairs],
        }
        return self.DPO._compute_loss(trainer, lambda **given: outputs, batch, False)

    def reward_model_loss(self, inputs, options):
        scores = score_pairs(inputs)
        trainer = SimpleNamespace(**trainer_basics())
        trainer.args = SimpleNamespace(center_rewards_coefficient=options["center_coef"] or None)

        def loss_of(pairs, rows):
            outputs = SimpleNamespace(logits=scores[rows][:, None])
            batch = {"attention_mask": torch.ones(len(rows), 1)}
            return self.RewardModel.compute_loss(trainer, lambda **given: outputs, batch)

        loss = self.accumulated_pairs(inputs, len(scores) // 2, self.RewardModel, loss_of)
        return pair_answer(loss, scores)


def needed_for(options):
    """Return the settings of GRPOConfig that a case of a step needs.

    num_iterations is 2, since with the default of 1 log-probs and old log-probs are equal.
    """
    objective = options["objective"]
    needed = {
        "num_iterations": 2,
        "loss_type": OBJECTIVES.get(objective, LOSS_TYPES.get(options["mean"])),
        "importance_sampling_level": options["ratio"],
        "delta": options.get("dual_clip"),
        "entropy_coef": options.get("entropy_coef", 0.0),
    }
    if "clip_low" in options:
        needed["epsilon"] = options["clip_low"]
        needed["epsilon_high"] = options["clip_high"]
    if "constant" in options:
        needed["max_completion_length"] = options["constant"]
    if objective == "soft_gate":
        needed["sapo_temperature_pos"] = options["tau_positive"]
        needed["sapo_temperature_neg"] = options["tau_negative"]
    if "kl" in options:
        needed["beta"] = options["kl"]["coef"]
        needed["use_bias_correction_kl"] = options["kl"]["estimator"] == "k3_weighted"
    if "sampler_cap" in options:
        is_masked = options.get("beyond_cap") == "mask"
        needed["use_vllm"] = True
        needed["vllm_importance_sampling_mode"] = "token_mask" if is_masked else "token_truncate"
        needed["vllm_importance_sampling_clip_min"] = options.get("sampler_floor")
        needed["vllm_importance_sampling_clip_max"] = options["sampler_cap"]
    return needed


def without_advantage(inputs):
    """Give rows without a reward advantage 0, as `torch.nan_to_num` does; they stay in the mask."""
    inputs = dict(inputs)
    if "scored" in inputs:
        pairs = zip(inputs["advantages"], inputs.pop("scored"), strict=True)
        inputs["advantages"] = [advantage * scored for advantage, scored in pairs]
    return inputs


def micro_batch_loss(trainer_class, trainer, part, given):
    entropies = torch.zeros_like(part.logprobs) if part.entropies is None else part.entropies
    outputs = part.logprobs, entropies, None
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: outputs
    return trainer_class._compute_loss(trainer, None, batch_of(part) | given)


def batch_of(part):
    prompt = torch.ones(len(part.logprobs), 1)
    batch = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(part.logprobs),
        "completion_mask": part.mask.long(),
        "advantages": part.advantages,
        "old_per_token_logps": part.old,
    }
    if part.ref is not None:
        batch["ref_per_token_logps"] = part.ref
    return batch


def trainer_basics(processes=1):
    """Return what the loss methods read besides options; what they gather is for the log."""
    accelerator = SimpleNamespace(
        num_processes=processes,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
        device="cpu",
        sync_gradients=True,
    )
    return {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }


def loss_trainer(config, processes=1):
    """Return as much of a GRPOTrainer as the loss needs, with its options set as by `__init__`."""
    own = {
        "args": config,
        "epsilon_low": config.epsilon,
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "current_gradient_accumulation_steps": config.gradient_accumulation_steps,
        "_entropy_bonus_enabled": config.entropy_coef != 0 or config.use_adaptive_entropy,
    }
    return SimpleNamespace(**vars(config) | trainer_basics(processes) | own)
