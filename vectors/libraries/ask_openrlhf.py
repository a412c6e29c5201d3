"""What OpenRLHF computes: its losses, and the statements of its trainers around them.

Options come from its own command lines. What a case does not need has its default.
"""

import argparse
import datetime
from types import SimpleNamespace

import torch

from library import PPOLibrary, refuse_if
from sources import Source, version_in
from tensors import (
    coefficients_after,
    has_uneven_pieces,
    padded,
    pair_answer,
    policy_answer,
    score_pairs,
    totals_answer,
)

HELPERS = ["KL_IS_WEIGHT_CLIP", "compute_approx_kl", "compute_reward", "masked_mean"]
MEANS = {"tokens": "token-mean", "rows": "seq-mean-token-mean"}
NO_KL = ["--algo.kl.init_coef", 0]  # by default rewards include a KL of 0.01
ESTIMATORS = {  # `algo.advantage.estimator`
    ("group_mean", "group"): "group_norm",
    ("group_mean", "none"): "dr_grpo",
    ("group_mean", "batch_of_centred"): "reinforce_baseline",
    ("leave_one_out", "none"): "rloo",
}


class CommandLine:
    """The command line of one of its programs."""

    def __init__(self, path, hierarchize):
        self.hierarchize = hierarchize
        program = Source(path)
        self.make_parser = program.statements(
            None, "parser = argparse", 'parser.add_argument("--use_ms"'
        )

    def parse(self, words):
        names = self.make_parser(argparse=argparse, datetime=datetime.datetime)
        return self.hierarchize(names.parser.parse_args(words))


class Adapter(PPOLibrary):
    means = MEANS
    estimators = ESTIMATORS
    group_size = "n_samples_per_prompt"
    needs_rewards = "all rows must have a reward: NaN would spread to the whole group"
    ddof = 0

    def __init__(self, packages):
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
        """Return the words of settings such as "--actor.dual_clip 3"."""
        return " ".join(settings).split()

    def ppo_args(self, needed):
        words = ["--train.agent_func_path", "an agent instead of a reward model"]
        args = self.ppo_line.parse([*map(str, self.chosen(needed)), *words])
        return self.check_ppo(args=args).args

    def dpo_args(self, needed):
        return self.dpo_line.parse(list(map(str, self.chosen(needed))))

    # --- advantages ---

    def advantages(self, groups, estimator, options):
        needed = ["--algo.advantage.estimator", estimator]
        needed += ["--rollout.n_samples_per_prompt", len(groups[0])]
        args = self.ppo_args([*needed, *NO_KL])
        refuse_kl_in_reward(args)
        estimator = args.algo.advantage.estimator
        refuse_if(estimator == "gae", "the advantages are those of a critic")
        advantages = self.baseline(args=args, rewards=torch.tensor(groups)).rewards  # float32
        if estimator == "reinforce_baseline":
            # Rows of one token. With longer rows the std is over tokens, so long rows count more.
            column = advantages.view(-1, 1)
            advantages = self.whitened_by(args, column, torch.ones_like(column))
        return advantages.flatten().tolist()

    def whitened_by(self, args, advantages, mask):
        experience = SimpleNamespace(advantages=advantages, action_mask=mask)
        self.whitening(args=args, experiences=[experience])
        return experience.advantages

    def whitened(self, advantages, mask, eps):
        return self.whitened_by(self.ppo_args([]), advantages, mask)

    # --- one optimizer step ---

    def totals(self, parts, processes):
        """Return the counts of each micro-batch of a process in a step."""
        counts = set(map(len, processes.pieces))
        refuse_if(len(counts) > 1, "all processes have the same number of micro-batches")
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
        refuse_if("scored" in inputs, "all rows must have a reward")

        def totals_of(parts, processes):
            for counts in self.totals(parts, processes):
                # They are divided by the number of micro-batches, like the loss later.
                yield {name: count * len(parts) for name, count in counts.items()}

        return totals_answer(inputs, totals_of)

    def policy_step(self, inputs, options):
        self.refuse_step(inputs, options)
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
            del answer["loss"]  # its value is that of k3, only its gradient that of the weighted k3
        return answer

    def micro_batch_loss(self, trainer, part, totals):
        """Run the statements of `training_step` after the forward pass."""
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
        answer = super().kl_tokens(inputs, options)
        if options["estimator"] == "k3_weighted":
            del answer["value"]  # it is that of k3, only the gradient is that of the weighted k3
        return answer

    # --- PPO ---

    def token_rewards(self, old, ref, scores, mask, kl_coef):
        kl = self.helpers.compute_approx_kl(old, ref, kl_estimator="k1")
        return self.helpers.compute_reward(torch.tensor(scores), kl_coef, kl, mask)

    def critic_advantages(self, rewards, values, mask, gamma, gae_lambda):
        args = self.ppo_args(NO_KL)
        refuse_kl_in_reward(args)
        refuse_if(args.algo.advantage.estimator != "gae", "the estimator is not GAE")
        return self.gae_method(None, values, rewards, mask, gamma, gae_lambda)

    def value_losses(self, parts, processes, options):
        function = self.losses.ValueLoss(options["value_clip"] or None)
        for part, counted in zip(parts, self.totals(parts, processes), strict=True):
            loss = function(part.values, part.old, part.returns, part.mask.double(), **counted)
            yield loss / len(parts)  # by DeepSpeed

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
        refuse_if(options["loss"] == "robust", "DPOLoss has sigmoid, label smoothing and IPO")
        refuse_if(options["per_token"], "the log-probs of a completion are summed")
        refuse_if(options["reference_free"], "DPOLoss has a reference")
        refuse_smaller(inputs)
        tables = inputs["chosen_logprobs"] + inputs["rejected_logprobs"]
        logprobs = padded(tables).requires_grad_()
        chosen, rejected, nll = self.pair_logprobs(logprobs, tables)
        ref = padded(inputs["ref_chosen_logprobs"] + inputs["ref_rejected_logprobs"])
        ref_chosen, ref_rejected, _ = self.pair_logprobs(ref, tables)
        needed = ["--model.beta", options["beta"], "--model.nll_loss_coef", options["nll_coef"]]
        needed += ["--model.label_smoothing", options["label_smoothing"]]
        needed += ["--model.ipo_enable"] * (options["loss"] == "ipo")
        args = self.dpo_args(needed).model
        function = self.losses.DPOLoss(args.beta, args.label_smoothing, args.ipo_enable)
        loss, _, _ = function(chosen, rejected, ref_chosen, ref_rejected)
        return pair_answer(loss + nll * args.nll_loss_coef, logprobs, tables)

    def pair_logprobs(self, logprobs, rows):
        """Return sums of chosen and of rejected log-probs (2 B, T), and the NLL loss."""
        # Each completion follows a prompt of one token.
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
        refuse_if(options["center_coef"], "PairWiseLoss does not centre rewards")
        refuse_smaller(inputs)
        scores = score_pairs(inputs)
        return pair_answer(self.losses.PairWiseLoss()(*scores.chunk(2)), scores)


def words_for(options):
    """Return the command line that a case of a step needs."""
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
    refuse_if(in_reward, "the reward includes a KL")


def refuse_smaller(inputs):
    refuse_if(has_uneven_pieces(inputs), "the loader of pairs drops a smaller last micro-batch")
