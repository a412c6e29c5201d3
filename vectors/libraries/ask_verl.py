"""What verl computes: core_algos.py, its loss functions, and the statements that count for them.

Options come from verl's own YAML files. What a case does not need has its default.
"""

import copy
from types import SimpleNamespace

import numpy as np
import torch
import yaml

from library import PPOLibrary, refuse_if
from sources import Source, version_in
from tensors import (
    coefficients_after,
    flat,
    group_numbers,
    grouped,
    on_last_token,
    policy_answer,
    totals_answer,
)

NO_DUAL_CLIP = 1e9  # `clip_ratio_c` cannot be turned off,
NO_VALUE_CLIP = 1e9  # nor can `cliprange_value`.
MODES = {  # `loss_mode` by objective
    "soft_gate": "sapo",
    "divergence": "dppo_tv",
    "geometric_mean": "geo_mean",
    "weighted_logprob": "cispo",
    "unclipped": "kl_cov",
}
MEANS = {
    "tokens": "token-mean",
    "rows": "seq-mean-token-mean",
    "sums": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
ESTIMATORS = {  # `adv_estimator`
    ("leave_one_out", "none"): "rloo",
    ("group_mean", "batch_of_centred"): "reinforce_plus_plus_baseline",
    ("group_mean", "group"): "grpo",
    ("group_mean", "none"): "grpo",
}
HELPERS = ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"]
HELPERS += ["get_response_mask"]
FROM_CORE = ["agg_loss", "compute_value_loss", "get_policy_loss_fn", "kl_penalty"]
CORRECTION = ["SAFETY_BOUND", "_parse_rollout_is_threshold", "compute_rollout_correction_weights"]


class Configuration(SimpleNamespace):
    """A configuration of verl, which can also be read like a dictionary."""

    def get(self, name, default=None):
        return getattr(self, name, default)


class Batch(dict):
    """As much of a TensorDict as the loss functions use."""

    def select(self, *names):
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self):
        return self


class Metric:
    """A number for the log, which is not read here."""

    def __init__(self, value, aggregation):
        self.value = value

    @staticmethod
    def from_dict(values, aggregation):
        return values


def load_core(folder, helpers):
    """Return all of core_algos.py, with stand-ins for the configuration classes."""
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
    """Return `ppo_loss` and `value_loss`, which the engine calls for each micro-batch."""
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
    """Return the sections `actor`, `algorithm` and `rollout` of verl's configuration."""

    def read(name):
        return yaml.safe_load((folder / "trainer" / "config" / name).read_text(encoding="utf-8"))

    algorithm = read("ppo_trainer.yaml")["algorithm"]
    algorithm["rollout_correction"] = read("algorithm/rollout_correction.yaml")
    return {
        "actor": read("actor/actor.yaml"),
        "algorithm": algorithm,
        "rollout": read("rollout/rollout.yaml"),
    }


class Adapter(PPOLibrary):
    objectives = ("clip", *MODES)
    ratios = ("token", "sequence", "sequence_token")
    means = MEANS
    kl_estimators = ("k1", "k2", "k3")
    expected_kl_estimators = ("k3_weighted",)
    estimators = ESTIMATORS
    needs_rewards = "all rows must have a reward: NaN would spread to the whole group"

    def __init__(self, packages):
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

    def config(self, needed):
        """Return the configuration with the chosen settings. A new name begins with +."""
        config = copy.deepcopy(self.defaults)
        for name, value in self.chosen(needed).items():
            *sections, key = name.removeprefix("+").split(".")
            section = config
            for part in sections:
                section = section[part]
            if name.startswith("+") == (key in section):
                raise LookupError(f"{name}: new names begin with +, existing ones do not")
            section[key] = value
        return config

    # --- advantages ---

    def advantages(self, groups, estimator, options):
        needed = {
            "algorithm.adv_estimator": estimator,
            "algorithm.norm_adv_by_std_in_grpo": options["deviation"] == "group",
            "rollout.n": max(map(len, groups)),
        }
        config = self.config(needed)
        algorithm = config["algorithm"]
        refuse_small_groups(config, groups)
        refuse_if(algorithm["adv_estimator"] == "gae", "the advantages are those of a critic")
        # Reward managers return float32, here for the only token of each row.
        rewards = torch.tensor(flat(groups))[:, None]
        index = np.array(group_numbers(groups))
        function = self.core.get_adv_estimator_fn(algorithm["adv_estimator"])
        given = {}
        if algorithm["adv_estimator"] == "grpo":
            given["norm_adv_by_std_in_grpo"] = algorithm["norm_adv_by_std_in_grpo"]
        advantages, _ = function(rewards, torch.ones_like(rewards), index, **given)
        return advantages[:, 0].tolist()

    def decoupled_advantages(self, inputs, options):
        groups = inputs["parts"][0]
        columns = {}
        for number, part in enumerate(inputs["parts"]):
            columns[f"part {number}"] = flat(part)
        refuse_if(None in flat(columns.values()), "all rows must have each reward term")
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
        refuse_if(not is_gdpo, "other estimators take the sum of the terms")
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
        """Return what engine and trainer count, as they put it into the batch of a process."""
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
        refuse_if("scored" in inputs, "all rows must have a reward")

        def totals_of(parts, processes):
            return [self.totals(self.count_actor_rows, parts, processes)] * len(parts)

        return totals_answer(inputs, totals_of)

    def policy_step(self, inputs, options):
        self.refuse_step(inputs, options)
        config = self.config(needed_for(options))
        config["actor"]["policy_loss"] = Configuration(**config["actor"]["policy_loss"])
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
            del answer["loss"]  # it is the log-prob times r as a constant
        return answer

    def weighted_logprob_step(self, inputs, options):
        options = options | {"objective": "weighted_logprob", "ratio": "token"}
        return self.policy_step(inputs, options)

    def geometric_mean_step(self, inputs, options):
        options = options | {"objective": "geometric_mean", "ratio": "token", "mean": "rows"}
        return self.policy_step(inputs, options)

    def covariance_step(self, inputs, options):
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
        # k3+ has the value of k3 and the gradient of k2, on policy that of the weighted k3.
        kind = "k3+" if estimator == "k3_weighted" else estimator
        return self.core.kl_penalty(logprobs, ref, kind)

    # --- PPO ---

    def token_rewards(self, old, ref, scores, mask, kl_coef):
        names = self.kl_in_reward(
            core_algos=self.core,
            data=SimpleNamespace(batch={"old_log_probs": old, "ref_log_prob": ref}),
            kl_penalty="kl",
            response_mask=mask,
            token_level_scores=on_last_token(scores, mask),
            kl_ctrl=SimpleNamespace(value=kl_coef),
        )
        return names.token_level_rewards

    def critic_advantages(self, rewards, values, mask, gamma, gae_lambda):
        algorithm = self.config({})["algorithm"]
        refuse_if(algorithm["adv_estimator"] != "gae", "the estimator is not GAE")
        gae = self.core.compute_gae_advantage_return
        _, returns = gae(rewards, values, mask, gamma, gae_lambda)
        # It returns whitened advantages, which before were the returns minus the values.
        return returns - values, returns

    def whitened(self, advantages, mask, eps):
        return self.helpers.masked_whiten(advantages, mask)

    def value_losses(self, parts, processes, options):
        config = Configuration(
            cliprange_value=options["value_clip"] or NO_VALUE_CLIP,
            loss_agg_mode=MEANS[options["mean"]],
            loss_scale_factor=None,
        )
        totals = self.totals(self.count_critic_rows, parts, processes)
        for part in parts:
            batch = Batch(totals, values=part.old, returns=part.returns, response_mask=part.mask)
            loss, _ = self.losses.value_loss(config, {"values": part.values}, batch)
            yield loss

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
    """Return a configuration of `rows` rows a step; only prompts times n matters, so n is 1."""
    sizes = Configuration(ppo_mini_batch_size=rows, ppo_epochs=1, data_loader_seed=0, shuffle=False)
    actor_rollout_ref = Configuration(actor=sizes, rollout=Configuration(n=1))
    return Configuration(critic=sizes, actor_rollout_ref=actor_rollout_ref)


def needed_for(options):
    """Return the settings that a case of a step needs."""
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
    if options["objective"] == "unclipped":
        needed["actor.policy_loss.kl_cov_ratio"] = options["share"]
        needed["actor.policy_loss.ppo_kl_coef"] = options["penalty_coef"]
    if "kl" in options:
        needed["actor.use_kl_loss"] = True
        needed["actor.kl_loss_type"] = options["kl"]["estimator"]
        needed["actor.kl_loss_coef"] = options["kl"]["coef"]
    if "sampler_cap" in options:
        threshold = options["sampler_cap"]
        if options.get("beyond_cap") == "mask":
            # Two bounds mask, and the lower one must be positive.
            threshold = f"{options.get('sampler_floor', 1e-9)}_{threshold}"
        needed["algorithm.rollout_correction.rollout_is"] = "token"
        needed["algorithm.rollout_correction.rollout_is_threshold"] = threshold
    return needed


def refuse_small_groups(config, groups):
    """Refuse groups larger than `rollout.n`, which is 1 by default."""
    is_small = config["rollout"]["n"] < max(map(len, groups))
    refuse_if(is_small, "rollout.n is smaller than a group")
