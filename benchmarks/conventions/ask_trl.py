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
    NotOfferedError,
    Processes,
    Step,
    expected_gradient,
    padded,
    pieces_of,
    rows_like,
    rows_of,
    step_answer,
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
        self.grpo, self.dpo, self.reward_model = grpo_trainer, dpo_trainer, reward_trainer
        self.gmpo_loss = GMPOTrainer._compute_loss
        source = Source(pathlib.Path(grpo_trainer.__file__))
        rollout = "_generate_and_score_completions"
        last = "advantages = torch.nan_to_num"
        self.advantages = source.statements(rollout, "unscorable_mask =", last)
        self.count_tokens = source.statements(rollout, "loss_mask =", "num_items_in_batch =")
        self.sampler_ratio = source.statements(
            rollout,
            "mask = completion_mask if tool_mask is None",
            "if self.vllm_importance_sampling_mode in",
        )
        self.window = source.statements(
            "_compute_loss", 'normalizer = inputs["num_items_in_batch"]', 'if mode == "train"'
        )
        self.masks = source.statements("_generate_single_turn", "is_eos =", "completion_ids = [")
        self.truncated = source.statements("_generate", "eos_and_pad =", "is_truncated =")
        trainer = Source(pathlib.Path(transformers.trainer.__file__))
        self.accumulate = trainer.statements(
            "training_step",
            "if self.loss_is_scaled_for_ga is not None",
            "if not loss_is_scaled_for_ga",
        )
        leave_one_out = Source(pathlib.Path(rloo_trainer.__file__))
        self.leave_one_out = leave_one_out.statements(rollout, "unscorable_mask =", last)

    # --- advantages ---

    def group_advantages(self, inputs, options):
        """`rewards_per_func` is float32 there, with NaN where a reward function returned None."""
        groups = inputs["rewards"]
        if len(set(map(len, groups))) > 1:
            raise NotOfferedError("groups have one size, num_generations")
        rewards = [[math.nan if reward is None else reward] for group in groups for reward in group]
        baseline, deviation = options["baseline"], options["deviation"]
        if baseline == "leave_one_out":
            statements = self.leave_one_out
        elif deviation in SCALES:
            statements = self.advantages
        else:
            raise NotOfferedError(f"no scale_rewards is {deviation}")
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            scale_rewards=SCALES.get(deviation),
            reward_clip_range=None,
            beta=0.0,
            normalize_advantages=False,
        )
        names = {
            "self": trainer,
            "rewards_per_func": torch.tensor(rewards),
            "device": "cpu",
            "num_generations": len(groups[0]),
            "torch": torch,
            "nanstd": self.grpo.nanstd,
        }
        exec(statements, names)
        return {"advantages": names["advantages"].view(len(groups), -1).tolist()}

    def decoupled_advantages(self, inputs, options):
        """One column of `rewards_per_func` for each part."""
        parts = inputs["parts"]
        columns = [[reward for group in groups for reward in group] for groups in parts]
        rewards = [[math.nan if reward is None else reward for reward in row] for row in zip(*columns, strict=True)]
        trainer = SimpleNamespace(
            multi_objective_aggregation="normalize_then_sum",
            reward_weights=torch.tensor(options["weights"]),
            reward_funcs=parts,
        )
        names = {
            "self": trainer,
            "rewards_per_func": torch.tensor(rewards),
            "device": "cpu",
            "num_generations": len(parts[0][0]),
            "torch": torch,
            "nanstd": self.grpo.nanstd,
        }
        exec(self.advantages, names)
        return {"advantages": names["advantages"].view(len(parts[0]), -1).tolist()}

    def completion_mask(self, inputs, options):
        tokenizer = SimpleNamespace(pad_token_id=options["pad_token"])
        trainer = SimpleNamespace(eos_token_ids=options["stop_tokens"], _tokenizer=tokenizer)
        names = {
            "self": trainer,
            "torch": torch,
            "device": "cpu",
            "completion_ids": torch.tensor(inputs["tokens"]),
        }
        exec(self.masks, names)
        exec(self.truncated, names)
        width = len(inputs["tokens"][0])
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in names["completion_ids"]]
        return {"mask": mask, "truncated": names["is_truncated"].tolist()}

    # --- one optimizer step ---

    def items(self, mask, processes):
        """The tokens of a whole rollout, from the mask (R, T) of one process."""
        names = {
            "self": SimpleNamespace(accelerator=SimpleNamespace(gather=processes.gather)),
            "completion_mask": mask.long(),
            "tool_mask": None,
        }
        exec(self.count_tokens, names)
        return names["num_items_in_batch"]

    def step_totals(self, inputs, options):
        """The denominator of dapo, times the number of processes, which average their gradients."""
        mask = padded(inputs["mask"])
        steps = inputs["steps"]
        count = len(steps[0])
        processes = Processes(count)

        def items_of(rank):
            rows = [row for pieces in steps for piece in pieces[rank] for row in piece]
            return self.items(mask[rows], processes)

        items = processes.run(items_of)
        answer = {"tokens": []}
        for pieces in steps:
            numbers = []
            for rank, process in enumerate(pieces):
                per_generation = sum(len(other[rank]) for other in steps)
                names = {
                    "inputs": {"num_items_in_batch": items[rank]},
                    "self": SimpleNamespace(
                        accelerator=SimpleNamespace(num_processes=count),
                        current_gradient_accumulation_steps=len(process),
                        args=SimpleNamespace(steps_per_generation=per_generation),
                    ),
                    "mode": "train",
                }
                exec(self.window, names)
                numbers.append([float(names["normalizer"]) * count] * len(process))
            answer["tokens"].append(numbers)
        return answer

    def policy_step(self, inputs, options):
        refuse(options)
        step = Step.of(without_advantage(inputs))
        refuse_uneven(step.processes)
        processes = Processes(len(step.processes))
        entropies = padded(inputs["entropies"]).requires_grad_() if "entropies" in inputs else None

        def loss_of(rank):
            pieces = step.processes[rank]
            items = self.items(step.mask[rows_of(pieces)], processes)
            trainer = loss_trainer(options, processes.count, len(pieces))
            total = 0.0
            for rows in pieces:
                part = step.piece(rows)
                given = {"num_items_in_batch": items}
                if "sampler_cap" in options:
                    sampler = padded(inputs["sampler_logprobs"])[rows]
                    weights = self.sampler_weights(part, sampler, options)
                    given["importance_sampling_ratio"] = weights
                entropy = torch.zeros_like(part.logprobs) if entropies is None else entropies[rows]
                loss = self.micro_batch_loss(trainer, part, entropy, given)
                total = total + self.accumulated(loss, self.grpo.GRPOTrainer, len(pieces))
            return total

        return step_answer(inputs, step.logprobs, processes.run(loss_of), entropies)

    def accumulated(self, loss, trainer_class, micro_batches):
        """What a micro-batch adds to the loss of the step, by the Trainer of transformers."""
        trainer = SimpleNamespace(
            loss_is_scaled_for_ga=trainer_class.loss_is_scaled_for_ga,
            current_gradient_accumulation_steps=micro_batches,
        )
        names = {"self": trainer, "loss": loss}
        exec(self.accumulate, names)
        return names["loss"]

    def sampler_weights(self, part, sampler, options):
        masked = options.get("beyond_cap") == "mask"
        trainer = SimpleNamespace(
            vllm_importance_sampling_mode="token_mask" if masked else "token_truncate",
            vllm_importance_sampling_clip_min=options.get("sampler_floor"),
            vllm_importance_sampling_clip_max=options["sampler_cap"],
        )
        names = {
            "self": trainer,
            "torch": torch,
            "math": math,
            "completion_mask": part.mask.long(),
            "tool_mask": None,
            "old_per_token_logps": part.old,
            "sampling_per_token_logps": sampler,
        }
        exec(self.sampler_ratio, names)
        return names["vllm_importance_sampling_ratio"]

    def geometric_mean_step(self, inputs, options):
        step = Step.of(inputs)
        refuse_uneven(step.processes)

        def loss_of(pieces):
            settings = options | {"ratio": "token", "mean": "rows", "objective": "clip"}
            trainer = loss_trainer(settings, len(step.processes), len(pieces))
            total = 0.0
            for rows in pieces:
                part = step.piece(rows)
                part.advantages = part.advantages[:, 0]
                entropy = torch.zeros_like(part.logprobs)
                loss = self.micro_batch_loss(trainer, part, entropy, {}, self.gmpo_loss)
                total = total + self.accumulated(loss, self.grpo.GRPOTrainer, len(pieces))
            return total

        losses = [loss_of(pieces) for pieces in step.processes]
        return step_answer(inputs, step.logprobs, losses)

    def micro_batch_loss(self, trainer, part, entropy, given, method=None):
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            part.logprobs,
            entropy,
            None,
        )
        prompt = torch.ones(len(part.logprobs), 1)
        batch = given | {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": torch.zeros_like(part.logprobs),
            "completion_mask": part.mask.long(),
            "advantages": part.advantages,
            "old_per_token_logps": part.old,
        }
        if part.ref is not None:
            batch["ref_per_token_logps"] = part.ref
        method = method or self.grpo.GRPOTrainer._compute_loss
        return method(trainer, None, batch)

    # --- KL ---

    def kl_of_row(self, logprobs, old, ref, estimator):
        """The KL of each token of a row (1, T): the loss of that token alone, with advantage 0."""
        options = {
            "objective": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "ratio": "token",
            "mean": "constant",
            "constant": 1,
            "kl": {"coef": 1.0, "estimator": estimator},
        }
        trainer = loss_trainer(options, 1, 1)
        values = []
        for place in range(logprobs.shape[1]):
            mask = torch.zeros_like(logprobs)
            mask[0, place] = 1
            part = Step(logprobs, old, ref, torch.zeros_like(logprobs), mask.bool(), [])
            values.append(self.micro_batch_loss(trainer, part, torch.zeros_like(logprobs), {}))
        return torch.stack(values)[None]

    def kl_tokens(self, inputs, options):
        if options["estimator"] not in ("k3", "k3_weighted"):
            raise NotOfferedError(K3_ALONE)
        answer = {"value": [], "gradient": []}
        old_rows = inputs.get("old_logprobs", inputs["logprobs"])
        for row, old, ref in zip(inputs["logprobs"], old_rows, inputs["ref_logprobs"], strict=True):
            logprobs = padded([row]).requires_grad_()
            value = self.kl_of_row(logprobs, padded([old]), padded([ref]), options["estimator"])
            value.sum().backward()
            answer["value"].append(value[0].tolist())
            answer["gradient"].append(logprobs.grad[0].tolist())
        return answer

    def kl_expected_gradient(self, inputs, options):
        if options["estimator"] not in ("k3", "k3_weighted"):
            raise NotOfferedError(K3_ALONE)

        def estimate(logprobs, old, ref):
            return self.kl_of_row(logprobs, old, ref, options["estimator"])

        return expected_gradient(inputs, estimate)

    def soft_overlong(self, inputs, options):
        reward = self.soft_punishment(options["max_tokens"], options["cache"])
        return {"penalties": reward([[0] * length for length in inputs["lengths"]])}

    # --- pairs ---

    def preference_loss(self, inputs, options):
        if options["label_smoothing"] and options["loss"] == "sigmoid":
            raise NotOfferedError("label_smoothing acts in robust and exo_pair; sigmoid ignores it")
        if options["reference_free"]:
            raise NotOfferedError("there is a reference")
        chosen, rejected = inputs["chosen_logprobs"], inputs["rejected_logprobs"]
        logprobs = padded(chosen + rejected).requires_grad_()
        pieces = pieces_of(inputs, len(chosen))[0]
        total = 0.0
        for pairs in pieces:
            loss = self.pair_loss(logprobs, pairs, inputs, options)
            total = total + self.accumulated(loss, self.dpo.DPOTrainer, len(pieces))
        total.backward()
        better, worse = logprobs.grad.chunk(2)
        return {
            "loss": total.item(),
            "chosen_gradient": rows_like(better, chosen),
            "rejected_gradient": rows_like(worse, rejected),
        }

    def pair_loss(self, logprobs, pairs, inputs, options):
        """The loss of one micro-batch. In `logprobs` (2 B, T) the chosen come first."""
        tables = inputs["chosen_logprobs"] + inputs["rejected_logprobs"]
        rows = pairs + [pair + len(tables) // 2 for pair in pairs]
        # A prompt of one token stands before each completion.
        mask = padded([[0, *[1] * len(row)] for row in tables]).long()[rows]
        part = logprobs[rows]
        zeros = torch.zeros_like(part)
        outputs = SimpleNamespace(
            log_probs=part,
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
        return self.dpo.DPOTrainer._compute_loss(trainer, lambda **given: outputs, batch, False)

    def reward_model_loss(self, inputs, options):
        chosen = torch.tensor(inputs["chosen"], dtype=torch.float64, requires_grad=True)
        rejected = torch.tensor(inputs["rejected"], dtype=torch.float64, requires_grad=True)
        pieces = pieces_of(inputs, len(chosen))[0]
        trainer = SimpleNamespace(**trainer_basics(1))
        trainer.args = SimpleNamespace(center_rewards_coefficient=options["center_coef"] or None)
        total = 0.0
        for pairs in pieces:
            outputs = SimpleNamespace(logits=torch.cat([chosen[pairs], rejected[pairs]])[:, None])
            batch = {"attention_mask": torch.ones(2 * len(pairs), 1)}
            loss = self.reward_model.RewardTrainer.compute_loss(
                trainer, lambda outputs=outputs, **given: outputs, batch
            )
            total = total + self.accumulated(loss, self.reward_model.RewardTrainer, len(pieces))
        total.backward()
        gradients = {
            "chosen_gradient": chosen.grad.tolist(),
            "rejected_gradient": rejected.grad.tolist(),
        }
        return {"loss": total.item()} | gradients


def without_advantage(inputs):
    """A row without a reward has advantage 0, by `torch.nan_to_num`, and stays in the mask."""
    if "scored" not in inputs:
        return inputs
    pairs = zip(inputs["advantages"], inputs["scored"], strict=True)
    return inputs | {"advantages": [advantage * scored for advantage, scored in pairs]}


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


def refuse_uneven(processes):
    if len({len(rows) for process in processes for rows in process}) > 1:
        raise NotOfferedError("micro-batches have one size, per_device_train_batch_size")


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
    if options["objective"] not in ("clip", "soft_gate"):
        raise NotOfferedError(f"no loss_type has the objective {options['objective']}")
    if options["objective"] == "soft_gate" and options["mean"] != "rows":
        raise NotOfferedError("sapo has a mean over rows")
    if "max_ratio" in options:
        raise NotOfferedError("no loss_type is DCPO's")
    if options["ratio"] == "sequence_token":
        raise NotOfferedError("importance_sampling_level is token or sequence")
    if options["mean"] not in LOSS_TYPES:
        raise NotOfferedError(f"no loss_type is a mean over {options['mean']}")
    if (options.get("kl") or {}).get("estimator") in ("k1", "k2"):
        raise NotOfferedError(K3_ALONE)
