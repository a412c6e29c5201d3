"""What verl computes: core_algos.py, its loss functions, and the statements that count for them."""

from types import SimpleNamespace

import numpy as np
import torch

from sources import Source, version_in
from tensors import (
    NotOfferedError,
    Processes,
    Step,
    expected_gradient,
    on_last_token,
    ones_like,
    padded,
    pieces_of,
    rows_like,
    rows_of,
    step_answer,
)

NO_DUAL_CLIP = 1e9  # `clip_ratio_c` cannot be turned off,
NO_VALUE_CLIP = 1e9  # nor can `cliprange_value`.
MODES = {"soft_gate": "sapo", "divergence": "dppo_tv", "geometric_mean": "geo_mean"}
MEANS = {
    "tokens": "token-mean",
    "rows": "seq-mean-token-mean",
    "sums": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
HELPERS = [
    "masked_sum",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "clip_by_value",
    "get_response_mask",
]
FROM_CORE = ["agg_loss", "compute_value_loss", "get_policy_loss_fn", "kl_penalty"]
CORRECTION = ["SAFETY_BOUND", "_parse_rollout_is_threshold", "compute_rollout_correction_weights"]


class Configuration(SimpleNamespace):
    """verl's configurations can be read like a dictionary too."""

    def get(self, name, default=None):
        return getattr(self, name, default)


class Batch(dict):
    """As much of a TensorDict as the loss functions ask for."""

    def select(self, *names):
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self):
        return self


class Metric:
    """A number for the log, which nobody reads here."""

    def __init__(self, value, aggregation):
        self.value = value

    @staticmethod
    def from_dict(values, aggregation):
        return values


def load_helpers(folder):
    """The masked sums and means."""
    source = Source(folder / "utils" / "torch_functional.py")
    return SimpleNamespace(**source.definitions({"torch": torch}, *HELPERS))


def load_core(folder, helpers):
    """The whole of core_algos.py, with stand-ins for the classes of configurations."""
    names = {
        "verl_F": helpers,
        "DictConfig": type("DictConfig", (), {}),
        "AlgoConfig": type("AlgoConfig", (), {}),
        "ActorConfig": Configuration,
        "deprecated": lambda name: lambda function: function,
    }
    source = Source(folder / "trainer" / "ppo" / "core_algos.py")
    return SimpleNamespace(**source.whole(names, without=["verl", "omegaconf"]))


def load_losses(folder, core, helpers):
    """`ppo_loss` and `value_loss`, which the engine calls for each micro-batch."""
    names = {name: getattr(core, name) for name in FROM_CORE}
    names |= {
        "no_padding_2_padding": lambda values, data: values,
        "Metric": Metric,
        "AggregationType": SimpleNamespace(SUM="sum", MEAN="mean"),
        "masked_mean": helpers.masked_mean,
        "torch": torch,
    }
    source = Source(folder / "workers" / "utils" / "losses.py")
    return SimpleNamespace(**source.definitions(names, "ppo_loss", "value_loss"))


def load_correction(folder, helpers):
    """The function that computes weights for another sampler's tokens."""
    names = {"torch": torch, "verl_F": helpers, "compute_is_metrics": lambda **values: {}}
    source = Source(folder / "trainer" / "ppo" / "rollout_corr_helper.py")
    return source.definitions(names, *CORRECTION)["compute_rollout_correction_weights"]


class Adapter:
    def __init__(self, packages):
        self.name = f"verl {version_in(packages, 'verl')}"
        folder = packages / "verl"
        self.helpers = load_helpers(folder)
        self.core = load_core(folder, self.helpers)
        self.losses = load_losses(folder, self.core, self.helpers)
        self.correction_weights = load_correction(folder, self.helpers)

        engine = Source(folder / "workers" / "engine" / "fsdp" / "transformer_impl.py")
        self.count_tokens = engine.statements(
            "forward_backward_batch", "batch_num_tokens =", "tu.assign_non_tensor(data, dp_size"
        )
        trainer = Source(folder / "trainer" / "ppo" / "ray_trainer.py")
        first, last = "ppo_mini_batch_size =", "tu.assign_non_tensor("
        self.count_rows = {
            "actor": trainer.statements("_update_actor", first, last),
            "critic": trainer.statements("_update_critic", first, last),
        }
        self.kl_in_reward = trainer.statements("apply_kl_penalty", "kld =", "token_level_rewards =")
        managers = folder / "experimental" / "reward_loop" / "reward_manager"
        self.overlong = Source(managers / "dapo.py").statements(
            "run_single", "overlong_buffer_len =", "overlong_reward ="
        )

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        if any(reward is None for group in groups for reward in group):
            raise NotOfferedError("a row must have a reward: NaN would reach its whole group")
        # Reward managers give float32, here to the only token of each row.
        rewards = torch.tensor([[reward] for group in groups for reward in group])
        index = np.array([number for number, group in enumerate(groups) for _ in group])
        advantages, _ = self.estimator(options)(rewards, torch.ones_like(rewards), index)
        flat = iter(advantages[:, 0].tolist())
        return {"advantages": [[next(flat) for _ in group] for group in groups]}

    def estimator(self, options):
        baseline, deviation = kind = options["baseline"], options["deviation"]
        if kind == ("leave_one_out", "none"):
            return self.core.compute_rloo_outcome_advantage
        if kind == ("group_mean", "batch_of_centred"):
            return self.core.compute_reinforce_plus_plus_baseline_outcome_advantage
        if kind not in (("group_mean", "group"), ("group_mean", "none")):
            raise NotOfferedError(f"no estimator has baseline {baseline} and deviation {deviation}")

        def grpo(rewards, mask, index):
            return self.core.compute_grpo_outcome_advantage(
                rewards, mask, index, norm_adv_by_std_in_grpo=deviation == "group"
            )

        return grpo

    def decoupled_advantages(self, inputs, options):
        parts = inputs["parts"]
        if any(reward is None for groups in parts for group in groups for reward in group):
            raise NotOfferedError("a row must have each part of the reward")
        columns = {}
        for number, groups in enumerate(parts):
            columns[f"part {number}"] = [reward for group in groups for reward in group]
        rows = len(columns["part 0"])
        config = Configuration(gdpo_reward_keys=list(columns), gdpo_reward_weights=options["weights"])
        index = np.array([number for number, group in enumerate(parts[0]) for _ in group])
        # A prompt of one token, and a completion of one.
        batch = {"prompts": torch.ones(rows, 1), "attention_mask": torch.ones(rows, 2).long()}
        advantages, _ = self.core.compute_gdpo_outcome_advantage(
            torch.zeros(rows, 1),
            torch.ones(rows, 1),
            index,
            config=config,
            non_tensor_batch=columns,
            batch=batch,
        )
        flat = iter(advantages[:, 0].tolist())
        return {"advantages": [[next(flat) for _ in group] for group in parts[0]]}

    def completion_mask(self, inputs, options):
        tokens = torch.tensor(inputs["tokens"])
        mask = self.helpers.get_response_mask(tokens, options["stop_tokens"])
        return {"mask": mask.tolist()}

    # --- one optimizer step ---

    def totals(self, model, masks, rows, processes):
        """What the engine and the trainer count, as they put it into the batch of one process.

        `masks` (R, T) has the rows of this process; `rows` counts those of the optimizer step.
        """
        data = Batch(loss_mask=masks)
        distributed = SimpleNamespace(all_reduce=processes.all_reduce, ReduceOp=SimpleNamespace(SUM="sum"))
        names = {
            "calculate_entropy": False,
            "distillation_use_topk": False,
            "distillation_only": False,
            "data": data,
            "batch_td": data,
            "get_device_id": lambda: "cpu",
            "torch": SimpleNamespace(distributed=distributed),
            "tu": SimpleNamespace(assign_non_tensor=lambda batch, **values: batch.update(values)),
            "self": SimpleNamespace(
                get_data_parallel_group=lambda: None,
                get_data_parallel_size=lambda: processes.count,
                config=trainer_config(rows),
            ),
        }
        exec(self.count_tokens, names)
        exec(self.count_rows[model], names)
        return {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}

    def step_totals(self, inputs, options):
        if "scored" in inputs:
            raise NotOfferedError("a row must have a reward")
        mask = padded(inputs["mask"])
        answer = {"tokens": [], "rows": []}
        for pieces in inputs["steps"]:
            processes = Processes(len(pieces))
            rows = sum(len(piece) for process in pieces for piece in process)

            def totals_of(rank, pieces=pieces, processes=processes, rows=rows):
                return self.totals("actor", mask[rows_of(pieces[rank])], rows, processes)

            totals = processes.run(totals_of)
            for name, key in (("tokens", "batch_num_tokens"), ("rows", "global_batch_size")):
                answer[name].append([])
                for counted, process in zip(totals, pieces, strict=True):
                    answer[name][-1].append([counted[key]] * len(process))
        return answer

    def policy_step(self, inputs, options):
        refuse(inputs, options)
        step = Step.of(inputs)
        config = actor_config(options)
        processes = Processes(len(step.processes))
        entropies = padded(inputs["entropies"]).requires_grad_() if "entropies" in inputs else None

        def loss_of(rank):
            rows_of_process = rows_of(step.processes[rank])
            totals = self.totals("actor", step.mask[rows_of_process], len(step.mask), processes)
            total = 0.0
            for rows in step.processes[rank]:
                part = step.piece(rows)
                batch = Batch(
                    totals,
                    response_mask=part.mask,
                    old_log_probs=part.old,
                    advantages=part.advantages,
                )
                if part.ref is not None:
                    batch["ref_log_prob"] = part.ref
                if "sampler_cap" in options:
                    batch["rollout_is_weights"] = self.sampler_weights(inputs, options, part, rows)
                output = {"log_probs": part.logprobs}
                if entropies is not None:
                    output["entropy"] = entropies[rows]
                loss, _ = self.losses.ppo_loss(config, output, batch)
                total = total + loss
            return total

        answer = step_answer(inputs, step.logprobs, processes.run(loss_of), entropies)
        if options["objective"] == "divergence":
            del answer["loss"]  # It is that of r, as a constant, times the log-prob.
        return answer

    def geometric_mean_step(self, inputs, options):
        options = options | {"objective": "geometric_mean", "ratio": "token", "mean": "rows"}
        return self.policy_step(inputs, options)

    def sampler_weights(self, inputs, options, part, rows):
        sampler = padded(inputs["sampler_logprobs"])[rows]
        threshold = options["sampler_cap"]
        if options.get("beyond_cap") == "mask":
            # Two bounds mask. The lower one must be positive.
            threshold = f"{options.get('sampler_floor', 1e-9)}_{threshold}"
        weights, _ = self.correction_weights(
            part.old - sampler,
            part.mask,
            rollout_is="token",
            rollout_is_threshold=threshold,
        )
        return weights

    # --- KL ---

    def kl_tokens(self, inputs, options):
        if options["estimator"] == "k3_weighted":
            raise NotOfferedError("no KL is weighted by the ratio")
        logprobs = padded(inputs["logprobs"]).requires_grad_()
        value = self.core.kl_penalty(logprobs, padded(inputs["ref_logprobs"]), options["estimator"])
        value.sum().backward()
        table = inputs["logprobs"]
        return {"value": rows_like(value, table), "gradient": rows_like(logprobs.grad, table)}

    def kl_expected_gradient(self, inputs, options):
        # k3+ has the value of k3 and the gradient of k2: on policy that of the weighted k3.
        estimator = {"k3_weighted": "k3+"}.get(options["estimator"], options["estimator"])

        def estimate(logprobs, old, ref):
            return self.core.kl_penalty(logprobs, ref, estimator)

        return expected_gradient(inputs, estimate)

    # --- PPO ---

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        names = {
            "core_algos": self.core,
            "data": SimpleNamespace(
                batch={
                    "old_log_probs": padded(table),
                    "ref_log_prob": padded(inputs["ref_logprobs"]),
                }
            ),
            "kl_penalty": "kl",
            "response_mask": padded(ones_like(table)),
            "token_level_scores": on_last_token(inputs["scores"], table),
            "kl_ctrl": SimpleNamespace(value=options["kl_coef"]),
        }
        exec(self.kl_in_reward, names)
        return {"rewards": rows_like(names["token_level_rewards"], table)}

    def gae(self, inputs, options):
        values, mask = padded(inputs["values"]), padded(inputs["mask"])
        _, returns = self.core.compute_gae_advantage_return(
            padded(inputs["rewards"]), values, mask, options["gamma"], options["lambda"]
        )
        # It returns whitened advantages. Before that they were the returns less the values.
        advantages = (returns - values) * mask
        return {"advantages": advantages.tolist(), "returns": (returns * mask).tolist()}

    def whiten(self, inputs, options):
        if options["std_ddof"] != 1:
            raise NotOfferedError("masked_whiten has ddof 1")
        mask = padded(inputs["mask"])
        whitened = self.helpers.masked_whiten(padded(inputs["advantages"]), mask)
        return {"advantages": (whitened * mask).tolist()}

    def value_loss(self, inputs, options):
        values = padded(inputs["values"]).requires_grad_()
        mask = padded(ones_like(inputs["values"])).bool()
        old, returns = padded(inputs["old_values"]), padded(inputs["returns"])
        config = Configuration(
            cliprange_value=options["value_clip"] or NO_VALUE_CLIP,
            loss_agg_mode=MEANS[options["mean"]],
            loss_scale_factor=None,
        )
        pieces = pieces_of(inputs, len(mask))
        processes = Processes(len(pieces))

        def loss_of(rank):
            totals = self.totals("critic", mask[rows_of(pieces[rank])], len(mask), processes)
            total = 0.0
            for rows in pieces[rank]:
                given = {"values": old[rows], "returns": returns[rows], "response_mask": mask[rows]}
                batch = Batch(totals | given)
                loss, _ = self.losses.value_loss(config, {"values": values[rows]}, batch)
                total = total + loss
            return total

        loss = torch.stack(processes.run(loss_of)).mean()
        loss.backward()
        return {"loss": loss.item(), "gradient": rows_like(values.grad, inputs["values"])}

    def adaptive_kl(self, inputs, options):
        target, horizon = options["target"], options["horizon"]
        coefficients = []
        for kl in inputs["kl"]:
            controller = self.core.AdaptiveKLController(inputs["kl_coef"], target, horizon)
            controller.update(kl, options["samples"])
            coefficients.append(float(controller.value))
        return {"kl_coef": coefficients}

    def soft_overlong(self, inputs, options):
        penalties = []
        buffer = SimpleNamespace(len=options["cache"], penalty_factor=1.0)
        manager = SimpleNamespace(overlong_buffer_cfg=buffer, max_resp_len=options["max_tokens"])
        for length in inputs["lengths"]:
            names = {"self": manager, "valid_response_length": torch.tensor(length)}
            exec(self.overlong, names)
            penalties.append(float(names["overlong_reward"]))
        return {"penalties": penalties}


def trainer_config(rows):
    """The step has rows / n prompts, and n rows a prompt; only the product counts."""
    sizes = Configuration(ppo_mini_batch_size=rows, ppo_epochs=1, data_loader_seed=0, shuffle=False)
    actor_rollout_ref = Configuration(actor=sizes, rollout=Configuration(n=1))
    return Configuration(critic=sizes, actor_rollout_ref=actor_rollout_ref)


def actor_config(options):
    kl = options.get("kl") or {}
    bound = options.get("max_divergence")
    by_ratio = "vanilla" if options["ratio"] == "token" else "gspo"
    return Configuration(
        clip_ratio=0.2,
        clip_ratio_low=options.get("clip_low", bound),
        clip_ratio_high=options.get("clip_high", bound),
        clip_ratio_c=options.get("dual_clip", NO_DUAL_CLIP),
        tau_pos=options.get("tau_positive"),
        tau_neg=options.get("tau_negative"),
        loss_agg_mode=MEANS[options["mean"]],
        loss_scale_factor=options.get("constant"),
        entropy_coeff=options.get("entropy_coef", 0.0),
        use_kl_loss=bool(kl),
        kl_loss_type=kl.get("estimator"),
        kl_loss_coef=kl.get("coef"),
        policy_loss={"loss_mode": MODES.get(options["objective"], by_ratio)},
        global_batch_info={},
    )


def refuse(inputs, options):
    if options["objective"] not in ("clip", *MODES):
        raise NotOfferedError(f"no loss_mode has the objective {options['objective']}")
    if options["objective"] == "soft_gate" and options["mean"] != "rows":
        raise NotOfferedError("sapo has a mean over rows")
    if "max_ratio" in options:
        raise NotOfferedError("no loss_mode is DCPO's")
    if options["mean"] not in MEANS:
        raise NotOfferedError(f"no loss_agg_mode is a mean over {options['mean']}")
    if (options.get("kl") or {}).get("estimator") == "k3_weighted":
        raise NotOfferedError("no KL is weighted by the ratio")
    if "scored" in inputs:
        raise NotOfferedError("a row must have a reward")
