"""What verl computes: core_algos.py, its loss functions, and the statements that count for them.

The options come from verl's own YAML files: what a case does not need is at its default.
"""

import ast
import copy
from types import SimpleNamespace

import numpy as np
import torch
import yaml

from sources import Source, version_in
from tensors import (
    coefficients_after,
    expected_kl_answer,
    flat,
    group_numbers,
    grouped,
    kl_answer,
    on_last_token,
    ones_like,
    padded,
    policy_answer,
    refuse_if,
    rows_like,
    totals_answer,
    value_answer,
)

NO_DUAL_CLIP = 1e9  # `clip_ratio_c` cannot be turned off,
NO_VALUE_CLIP = 1e9  # nor can `cliprange_value`.
MODES = {  # of `loss_mode`, by objective
    "soft_gate": "sapo",
    "divergence": "dppo_tv",
    "geometric_mean": "geo_mean",
    "weighted_logprob": "cispo",
}
ESTIMATORS = {  # of `adv_estimator`, by baseline and deviation
    ("leave_one_out", "none"): "rloo",
    ("group_mean", "batch_of_centred"): "reinforce_plus_plus_baseline",
    ("group_mean", "group"): "grpo",
    ("group_mean", "none"): "grpo",
}
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


def load_core(folder, helpers):
    """The whole of core_algos.py, with stand-ins for the classes of configurations."""
    source = Source(folder / "trainer" / "ppo" / "core_algos.py")
    return source.whole(
        ["verl", "omegaconf"],
        verl_F=helpers,
        DictConfig=type("DictConfig", (), {}),
        AlgoConfig=type("AlgoConfig", (), {}),
        ActorConfig=Configuration,
        deprecated=lambda name: lambda function: function,
    )


def load_losses(folder, core, helpers):
    """`ppo_loss` and `value_loss`, which the engine calls for each micro-batch."""
    source = Source(folder / "workers" / "utils" / "losses.py")
    return source.definitions(
        "ppo_loss",
        "value_loss",
        no_padding_2_padding=lambda values, data: values,
        Metric=Metric,
        AggregationType=SimpleNamespace(SUM="sum", MEAN="mean"),
        masked_mean=helpers.masked_mean,
        **{name: getattr(core, name) for name in FROM_CORE},
    )


def load_defaults(folder):
    """The sections `actor`, `algorithm` and `rollout` of the configuration of a run."""

    def read(name):
        return yaml.safe_load((folder / "trainer" / "config" / name).read_text(encoding="utf-8"))

    algorithm = read("ppo_trainer.yaml")["algorithm"]
    algorithm["rollout_correction"] = read("algorithm/rollout_correction.yaml")
    return {
        "actor": read("actor/actor.yaml"),
        "algorithm": algorithm,
        "rollout": read("rollout/rollout.yaml"),
    }


class Adapter:
    def __init__(self, packages):
        self.row = None  # settings of settings.toml, for those that a case needs
        self.name = f"verl {version_in(packages, 'verl')}"
        folder = packages / "verl"
        self.defaults = load_defaults(folder)
        self.helpers = Source(folder / "utils" / "torch_functional.py").definitions(*HELPERS)
        self.core = load_core(folder, self.helpers)
        self.losses = load_losses(folder, self.core, self.helpers)
        correction = Source(folder / "trainer" / "ppo" / "rollout_corr_helper.py")
        self.correction = correction.definitions(
            *CORRECTION, verl_F=self.helpers, compute_is_metrics=lambda **values: {}
        )

        engine = Source(folder / "workers" / "engine" / "fsdp" / "transformer_impl.py")
        self.count_tokens = engine.statements(
            "forward_backward_batch", "batch_num_tokens =", "tu.assign_non_tensor(data, dp_size"
        )
        trainer = Source(folder / "trainer" / "ppo" / "ray_trainer.py")
        first = "ppo_mini_batch_size ="
        last = "tu.assign_non_tensor("
        self.count_actor_rows = trainer.statements("_update_actor", first, last)
        self.count_critic_rows = trainer.statements("_update_critic", first, last)
        self.kl_in_reward = trainer.statements("apply_kl_penalty", "kld =", "token_level_rewards =")
        managers = folder / "experimental" / "reward_loop" / "reward_manager"
        self.overlong = Source(managers / "dapo.py").statements(
            "run_single", "overlong_buffer_len =", "overlong_reward ="
        )

    # --- settings ---

    def parsed(self, settings):
        """{name: value} of settings such as actor.clip_ratio_c=1e9; a new name begins with +."""
        values = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            try:
                values[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                values[name] = text
        return values

    def config(self, needed):
        """The configuration with the settings of a row, or else those that are needed."""
        settings = needed if self.row is None else self.row
        config = copy.deepcopy(self.defaults)
        for name, value in settings.items():
            *sections, key = name.removeprefix("+").split(".")
            section = config
            for part in sections:
                section = section[part]
            if name.startswith("+") == (key in section):
                raise LookupError(f"{name}: a name that is there has no +, and a new one has it")
            section[key] = value
        return config

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        rewards = flat(groups)
        refuse_if(None in rewards, "a row must have a reward: NaN would reach its whole group")
        kind = (options["baseline"], options["deviation"])
        refuse_if(
            kind not in ESTIMATORS, f"no estimator has baseline {kind[0]} and deviation {kind[1]}"
        )
        needed = {
            "algorithm.adv_estimator": ESTIMATORS[kind],
            "algorithm.norm_adv_by_std_in_grpo": kind[1] == "group",
            "rollout.n": max(map(len, groups)),
        }
        config = self.config(needed)
        algorithm = config["algorithm"]
        refuse_small_groups(config, groups)
        refuse_if(algorithm["adv_estimator"] == "gae", "the advantages are those of a critic")
        # Reward managers give float32, here to the only token of each row.
        rewards = torch.tensor(rewards)[:, None]
        index = np.array(group_numbers(groups))
        estimator = self.core.get_adv_estimator_fn(algorithm["adv_estimator"])
        given = {}
        if algorithm["adv_estimator"] == "grpo":
            given["norm_adv_by_std_in_grpo"] = algorithm["norm_adv_by_std_in_grpo"]
        advantages, _ = estimator(rewards, torch.ones_like(rewards), index, **given)
        return {"advantages": grouped(advantages[:, 0].tolist(), groups)}

    def decoupled_advantages(self, inputs, options):
        groups = inputs["parts"][0]
        columns = {}
        for number, part in enumerate(inputs["parts"]):
            columns[f"part {number}"] = flat(part)
        refuse_if(None in flat(columns.values()), "a row must have each part of the reward")
        rows = len(flat(groups))
        needed = {
            "algorithm.adv_estimator": "gdpo",
            "rollout.n": len(groups[0]),
            "+algorithm.gdpo_reward_keys": list(columns),
            "+algorithm.gdpo_reward_weights": options["weights"],
        }
        config = self.config(needed)
        refuse_small_groups(config, groups)
        is_gdpo = config["algorithm"]["adv_estimator"] == "gdpo"
        refuse_if(not is_gdpo, "another estimator takes the sum of the parts")
        # A prompt of one token, and a completion of one.
        batch = {"prompts": torch.ones(rows, 1), "attention_mask": torch.ones(rows, 2).long()}
        advantages, _ = self.core.compute_gdpo_outcome_advantage(
            torch.zeros(rows, 1),
            torch.ones(rows, 1),
            np.array(group_numbers(groups)),
            config=Configuration(**config["algorithm"]),
            non_tensor_batch=columns,
            batch=batch,
        )
        return {"advantages": grouped(advantages[:, 0].tolist(), groups)}

    def completion_mask(self, inputs, options):
        tokens = torch.tensor(inputs["tokens"])
        mask = self.helpers.get_response_mask(tokens, options["stop_tokens"])
        return {"mask": mask.tolist()}

    # --- one optimizer step ---

    def totals(self, count_rows, parts, processes):
        """What engine and trainer count, as they put it into the batch of one process."""
        data = Batch(loss_mask=torch.cat([part.mask for part in parts]))
        reduction = SimpleNamespace(SUM="sum")
        distributed = SimpleNamespace(all_reduce=processes.all_reduce, ReduceOp=reduction)
        worker = SimpleNamespace(
            get_data_parallel_group=lambda: None,
            get_data_parallel_size=lambda: processes.count,
            config=trainer_config(processes.rows),
        )
        tools = SimpleNamespace(assign_non_tensor=lambda batch, **values: batch.update(values))
        self.count_tokens(
            self=worker,
            tu=tools,
            data=data,
            torch=SimpleNamespace(distributed=distributed),
            get_device_id=lambda: "cpu",
        )
        count_rows(
            self=worker,
            tu=tools,
            batch_td=data,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
        )
        return {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}

    def step_totals(self, inputs, options):
        def totals_of(parts, processes):
            return [self.totals(self.count_actor_rows, parts, processes)] * len(parts)

        return totals_answer(inputs, totals_of)

    def policy_step(self, inputs, options):
        refuse(inputs, options)
        config = self.config(needed_for(options))
        actor = Configuration(**config["actor"], global_batch_info={})
        correction = config["algorithm"]["rollout_correction"]

        def losses_of(parts, processes):
            totals = self.totals(self.count_actor_rows, parts, processes)
            for part in parts:
                batch = Batch(
                    totals,
                    response_mask=part.mask,
                    old_log_probs=part.old,
                    advantages=part.advantages,
                )
                if part.ref is not None:
                    batch["ref_log_prob"] = part.ref
                if correction["rollout_is"]:
                    batch["rollout_is_weights"] = self.sampler_weights(part, correction)
                output = {"log_probs": part.logprobs, "entropy": part.entropies}
                loss, _ = self.losses.ppo_loss(actor, output, batch)
                yield loss

        answer = policy_answer(inputs, losses_of)
        if options["objective"] == "divergence":
            del answer["loss"]  # It is that of r, as a constant, times the log-prob.
        return answer

    def weighted_logprob_step(self, inputs, options):
        return self.policy_step(
            inputs, options | {"objective": "weighted_logprob", "ratio": "token"}
        )

    def geometric_mean_step(self, inputs, options):
        options = options | {"objective": "geometric_mean", "ratio": "token", "mean": "rows"}
        return self.policy_step(inputs, options)

    def sampler_weights(self, part, correction):
        weights, _ = self.correction.compute_rollout_correction_weights(
            part.old - part.sampler,
            part.mask,
            rollout_is=correction["rollout_is"],
            rollout_is_threshold=correction["rollout_is_threshold"],
        )
        return weights

    # --- KL ---

    def kl(self, logprobs, old, ref, estimator):
        # k3+ has the value of k3 and the gradient of k2: on policy that of the weighted k3.
        kind = "k3+" if estimator == "k3_weighted" else estimator
        return self.core.kl_penalty(logprobs, ref, kind)

    def kl_tokens(self, inputs, options):
        is_weighted = options["estimator"] == "k3_weighted"
        refuse_if(is_weighted, "no KL is weighted by the ratio")
        return kl_answer(inputs, options, self.kl)

    def kl_expected_gradient(self, inputs, options):
        return expected_kl_answer(inputs, options, self.kl)

    # --- PPO ---

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        logprobs = {
            "old_log_probs": padded(table),
            "ref_log_prob": padded(inputs["ref_logprobs"]),
        }
        names = self.kl_in_reward(
            core_algos=self.core,
            data=SimpleNamespace(batch=logprobs),
            kl_penalty="kl",
            response_mask=padded(ones_like(table)),
            token_level_scores=on_last_token(inputs["scores"], table),
            kl_ctrl=SimpleNamespace(value=options["kl_coef"]),
        )
        return {"rewards": rows_like(names.token_level_rewards, table)}

    def gae(self, inputs, options):
        algorithm = self.config({})["algorithm"]
        refuse_if(algorithm["adv_estimator"] != "gae", "the estimator is another")
        values = padded(inputs["values"])
        mask = padded(inputs["mask"])
        _, returns = self.core.compute_gae_advantage_return(
            padded(inputs["rewards"]), values, mask, options["gamma"], options["lambda"]
        )
        # It returns whitened advantages. Before that they were the returns less the values.
        advantages = (returns - values) * mask
        return {"advantages": advantages.tolist(), "returns": (returns * mask).tolist()}

    def whiten(self, inputs, options):
        refuse_if(options["std_ddof"] != 1, "masked_whiten has ddof 1")
        mask = padded(inputs["mask"])
        whitened = self.helpers.masked_whiten(padded(inputs["advantages"]), mask)
        return {"advantages": (whitened * mask).tolist()}

    def value_loss(self, inputs, options):
        config = Configuration(
            cliprange_value=options["value_clip"] or NO_VALUE_CLIP,
            loss_agg_mode=MEANS[options["mean"]],
            loss_scale_factor=None,
        )

        def losses_of(parts, processes):
            totals = self.totals(self.count_critic_rows, parts, processes)
            for part in parts:
                batch = Batch(
                    totals, values=part.old, returns=part.returns, response_mask=part.mask
                )
                loss, _ = self.losses.value_loss(config, {"values": part.values}, batch)
                yield loss

        return value_answer(inputs, losses_of)

    def adaptive_kl(self, inputs, options):
        return coefficients_after(self.core.AdaptiveKLController, inputs, options)

    def soft_overlong(self, inputs, options):
        penalties = []
        buffer = SimpleNamespace(len=options["cache"], penalty_factor=1.0)
        manager = SimpleNamespace(overlong_buffer_cfg=buffer, max_resp_len=options["max_tokens"])
        for length in inputs["lengths"]:
            names = self.overlong(self=manager, valid_response_length=torch.tensor(length))
            penalties.append(float(names.overlong_reward))
        return {"penalties": penalties}


def trainer_config(rows):
    """The step has rows / n prompts, and n rows a prompt; only the product counts."""
    sizes = Configuration(ppo_mini_batch_size=rows, ppo_epochs=1, data_loader_seed=0, shuffle=False)
    actor_rollout_ref = Configuration(actor=sizes, rollout=Configuration(n=1))
    return Configuration(critic=sizes, actor_rollout_ref=actor_rollout_ref)


def needed_for(options):
    """The settings that a case of a step needs."""
    bound = options.get("max_divergence")
    by_ratio = "vanilla" if options["ratio"] == "token" else "gspo"
    needed = {
        "actor.policy_loss.loss_mode": MODES.get(options["objective"], by_ratio),
        "actor.loss_agg_mode": MEANS[options["mean"]],
        "actor.loss_scale_factor": options.get("constant"),
        "actor.clip_ratio_c": options.get("dual_clip", NO_DUAL_CLIP),
        "actor.clip_ratio_low": options.get("clip_low", bound),
        "actor.clip_ratio_high": options.get("clip_high", bound),
        "actor.entropy_coeff": options.get("entropy_coef", 0.0),
    }
    if options["objective"] == "soft_gate":
        needed["actor.tau_pos"] = options["tau_positive"]
        needed["actor.tau_neg"] = options["tau_negative"]
    if "kl" in options:
        needed["actor.use_kl_loss"] = True
        needed["actor.kl_loss_type"] = options["kl"]["estimator"]
        needed["actor.kl_loss_coef"] = options["kl"]["coef"]
    if "sampler_cap" in options:
        threshold = options["sampler_cap"]
        if options.get("beyond_cap") == "mask":
            # Two bounds mask. The lower one must be positive.
            threshold = f"{options.get('sampler_floor', 1e-9)}_{threshold}"
        needed["algorithm.rollout_correction.rollout_is"] = "token"
        needed["algorithm.rollout_correction.rollout_is_threshold"] = threshold
    return needed


def refuse_small_groups(config, groups):
    """A rollout samples `rollout.n` completions of a prompt: by default one."""
    is_small = config["rollout"]["n"] < max(map(len, groups))
    refuse_if(is_small, "rollout.n is smaller than a group")


def refuse(inputs, options):
    objective = options["objective"]
    mean = options["mean"]
    estimator = (options.get("kl") or {}).get("estimator")
    is_known = objective in ("clip", *MODES)
    refuse_if(not is_known, f"no loss_mode has the objective {objective}")
    refuse_if(objective == "soft_gate" and mean != "rows", "sapo has a mean over rows")
    refuse_if("max_ratio" in options, "no loss_mode is DCPO's")
    refuse_if(mean not in MEANS, f"no loss_agg_mode is a mean over {mean}")
    refuse_if(estimator == "k3_weighted", "no KL is weighted by the ratio")
    refuse_if("scored" in inputs, "a row must have a reward")
