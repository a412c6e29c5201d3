"""What OpenRLHF computes: its losses, and the statements of its trainers around them."""

import math
from types import SimpleNamespace

import torch

from sources import Source, version_in
from tensors import (
    NotOfferedError,
    Processes,
    Step,
    expected_gradient,
    ones_like,
    padded,
    pieces_of,
    rows_like,
    step_answer,
)

HELPERS = ["KL_IS_WEIGHT_CLIP", "compute_approx_kl", "compute_reward", "masked_mean"]
MEANS = {"tokens": "token-mean", "rows": "seq-mean-token-mean"}
ESTIMATORS = {  # of `algo.advantage.estimator`, by baseline and deviation
    ("group_mean", "group"): "group_norm",
    ("group_mean", "none"): "dr_grpo",
    ("group_mean", "batch_of_centred"): "reinforce_baseline",
    ("leave_one_out", "none"): "rloo",
}


def load_helpers(folder):
    """The KL estimates, the rewards with a KL, and the masked mean."""
    source = Source(folder / "models" / "utils.py")
    return SimpleNamespace(**source.definitions({"torch": torch}, *HELPERS))


def load_losses(folder, helpers):
    """The whole of loss.py."""
    source = Source(folder / "models" / "loss.py")
    names = {"masked_mean": helpers.masked_mean}
    return SimpleNamespace(**source.whole(names, without=["openrlhf"]))


class Adapter:
    def __init__(self, packages):
        self.name = f"OpenRLHF {version_in(packages, 'openrlhf')}"
        folder = packages / "openrlhf"
        self.helpers = load_helpers(folder)
        self.losses = load_losses(folder, self.helpers)
        self.loss_utils = Source(folder / "utils" / "loss_utils.py")

        ppo = folder / "trainer" / "ppo_utils"
        controllers = Source(ppo / "kl_controller.py").whole({}, without=["openrlhf"])
        self.adaptive_controller = controllers["AdaptiveKLController"]
        penalties = Source(ppo / "length_penalty.py").definitions({}, "apply_overlong_penalty")
        self.overlong_penalty = penalties["apply_overlong_penalty"]

        maker = Source(ppo / "experience_maker.py")
        method, start = "compute_advantages_and_returns", "if args.algo.advantage.estimator "
        self.baseline = maker.statements(method, start + '== "rloo"')
        self.whitening = maker.statements(method, start + 'in ["gae"')
        self.gae_method = maker.method("get_advantages_and_returns", {"torch": torch})

        actor = Source(folder / "trainer" / "ray" / "ppo_actor.py")
        method = "training_step"
        self.make_loss = actor.statements("__init__", "self.actor_loss_fn =")
        self.sum_losses = actor.statements(method, "actor_loss, ", "loss = actor_loss + kl_loss")
        self.add_entropy = actor.statements(method, "if self.args.actor.entropy_coef is not")

        dpo = Source(folder / "trainer" / "dpo_trainer.py")
        self.sum_logprobs = dpo.method("_get_batch_logps", {"torch": torch})
        self.pair_forward = dpo.method("concatenated_forward", {"torch": torch})

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        kind = options["baseline"], options["deviation"]
        if kind not in ESTIMATORS:
            raise NotOfferedError(f"no estimator has baseline {kind[0]} and deviation {kind[1]}")
        if len(set(map(len, groups))) > 1:
            raise NotOfferedError("groups have one size, n_samples_per_prompt")
        if any(reward is None for group in groups for reward in group):
            raise NotOfferedError("a row must have a reward: NaN would reach its whole group")
        args = advantage_args(ESTIMATORS[kind], samples=len(groups[0]))
        names = {"args": args, "rewards": torch.tensor(groups)}  # float32
        exec(self.baseline, names)
        advantages = names["rewards"]
        if args.algo.advantage.estimator == "reinforce_baseline":
            # One token a row. With more, the deviation is that of the tokens: long rows count more.
            column = advantages.view(-1, 1)
            advantages = self.whitened(column, torch.ones_like(column), args)
        return {"advantages": advantages.view(len(groups), -1).tolist()}

    def whitened(self, advantages, mask, args):
        experience = SimpleNamespace(advantages=advantages, action_mask=mask)
        exec(self.whitening, {"args": args, "experiences": [experience], "torch": torch})
        return experience.advantages

    def whiten(self, inputs, options):
        if options["std_ddof"] != 0:
            raise NotOfferedError("the variance has ddof 0")
        mask = padded(inputs["mask"])
        advantages = self.whitened(padded(inputs["advantages"]), mask, advantage_args("gae"))
        return {"advantages": (advantages * mask).tolist()}

    # --- one optimizer step ---

    def totals(self, masks, processes):
        """What it counts for one step of one process, from the masks of its micro-batches."""
        alone = SimpleNamespace(ds_device_mesh=None)
        distributed = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_world_size=lambda group: processes.count,
            all_reduce=processes.all_reduce,
            ReduceOp=SimpleNamespace(SUM="sum"),
        )
        names = {"torch": torch, "dist": distributed}
        functions = self.loss_utils.definitions(
            names, "_get_dp_group", "_optimizer_step_loss_norm", "iter_grad_accum_global_norm"
        )
        count = functions["iter_grad_accum_global_norm"]
        return [totals for _, totals in count(masks, alone, len(masks), lambda mask: mask)]

    def step_totals(self, inputs, options):
        if "scored" in inputs:
            raise NotOfferedError("a row must have a reward")
        mask = padded(inputs["mask"])
        answer = {"tokens": [], "rows": []}
        for pieces in inputs["steps"]:
            refuse_uneven(pieces)
            processes = Processes(len(pieces))
            micro_batches = len(pieces[0])

            def totals_of(rank, pieces=pieces, processes=processes):
                return self.totals([mask[rows] for rows in pieces[rank]], processes)

            totals = processes.run(totals_of)
            for name, key in (("tokens", "batch_num_tokens"), ("rows", "global_batch_size")):
                # They were divided by the number of micro-batches, as the loss will be.
                answer[name].append([])
                for process in totals:
                    counts = [float(piece[key]) * micro_batches for piece in process]
                    answer[name][-1].append(counts)
        return answer

    def policy_step(self, inputs, options):
        refuse(inputs, options)
        step = Step.of(inputs)
        refuse_uneven(step.processes)
        trainer = SimpleNamespace(args=actor_args(options))
        exec(self.make_loss, {"self": trainer, "PolicyLoss": self.losses.PolicyLoss})
        processes = Processes(len(step.processes))
        entropies = padded(inputs["entropies"]).requires_grad_() if "entropies" in inputs else None
        sampler = padded(inputs["sampler_logprobs"]) if "sampler_logprobs" in inputs else step.old

        def loss_of(rank):
            pieces = step.processes[rank]
            totals = self.totals([step.mask[rows].double() for rows in pieces], processes)
            total = 0.0
            for rows, counted in zip(pieces, totals, strict=True):
                part = step.piece(rows)
                entropy = None if entropies is None else entropies[rows]
                loss = self.micro_batch_loss(trainer, part, sampler[rows], counted, entropy)
                total = total + loss / len(pieces)  # by DeepSpeed
            return total

        answer = step_answer(inputs, step.logprobs, processes.run(loss_of), entropies)
        if (options.get("kl") or {}).get("estimator") == "k3_weighted":
            del answer["loss"]  # It has the value of k3; only the gradient is the weighted one's.
        return answer

    def micro_batch_loss(self, trainer, part, sampler, totals, entropy):
        """The statements of `training_step` after the forward pass."""
        mask = part.mask.double()
        names = {
            "self": trainer,
            "torch": torch,
            "action_log_probs": part.logprobs,
            "old_action_log_probs": part.old,
            "advantages": part.advantages,
            "base_action_log_probs": part.ref,
            "experience": SimpleNamespace(action_mask=mask, rollout_log_probs=sampler, info={}),
            "loss_batch_info": totals,
            "kl_ctl": trainer.args.algo.kl.init_coef,
            "aggregate_loss": self.losses.aggregate_loss,
            "compute_approx_kl": self.helpers.compute_approx_kl,
            "masked_mean": self.helpers.masked_mean,
        }
        if entropy is not None:
            names["output"] = SimpleNamespace(entropy=entropy)
        exec(self.sum_losses, names)
        exec(self.add_entropy, names)
        return names["loss"]

    # --- KL ---

    def kl_tokens(self, inputs, options):
        logprobs = padded(inputs["logprobs"]).requires_grad_()
        old = padded(inputs.get("old_logprobs", inputs["logprobs"]))
        weighted = options["estimator"] == "k3_weighted"
        value = self.helpers.compute_approx_kl(
            logprobs,
            padded(inputs["ref_logprobs"]),
            log_probs_old=old,
            kl_estimator="k3" if weighted else options["estimator"],
            unbiased_gradient=weighted,
        )
        value.sum().backward()
        answer = {"gradient": rows_like(logprobs.grad, inputs["logprobs"])}
        if not weighted:  # Its value stays that of k3; only the gradient is the weighted one's.
            answer["value"] = rows_like(value, inputs["logprobs"])
        return answer

    def kl_expected_gradient(self, inputs, options):
        weighted = options["estimator"] == "k3_weighted"
        estimator = "k3" if weighted else options["estimator"]

        def estimate(logprobs, old, ref):
            return self.helpers.compute_approx_kl(logprobs, ref, old, estimator, weighted)

        return expected_gradient(inputs, estimate)

    # --- PPO ---

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        old = padded(table)
        kl = self.helpers.compute_approx_kl(old, padded(inputs["ref_logprobs"]), kl_estimator="k1")
        scores, mask = torch.tensor(inputs["scores"]), padded(ones_like(table))
        rewards = self.helpers.compute_reward(scores, options["kl_coef"], kl, mask)
        return {"rewards": rows_like(rewards, table)}

    def gae(self, inputs, options):
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
        values = padded(inputs["values"]).requires_grad_()
        mask = padded(ones_like(inputs["values"]))
        old, returns = padded(inputs["old_values"]), padded(inputs["returns"])
        pieces = pieces_of(inputs, len(mask))
        refuse_uneven(pieces)
        function = self.losses.ValueLoss(options["value_clip"] or None)
        processes = Processes(len(pieces))

        def loss_of(rank):
            totals = self.totals([mask[rows] for rows in pieces[rank]], processes)
            total = 0.0
            for rows, counted in zip(pieces[rank], totals, strict=True):
                loss = function(values[rows], old[rows], returns[rows], mask[rows], **counted)
                total = total + loss / len(totals)  # by DeepSpeed
            return total

        loss = torch.stack(processes.run(loss_of)).mean()
        loss.backward()
        return {"loss": loss.item(), "gradient": rows_like(values.grad, inputs["values"])}

    def adaptive_kl(self, inputs, options):
        target, horizon = options["target"], options["horizon"]
        coefficients = []
        for kl in inputs["kl"]:
            controller = self.adaptive_controller(inputs["kl_coef"], target, horizon)
            controller.update(kl, options["samples"])
            coefficients.append(float(controller.value))
        return {"kl_coef": coefficients}

    def soft_overlong(self, inputs, options):
        lengths = torch.tensor(inputs["lengths"])
        rewards = torch.zeros(len(lengths), dtype=torch.float64)
        experience = SimpleNamespace(response_length=lengths, rewards=rewards)
        self.overlong_penalty([experience], options["max_tokens"], options["cache"])
        return {"penalties": rewards.tolist()}

    # --- pairs ---

    def preference_loss(self, inputs, options):
        if options["loss"] == "robust":
            raise NotOfferedError("DPOLoss has the sigmoid, label smoothing and IPO")
        if options["per_token"]:
            raise NotOfferedError("the log-probs of a completion are summed")
        if options["reference_free"]:
            raise NotOfferedError("DPOLoss has a reference")
        chosen, rejected = inputs["chosen_logprobs"], inputs["rejected_logprobs"]
        pieces = pieces_of(inputs, len(chosen))
        refuse_uneven_rows(pieces)
        logprobs = padded(chosen + rejected).requires_grad_()
        chosen_sum, rejected_sum, nll = self.pair_logprobs(logprobs, chosen + rejected)
        ref = padded(inputs["ref_chosen_logprobs"] + inputs["ref_rejected_logprobs"])
        ref_chosen, ref_rejected, _ = self.pair_logprobs(ref, chosen + rejected)
        function = self.losses.DPOLoss(
            beta=options["beta"],
            label_smoothing=options["label_smoothing"],
            ipo=options["loss"] == "ipo",
        )
        loss, _, _ = function(chosen_sum, rejected_sum, ref_chosen, ref_rejected)
        loss = loss + nll * options["nll_coef"]
        loss.backward()
        better, worse = logprobs.grad.chunk(2)
        return {
            "loss": loss.item(),
            "chosen_gradient": rows_like(better, chosen),
            "rejected_gradient": rows_like(worse, rejected),
        }

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
        if options["center_coef"]:
            raise NotOfferedError("PairWiseLoss centres no rewards")
        refuse_uneven_rows(pieces_of(inputs, len(inputs["chosen"])))
        chosen = torch.tensor(inputs["chosen"], dtype=torch.float64, requires_grad=True)
        rejected = torch.tensor(inputs["rejected"], dtype=torch.float64, requires_grad=True)
        loss = self.losses.PairWiseLoss()(chosen, rejected)
        loss.backward()
        gradients = {
            "chosen_gradient": chosen.grad.tolist(),
            "rejected_gradient": rejected.grad.tolist(),
        }
        return {"loss": loss.item()} | gradients


def advantage_args(estimator, samples=1):
    advantage = SimpleNamespace(estimator=estimator, no_std_norm=False)
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=samples),
    )


def actor_args(options):
    """The command line's names, such as --actor.loss_agg_mode."""
    kl = options.get("kl") or {}
    weighted = kl.get("estimator") == "k3_weighted"
    corrected = "sampler_cap" in options
    masked = options.get("beyond_cap") == "mask"
    thresholds = options.get("sampler_floor", 0.0), options.get("sampler_cap", math.inf)
    return SimpleNamespace(
        actor=SimpleNamespace(
            eps_clip_low_high=(options["clip_low"], options["clip_high"]),
            dual_clip=options.get("dual_clip"),
            loss_agg_mode=MEANS[options["mean"]],
            policy_loss_type="gspo" if options["ratio"] == "sequence" else "ppo",
            entropy_coef=options.get("entropy_coef"),
        ),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                is_correction_level="token" if corrected else "off",
                is_correction_mode="mask" if masked else "clip",
                is_correction_gating="ratio",
                is_correction_threshold=thresholds,
            ),
            kl=SimpleNamespace(
                use_loss=bool(kl),
                init_coef=kl.get("coef", 0.0),
                estimator="k3" if weighted else kl.get("estimator"),
                unbiased_gradient=weighted,
            ),
        ),
    )


def refuse(inputs, options):
    if options["objective"] != "clip":
        raise NotOfferedError(f"no loss has the objective {options['objective']}")
    if "max_ratio" in options:
        raise NotOfferedError("no loss is DCPO's")
    if options["ratio"] == "sequence_token":
        raise NotOfferedError("--actor.policy_loss_type is ppo or gspo")
    if options["mean"] not in MEANS:
        raise NotOfferedError(f"--actor.loss_agg_mode has no mean over {options['mean']}")
    if "scored" in inputs:
        raise NotOfferedError("a row must have a reward")


def refuse_uneven(pieces):
    if len(set(map(len, pieces))) > 1:
        raise NotOfferedError("all processes have equally many micro-batches")


def refuse_uneven_rows(pieces):
    """The loader of pairs drops the last batch if it is smaller."""
    if len({len(rows) for process in pieces for rows in process}) > 1:
        raise NotOfferedError("a last micro-batch of pairs that is smaller is dropped")
