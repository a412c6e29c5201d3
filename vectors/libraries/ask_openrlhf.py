"""What OpenRLHF computes: its losses, and the statements of its trainers around them.

The options come from its own command lines: what a case does not need is at its default.
"""

import argparse
import datetime
from types import SimpleNamespace

import torch

from sources import Source, version_in
from tensors import (
    coefficients_after,
    expected_kl_answer,
    flat,
    grouped,
    kl_answer,
    ones_like,
    padded,
    pieces_of,
    policy_answer,
    preference_answer,
    refuse_if,
    rows_like,
    score_answer,
    score_pairs,
    totals_answer,
    value_answer,
)

HELPERS = ["KL_IS_WEIGHT_CLIP", "compute_approx_kl", "compute_reward", "masked_mean"]
MEANS = {"tokens": "token-mean", "rows": "seq-mean-token-mean"}
NO_KL = ["--algo.kl.init_coef", 0]  # by default rewards have a KL of 0.01
ESTIMATORS = {  # of `algo.advantage.estimator`, by baseline and deviation
    ("group_mean", "group"): "group_norm",
    ("group_mean", "none"): "dr_grpo",
    ("group_mean", "batch_of_centred"): "reinforce_baseline",
    ("leave_one_out", "none"): "rloo",
}


class CommandLine:
    """The options of one of its programs."""

    def __init__(self, path, hierarchize):
        self.hierarchize = hierarchize
        program = Source(path)
        self.make_parser = program.statements(
            None, "parser = argparse", 'parser.add_argument("--use_ms"'
        )

    def parse(self, words):
        names = self.make_parser(argparse=argparse, datetime=datetime.datetime)
        return self.hierarchize(names.parser.parse_args(words))


class Adapter:
    def __init__(self, packages):
        self.row = None  # words of settings.toml, for those that a case needs
        self.name = f"OpenRLHF {version_in(packages, 'openrlhf')}"
        folder = packages / "openrlhf"
        config = Source(folder / "utils" / "config.py")
        hierarchize = config.definitions("hierarchize", SimpleNamespace=SimpleNamespace).hierarchize
        program = Source(folder / "cli" / "train_ppo_ray.py")
        self.check_ppo = program.statements(
            None, "if args.actor.eps_clip_low_high is None", "if args.algo.advantage.estimator in ["
        )
        self.ppo_line = CommandLine(program.path, hierarchize)
        self.dpo_line = CommandLine(folder / "cli" / "train_dpo.py", hierarchize)
        self.helpers = Source(folder / "models" / "utils.py").definitions(*HELPERS)
        losses = Source(folder / "models" / "loss.py")
        self.losses = losses.whole(["openrlhf"], masked_mean=self.helpers.masked_mean)
        self.loss_utils = Source(folder / "utils" / "loss_utils.py")

        ppo = folder / "trainer" / "ppo_utils"
        self.controllers = Source(ppo / "kl_controller.py").whole(["openrlhf"])
        self.lengths = Source(ppo / "length_penalty.py").definitions("apply_overlong_penalty")

        maker = Source(ppo / "experience_maker.py")
        method = "compute_advantages_and_returns"
        estimator = "if args.algo.advantage.estimator"
        self.baseline = maker.statements(method, f'{estimator} == "rloo"')
        self.whitening = maker.statements(method, f'{estimator} in ["gae"')
        self.gae_method = maker.method("get_advantages_and_returns")

        actor = Source(folder / "trainer" / "ray" / "ppo_actor.py")
        method = "training_step"
        self.make_loss = actor.statements("__init__", "self.actor_loss_fn =")
        self.sum_losses = actor.statements(method, "actor_loss, ", "loss = actor_loss + kl_loss")
        self.add_entropy = actor.statements(method, "if self.args.actor.entropy_coef is not")

        dpo = Source(folder / "trainer" / "dpo_trainer.py")
        self.sum_logprobs = dpo.method("_get_batch_logps")
        self.pair_forward = dpo.method("concatenated_forward")

    # --- settings ---

    def parsed(self, settings):
        """The words of a command line, from settings such as "--actor.dual_clip 3"."""
        words = []
        for setting in settings:
            words += setting.split()
        return words

    def ppo_args(self, needed):
        """The arguments of PPO with the words of a row, or else those that are needed."""
        words = map(str, needed if self.row is None else self.row)
        args = self.ppo_line.parse(
            [*words, "--train.agent_func_path", "an agent, not a reward model"]
        )
        return self.check_ppo(args=args).args

    def dpo_args(self, needed):
        return self.dpo_line.parse(list(map(str, needed if self.row is None else self.row)))

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        baseline = options["baseline"]
        deviation = options["deviation"]
        kind = (baseline, deviation)
        is_known = kind in ESTIMATORS
        refuse_if(not is_known, f"no estimator has baseline {baseline} and deviation {deviation}")
        is_uneven = len(set(map(len, groups))) > 1
        refuse_if(is_uneven, "groups have one size, n_samples_per_prompt")
        is_missing = None in flat(groups)
        refuse_if(is_missing, "a row must have a reward: NaN would reach its whole group")
        needed = ["--algo.advantage.estimator", ESTIMATORS[kind]]
        needed += ["--rollout.n_samples_per_prompt", len(groups[0])]
        args = self.ppo_args([*needed, *NO_KL])
        refuse_kl_in_reward(args)
        estimator = args.algo.advantage.estimator
        refuse_if(estimator == "gae", "the advantages are those of a critic")
        advantages = self.baseline(args=args, rewards=torch.tensor(groups)).rewards  # float32
        if estimator == "reinforce_baseline":
            # One token a row. With more, the deviation is that of the tokens: long rows count more.
            column = advantages.view(-1, 1)
            advantages = self.whitened(column, torch.ones_like(column), args)
        return {"advantages": grouped(advantages.flatten().tolist(), groups)}

    def whitened(self, advantages, mask, args):
        experience = SimpleNamespace(advantages=advantages, action_mask=mask)
        self.whitening(args=args, experiences=[experience])
        return experience.advantages

    def whiten(self, inputs, options):
        refuse_if(options["std_ddof"] != 0, "the variance has ddof 0")
        mask = padded(inputs["mask"])
        advantages = self.whitened(padded(inputs["advantages"]), mask, self.ppo_args([]))
        return {"advantages": (advantages * mask).tolist()}

    # --- one optimizer step ---

    def totals(self, parts, processes):
        """What it counts for each micro-batch of a step of one process."""
        counts = set(map(len, processes.pieces))
        refuse_if(len(counts) > 1, "all processes have equally many micro-batches")
        alone = SimpleNamespace(ds_device_mesh=None)
        distributed = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_world_size=lambda group: processes.count,
            all_reduce=processes.all_reduce,
            ReduceOp=SimpleNamespace(SUM="sum"),
        )
        functions = self.loss_utils.definitions(
            "_get_dp_group",
            "_optimizer_step_loss_norm",
            "iter_grad_accum_global_norm",
            dist=distributed,
        )
        count = functions.iter_grad_accum_global_norm
        masks = [part.mask.double() for part in parts]
        return [totals for _, totals in count(masks, alone, len(masks), lambda mask: mask)]

    def step_totals(self, inputs, options):
        def totals_of(parts, processes):
            for counts in self.totals(parts, processes):
                # They were divided by the number of micro-batches, as the loss will be.
                yield {name: count * len(parts) for name, count in counts.items()}

        return totals_answer(inputs, totals_of)

    def policy_step(self, inputs, options):
        refuse(inputs, options)
        args = self.ppo_args(words_for(options))
        if "kl" not in options:
            refuse_kl_in_reward(args)
        trainer = SimpleNamespace(args=args)
        self.make_loss(self=trainer, PolicyLoss=self.losses.PolicyLoss)

        def losses_of(parts, processes):
            totals = self.totals(parts, processes)
            for part, counted in zip(parts, totals, strict=True):
                yield self.micro_batch_loss(trainer, part, counted) / len(parts)  # by DeepSpeed

        answer = policy_answer(inputs, losses_of)
        if (options.get("kl") or {}).get("estimator") == "k3_weighted":
            del answer["loss"]  # It has the value of k3; only the gradient is the weighted one's.
        return answer

    def micro_batch_loss(self, trainer, part, totals):
        """The statements of `training_step` after the forward pass."""
        sampler = part.old if part.sampler is None else part.sampler
        mask = part.mask.double()
        names = self.sum_losses(
            self=trainer,
            experience=SimpleNamespace(action_mask=mask, rollout_log_probs=sampler, info={}),
            action_log_probs=part.logprobs,
            old_action_log_probs=part.old,
            advantages=part.advantages,
            base_action_log_probs=part.ref,
            loss_batch_info=totals,
            kl_ctl=trainer.args.algo.kl.init_coef,
            aggregate_loss=self.losses.aggregate_loss,
            compute_approx_kl=self.helpers.compute_approx_kl,
            masked_mean=self.helpers.masked_mean,
        )
        names.output = SimpleNamespace(entropy=part.entropies)
        return self.add_entropy(**vars(names)).loss

    # --- KL ---

    def kl(self, logprobs, old, ref, estimator):
        weighted = estimator == "k3_weighted"
        kind = "k3" if weighted else estimator
        return self.helpers.compute_approx_kl(logprobs, ref, old, kind, weighted)

    def kl_tokens(self, inputs, options):
        answer = kl_answer(inputs, options, self.kl)
        if options["estimator"] == "k3_weighted":
            del answer["value"]  # It stays that of k3; only the gradient is the weighted one's.
        return answer

    def kl_expected_gradient(self, inputs, options):
        return expected_kl_answer(inputs, options, self.kl)

    # --- PPO ---

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        old = padded(table)
        kl = self.helpers.compute_approx_kl(old, padded(inputs["ref_logprobs"]), kl_estimator="k1")
        scores = torch.tensor(inputs["scores"])
        mask = padded(ones_like(table))
        rewards = self.helpers.compute_reward(scores, options["kl_coef"], kl, mask)
        return {"rewards": rows_like(rewards, table)}

    def gae(self, inputs, options):
        args = self.ppo_args(NO_KL)
        refuse_kl_in_reward(args)
        refuse_if(args.algo.advantage.estimator != "gae", "the estimator is another")
        mask = padded(inputs["mask"])
        advantages, returns = self.gae_method(
            None,
            padded(inputs["values"]),
            padded(inputs["rewards"]),
            mask,
            options["gamma"],
            options["lambda"],
        )
        return {"advantages": (advantages * mask).tolist(), "returns": (returns * mask).tolist()}

    def value_loss(self, inputs, options):
        function = self.losses.ValueLoss(options["value_clip"] or None)

        def losses_of(parts, processes):
            totals = self.totals(parts, processes)
            for part, counted in zip(parts, totals, strict=True):
                mask = part.mask.double()
                loss = function(part.values, part.old, part.returns, mask, **counted)
                yield loss / len(parts)  # by DeepSpeed

        return value_answer(inputs, losses_of)

    def adaptive_kl(self, inputs, options):
        return coefficients_after(self.controllers.AdaptiveKLController, inputs, options)

    def soft_overlong(self, inputs, options):
        lengths = torch.tensor(inputs["lengths"])
        rewards = torch.zeros(len(lengths), dtype=torch.float64)
        experience = SimpleNamespace(response_length=lengths, rewards=rewards)
        self.lengths.apply_overlong_penalty([experience], options["max_tokens"], options["cache"])
        return {"penalties": rewards.tolist()}

    # --- pairs ---

    def preference_loss(self, inputs, options):
        is_robust = options["loss"] == "robust"
        refuse_if(is_robust, "DPOLoss has the sigmoid, label smoothing and IPO")
        refuse_if(options["per_token"], "the log-probs of a completion are summed")
        refuse_if(options["reference_free"], "DPOLoss has a reference")
        refuse_smaller(inputs)
        tables = inputs["chosen_logprobs"] + inputs["rejected_logprobs"]
        logprobs = padded(tables).requires_grad_()
        chosen, rejected, nll = self.pair_logprobs(logprobs, tables)
        ref = padded(inputs["ref_chosen_logprobs"] + inputs["ref_rejected_logprobs"])
        ref_chosen, ref_rejected, _ = self.pair_logprobs(ref, tables)
        needed = [
            "--model.beta",
            options["beta"],
            "--model.label_smoothing",
            options["label_smoothing"],
        ]
        needed += ["--model.nll_loss_coef", options["nll_coef"]]
        if options["loss"] == "ipo":
            needed.append("--model.ipo_enable")
        args = self.dpo_args(needed).model
        function = self.losses.DPOLoss(args.beta, args.label_smoothing, args.ipo_enable)
        loss, _, _ = function(chosen, rejected, ref_chosen, ref_rejected)
        return preference_answer(loss + nll * args.nll_loss_coef, logprobs, inputs)

    def pair_logprobs(self, logprobs, rows):
        """Sums of chosen and rejected ones, and the loss of chosen ones, of log-probs (2 B, T)."""
        # A prompt of one token stands before each completion.
        attention = padded([[1, *[1] * len(row)] for row in rows])
        trainer = SimpleNamespace(
            concatenated_inputs=lambda *given: (None, attention, [1] * len(rows)),
            _get_batch_logps=lambda *given: self.sum_logprobs(None, *given),
            strategy=SimpleNamespace(ring_attn_group=None),
        )
        half = torch.zeros(len(rows) // 2, 1)
        chosen, rejected, _, nll = self.pair_forward(
            trainer, lambda *given, **options: (logprobs, {}), half, None, None, None, None
        )
        return chosen, rejected, nll

    def reward_model_loss(self, inputs, options):
        refuse_if(options["center_coef"], "PairWiseLoss centres no rewards")
        refuse_smaller(inputs)
        scores = score_pairs(inputs)
        return score_answer(self.losses.PairWiseLoss()(*scores.chunk(2)), scores)


def words_for(options):
    """The words of the command line that a case of a step needs."""
    words = ["--actor.loss_agg_mode", MEANS[options["mean"]]]
    words += ["--actor.eps_clip_low_high", options["clip_low"], options["clip_high"]]
    if options["ratio"] == "sequence":
        words += ["--actor.policy_loss_type", "gspo"]
    if "dual_clip" in options:
        words += ["--actor.dual_clip", options["dual_clip"]]
    if "entropy_coef" in options:
        words += ["--actor.entropy_coef", options["entropy_coef"]]
    if "kl" in options:
        weighted = options["kl"]["estimator"] == "k3_weighted"
        words += ["--algo.kl.use_loss", "--algo.kl.init_coef", options["kl"]["coef"]]
        words += ["--algo.kl.estimator", "k3" if weighted else options["kl"]["estimator"]]
        words += ["--algo.kl.unbiased_gradient"] * weighted
    else:
        words += NO_KL
    if "sampler_cap" in options:
        is_masked = options.get("beyond_cap") == "mask"
        words += ["--algo.advantage.is_correction_level", "token"]
        words += ["--algo.advantage.is_correction_mode", "mask" if is_masked else "clip"]
        bounds = [options.get("sampler_floor", 0.0), options["sampler_cap"]]
        words += ["--algo.advantage.is_correction_threshold", *bounds]
    return words


def refuse_kl_in_reward(args):
    in_reward = args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss
    refuse_if(in_reward, "a KL is in the reward")


def refuse(inputs, options):
    objective = options["objective"]
    mean = options["mean"]
    refuse_if(objective != "clip", f"no loss has the objective {objective}")
    refuse_if("max_ratio" in options, "no loss is DCPO's")
    by_token = options["ratio"] == "sequence_token"
    refuse_if(by_token, "--actor.policy_loss_type is ppo or gspo")
    refuse_if(mean not in MEANS, f"--actor.loss_agg_mode has no mean over {mean}")
    refuse_if("scored" in inputs, "a row must have a reward")


def refuse_smaller(inputs):
    """The loader of pairs drops the last batch if it is smaller."""
    sizes = set(map(len, flat(pieces_of(inputs, 1))))
    refuse_if(len(sizes) > 1, "a last micro-batch of pairs that is smaller is dropped")
