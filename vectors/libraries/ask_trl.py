"""What TRL computes: the loss methods of its trainers, and the statements of its rollout.

Where a method reads options and counters of its trainer, an object with just these stands in.
"""

import importlib.metadata
import math
import os
import pathlib
from collections import defaultdict
from types import SimpleNamespace

import torch
import transformers.trainer

from sources import Source
from tensors import (
    Processes,
    Rows,
    expected_kl_answer,
    flat,
    grouped,
    kl_answer,
    padded,
    pieces_of,
    policy_answer,
    preference_answer,
    refuse_if,
    score_answer,
    score_pairs,
)

LOSS_TYPES = {"tokens": "dapo", "rows": "grpo", "constant": "dr_grpo"}
SCALES = {"group": "group", "none": "none", "batch_of_rewards": "batch"}
K3_ALONE = "the KL in the loss is k3"


class Adapter:
    def __init__(self, packages):
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.gmpo import GMPOTrainer
        from trl.rewards import get_soft_overlong_punishment
        from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer, rloo_trainer

        self.name = f"TRL {importlib.metadata.version('trl')}"
        self.soft_punishment = get_soft_overlong_punishment
        self.nanstd = grpo_trainer.nanstd
        self.GRPO = grpo_trainer.GRPOTrainer
        self.GMPO = GMPOTrainer
        self.DPO = dpo_trainer.DPOTrainer
        self.RewardModel = reward_trainer.RewardTrainer

        grpo = Source(pathlib.Path(grpo_trainer.__file__))
        rollout = "_generate_and_score_completions"
        scores = "unscorable_mask ="
        last = "advantages = torch.nan_to_num"
        self.advantages = grpo.statements(rollout, scores, last)
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
        self.leave_one_out = rloo.statements(rollout, scores, last)
        trainer = Source(pathlib.Path(transformers.trainer.__file__))
        self.accumulate = trainer.statements(
            "training_step",
            "if self.loss_is_scaled_for_ga is not None",
            "if not loss_is_scaled_for_ga",
        )

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        deviation = options["deviation"]
        refuse_if(len(set(map(len, groups))) > 1, "groups have one size, num_generations")
        settings = {"multi_objective_aggregation": "sum_then_normalize", "reward_weights": [1.0]}
        if options["baseline"] == "leave_one_out":
            return self.advantages_by(self.leave_one_out, [groups], **settings)
        refuse_if(deviation not in SCALES, f"no scale_rewards is {deviation}")
        settings["scale_rewards"] = SCALES[deviation]
        return self.advantages_by(self.advantages, [groups], **settings)

    def decoupled_advantages(self, inputs, options):
        return self.advantages_by(
            self.advantages,
            inputs["parts"],
            multi_objective_aggregation="normalize_then_sum",
            reward_weights=options["weights"],
        )

    def advantages_by(self, statements, parts, reward_weights, **settings):
        """`rewards_per_func` is float32, with NaN where a reward function returned None."""
        columns = []
        for groups in parts:
            columns.append([math.nan if reward is None else reward for reward in flat(groups)])
        trainer = SimpleNamespace(
            reward_funcs=parts,
            reward_weights=torch.tensor(reward_weights),
            reward_clip_range=None,
            beta=0.0,
            normalize_advantages=False,
            **settings,
        )
        names = statements(
            self=trainer,
            rewards_per_func=torch.tensor(columns).T,
            device="cpu",
            num_generations=len(parts[0][0]),
            nanstd=self.nanstd,
        )
        return {"advantages": grouped(names.advantages.tolist(), parts[0])}

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
        """The tokens of a whole rollout, from the mask (R, T) of one process."""
        trainer = SimpleNamespace(accelerator=SimpleNamespace(gather=processes.gather))
        names = self.count_tokens(self=trainer, completion_mask=mask.long(), tool_mask=None)
        return names.num_items_in_batch

    def step_totals(self, inputs, options):
        """The denominator of dapo, times the number of processes, which average their gradients."""
        mask = padded(inputs["mask"])
        steps = inputs["steps"]
        # A process generates the rows of its micro-batches of all steps.
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
        refuse(options)
        return self.step_by(self.GRPO, without_advantage(inputs), options)

    def geometric_mean_step(self, inputs, options):
        settings = options | {"ratio": "token", "mean": "rows", "objective": "clip"}
        return self.step_by(self.GMPO, inputs, settings)

    def step_by(self, trainer_class, inputs, options):
        sizes = set(map(len, flat(pieces_of(inputs, 1))))
        refuse_if(len(sizes) > 1, "micro-batches have one size, per_device_train_batch_size")

        def losses_of(parts, processes):
            items = self.items(torch.cat([part.mask for part in parts]), processes)
            trainer = loss_trainer(options, processes.count, len(parts))
            for part in parts:
                given = {"num_items_in_batch": items}
                if trainer_class is self.GMPO:
                    given["advantages"] = part.advantages[:, 0]
                if "sampler_cap" in options:
                    given["importance_sampling_ratio"] = self.sampler_weights(part, options)
                loss = micro_batch_loss(trainer_class, trainer, part, given)
                yield self.accumulated(loss, trainer_class, len(parts))

        return policy_answer(inputs, losses_of)

    def accumulated(self, loss, trainer_class, micro_batches):
        """What a micro-batch adds to the loss of the step, by the Trainer of transformers."""
        trainer = SimpleNamespace(
            loss_is_scaled_for_ga=trainer_class.loss_is_scaled_for_ga,
            current_gradient_accumulation_steps=micro_batches,
        )
        return self.accumulate(self=trainer, loss=loss).loss

    def sampler_weights(self, part, options):
        masked = options.get("beyond_cap") == "mask"
        trainer = SimpleNamespace(
            vllm_importance_sampling_mode="token_mask" if masked else "token_truncate",
            vllm_importance_sampling_clip_min=options.get("sampler_floor"),
            vllm_importance_sampling_clip_max=options["sampler_cap"],
        )
        names = self.sampler_ratio(
            self=trainer,
            math=math,
            completion_mask=part.mask.long(),
            tool_mask=None,
            old_per_token_logps=part.old,
            sampling_per_token_logps=part.sampler,
        )
        return names.vllm_importance_sampling_ratio

    # --- KL ---

    def kl(self, logprobs, old, ref, estimator):
        """The KL of each token (R, T): the loss of that token alone, with advantage 0."""
        refuse_if(estimator not in ("k3", "k3_weighted"), K3_ALONE)
        kl = {"coef": 1.0, "estimator": estimator}
        options = {"objective": "clip", "clip_low": 0.2, "clip_high": 0.2, "ratio": "token"}
        options |= {"mean": "constant", "constant": 1, "kl": kl}
        trainer = loss_trainer(options, 1, 1)
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

    def kl_tokens(self, inputs, options):
        return kl_answer(inputs, options, self.kl)

    def kl_expected_gradient(self, inputs, options):
        return expected_kl_answer(inputs, options, self.kl)

    def soft_overlong(self, inputs, options):
        reward = self.soft_punishment(options["max_tokens"], options["cache"])
        return {"penalties": reward([[0] * length for length in inputs["lengths"]])}

    # --- pairs ---

    def preference_loss(self, inputs, options):
        ignored = options["label_smoothing"] and options["loss"] == "sigmoid"
        refuse_if(ignored, "label_smoothing acts in robust and exo_pair; sigmoid ignores it")
        refuse_if(options["reference_free"], "there is a reference")
        tables = inputs["chosen_logprobs"] + inputs["rejected_logprobs"]
        logprobs = padded(tables).requires_grad_()
        # A prompt of one token stands before each completion.
        mask = padded([[0, *[1] * len(row)] for row in tables]).long()

        def loss_of(pairs, rows):
            return self.pair_loss(logprobs[rows], mask[rows], pairs, inputs, options)

        loss = self.accumulated_pairs(inputs, len(tables) // 2, self.DPO, loss_of)
        return preference_answer(loss, logprobs, inputs)

    def accumulated_pairs(self, inputs, count, trainer_class, loss_of):
        """The loss of a step; `loss_of(pairs, rows)` of a micro-batch, `rows` with the chosen first."""
        pieces = pieces_of(inputs, count)[0]
        total = 0.0
        for pairs in pieces:
            loss = loss_of(pairs, pairs + [pair + count for pair in pairs])
            total = total + self.accumulated(loss, trainer_class, len(pieces))
        return total

    def pair_loss(self, logprobs, mask, pairs, inputs, options):
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
        losses = {options["loss"]: 1.0}
        if options["nll_coef"]:
            losses["sft"] = options["nll_coef"]
        trainer = SimpleNamespace(
            loss_types=list(losses),
            loss_weights=list(losses.values()),
            beta=options["beta"],
            label_smoothing=options["label_smoothing"],
            f_divergence_type="reverse_kl",
            precompute_ref_logps=True,
            ld_alpha=None,
            use_weighting=False,
            **trainer_basics(1),
        )
        return self.DPO._compute_loss(trainer, lambda **given: outputs, batch, False)

    def reward_model_loss(self, inputs, options):
        scores = score_pairs(inputs)
        trainer = SimpleNamespace(**trainer_basics(1))
        trainer.args.center_rewards_coefficient = options["center_coef"] or None

        def loss_of(pairs, rows):
            outputs = SimpleNamespace(logits=scores[rows][:, None])
            batch = {"attention_mask": torch.ones(len(rows), 1)}
            return self.RewardModel.compute_loss(trainer, lambda **given: outputs, batch)

        loss = self.accumulated_pairs(inputs, len(scores) // 2, self.RewardModel, loss_of)
        return score_answer(loss, scores)


def without_advantage(inputs):
    """A row without a reward has advantage 0, by `torch.nan_to_num`, and stays in the mask."""
    if "scored" not in inputs:
        return inputs
    pairs = zip(inputs["advantages"], inputs["scored"], strict=True)
    return inputs | {"advantages": [advantage * scored for advantage, scored in pairs]}


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


def trainer_basics(processes):
    """What the loss methods read, apart from options. They gather numbers for the log alone."""
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
        "args": SimpleNamespace(),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }


def loss_trainer(options, processes, micro_batches):
    """A GRPOTrainer with the options of a case; what has no option is at its default."""
    kl = options.get("kl") or {}
    trainer = SimpleNamespace(
        loss_type="sapo" if options["objective"] == "soft_gate" else LOSS_TYPES[options["mean"]],
        importance_sampling_level=options["ratio"],
        epsilon_low=options.get("clip_low"),
        epsilon_high=options.get("clip_high"),
        beta=kl.get("coef", 0.0),
        max_completion_length=options.get("constant"),
        current_gradient_accumulation_steps=micro_batches,
        use_vllm="sampler_cap" in options,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        entropy_coef=options.get("entropy_coef", 0.0),
        use_adaptive_entropy=False,
        _entropy_bonus_enabled="entropy_coef" in options,
        **trainer_basics(processes),
    )
    trainer.args = SimpleNamespace(
        use_bias_correction_kl=kl.get("estimator") == "k3_weighted",
        delta=options.get("dual_clip"),
        sapo_temperature_pos=options.get("tau_positive"),
        sapo_temperature_neg=options.get("tau_negative"),
        steps_per_generation=micro_batches,
    )
    return trainer


def refuse(options):
    objective = options["objective"]
    estimator = (options.get("kl") or {}).get("estimator")
    refuse_if(objective not in ("clip", "soft_gate"), f"no loss_type has the objective {objective}")
    by_row = options["mean"] == "rows"
    refuse_if(objective == "soft_gate" and not by_row, "sapo has a mean over rows")
    refuse_if("max_ratio" in options, "no loss_type is DCPO's")
    by_token = options["ratio"] == "sequence_token"
    refuse_if(by_token, "importance_sampling_level is token or sequence")
    refuse_if(options["mean"] not in LOSS_TYPES, f"no loss_type is a mean over {options['mean']}")
    refuse_if(estimator in ("k1", "k2"), K3_ALONE)
