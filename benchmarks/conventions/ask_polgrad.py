"""What polgrad computes, by its public functions."""

import importlib.metadata
import math

import torch

from tensors import (
    NotOfferedError,
    Step,
    expected_gradient,
    on_last_token,
    ones_like,
    padded,
    pieces_of,
    rows_like,
    step_answer,
)


class Adapter:
    def __init__(self, packages):
        import polgrad

        self.name = f"polgrad {importlib.metadata.version('polgrad')}"
        self.polgrad = polgrad
        self.means = {
            "tokens": polgrad.Aggregation.TOKEN_MEAN,
            "rows": polgrad.Aggregation.SEQ_MEAN_TOKEN_MEAN,
            "sums": polgrad.Aggregation.SEQ_MEAN_TOKEN_SUM,
            "constant": polgrad.Aggregation.TOKEN_SUM_NORM,
        }
        self.ratios = {
            "token": polgrad.RatioKind.TOKEN,
            "sequence": polgrad.RatioKind.SEQUENCE,
            "sequence_token": polgrad.RatioKind.SEQUENCE_TOKEN,
        }

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        if any(reward is None for group in groups for reward in group):
            raise NotOfferedError("an error: rewards must be finite")
        flat = [reward for group in groups for reward in group]
        rewards = torch.tensor(flat, dtype=torch.float64)
        ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
        try:
            flat = iter(self.advantages(rewards, ids, options).tolist())
        except ValueError as error:
            raise NotOfferedError(f"an error: {error}") from None
        return {"advantages": [[finite(next(flat)) for _ in group] for group in groups]}

    def advantages(self, rewards, ids, options):
        kind = options["baseline"], options["deviation"]
        if kind == ("leave_one_out", "none"):
            return self.polgrad.rloo_advantages(rewards, ids)
        if kind == ("group_mean", "batch_of_centred"):
            config = self.polgrad.ReinforcePPConfig(batch_norm=True, eps=options["std_eps"])
            return self.polgrad.reinforce_pp_advantages(rewards, ids, config=config)
        if kind not in (("group_mean", "group"), ("group_mean", "none")):
            raise NotOfferedError(f"no function has baseline {kind[0]} and deviation {kind[1]}")
        config = self.polgrad.GroupNormConfig(
            scale="std" if options["deviation"] == "group" else "none",
            eps=options["std_eps"],
            unbiased=options["std_ddof"] == 1,
        )
        return self.polgrad.grpo_advantages(rewards, ids, config)

    # --- one optimizer step ---

    def policy_step(self, inputs, options):
        config = self.loss_config(inputs, options)
        step = Step.of(inputs)
        if not step.mask.any(dim=1).all():
            raise NotOfferedError("an error: each row needs a token")
        sampler = padded(inputs["sampler_logprobs"]) if "sampler_logprobs" in inputs else None

        def micro_batch_loss(rows):
            part = step.piece(rows)
            result = self.polgrad.policy_loss(
                config,
                logprobs=part.logprobs,
                old_logprobs=part.old,
                advantages=part.advantages,
                response_mask=part.mask,
                ref_logprobs=part.ref,
                rollout_logprobs=None if sampler is None else sampler[rows],
            )
            return result.loss

        losses = []
        for process in step.processes:
            # It takes no totals. Pieces are averaged, the default of its microbatch_token_weights.
            losses.append(sum(micro_batch_loss(rows) for rows in process) / len(process))
        return step_answer(inputs, step.logprobs, losses)

    def loss_config(self, inputs, options):
        refuse(inputs, options, self.means)
        kl, polgrad = options.get("kl"), self.polgrad
        correction, kl_config = None, None
        if kl:
            kl_config = polgrad.KLLossConfig(polgrad.KLEstimator(kl["estimator"]), kl["coef"])
        if "sampler_cap" in options:
            correction = polgrad.ISCorrectionConfig(cap=options["sampler_cap"], level="token")
        return polgrad.PolicyLossConfig(
            ratio=self.ratios[options["ratio"]],
            surrogate=polgrad.SurrogateKind.PG_CLIP,
            clip=polgrad.ClipConfig(
                eps_low=options["clip_low"],
                eps_high=options["clip_high"],
                ratio_cap=options.get("dual_clip"),
            ),
            aggregation=self.means[options["mean"]],
            norm_len=options.get("constant"),
            is_correction=correction,
            kl=kl_config,
        )

    # --- KL ---

    def estimate(self, logprobs, ref, estimator):
        if estimator == "k3_weighted":
            raise NotOfferedError("no KL is weighted by the ratio")
        kind, mask = self.polgrad.KLEstimator(estimator), torch.ones_like(ref).bool()
        return self.polgrad.kl_estimate(logprobs, ref, kind, response_mask=mask)

    def kl_tokens(self, inputs, options):
        logprobs = padded(inputs["logprobs"]).requires_grad_()
        value = self.estimate(logprobs, padded(inputs["ref_logprobs"]), options["estimator"])
        value.sum().backward()
        table = inputs["logprobs"]
        return {"value": rows_like(value, table), "gradient": rows_like(logprobs.grad, table)}

    def kl_expected_gradient(self, inputs, options):
        def estimate(logprobs, old, ref):
            return self.estimate(logprobs, ref, options["estimator"])

        return expected_gradient(inputs, estimate)

    # --- PPO ---

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        rewards = self.polgrad.kl_in_reward(
            on_last_token(inputs["scores"], table),
            padded(table),
            padded(inputs["ref_logprobs"]),
            self.polgrad.KLEstimator.K1,
            options["kl_coef"],
            response_mask=padded(ones_like(table)).bool(),
        )
        return {"rewards": rows_like(rewards, table)}

    def gae(self, inputs, options):
        config = self.polgrad.GAEConfig(gamma=options["gamma"], lam=options["lambda"])
        rewards, values, mask = (
            padded(inputs["rewards"]),
            padded(inputs["values"]),
            padded(inputs["mask"]).bool(),
        )
        try:
            advantages, returns = self.polgrad.gae(rewards, values, config=config, response_mask=mask)
        except ValueError as error:
            raise NotOfferedError(f"an error: {error}") from None
        return {"advantages": advantages.tolist(), "returns": returns.tolist()}

    def whiten(self, inputs, options):
        if options["std_ddof"] != 1:
            raise NotOfferedError("whiten has ddof 1")
        mask = padded(inputs["mask"]).bool()
        eps = options["eps_of_variance"]
        whitened = self.polgrad.whiten(padded(inputs["advantages"]), mask, eps=eps)
        return {"advantages": whitened.tolist()}

    def value_loss(self, inputs, options):
        values = padded(inputs["values"]).requires_grad_()
        mask = padded(ones_like(inputs["values"])).bool()
        old, returns = padded(inputs["old_values"]), padded(inputs["returns"])
        pieces = pieces_of(inputs, len(mask))

        def micro_batch_loss(rows):
            result = self.polgrad.value_loss(
                values[rows],
                old[rows],
                returns[rows],
                mask[rows],
                clip_eps=options["value_clip"] or None,
                aggregation=self.means[options["mean"]],
            )
            return result.loss

        losses = []
        for process in pieces:
            losses.append(sum(micro_batch_loss(rows) for rows in process) / len(process))
        loss = torch.stack(losses).mean()
        loss.backward()
        return {"loss": loss.item(), "gradient": rows_like(values.grad, inputs["values"])}


def finite(number):
    """JSON has no NaN: null stands for it."""
    return number if math.isfinite(number) else None


def refuse(inputs, options, means):
    if options["objective"] != "clip":
        raise NotOfferedError(f"no surrogate has the objective {options['objective']}")
    if "beyond_cap" in options:
        raise NotOfferedError("a weight of another sampler is cut to the cap, and never masked")
    if "max_ratio" in options:
        raise NotOfferedError("no clip is DCPO's")
    if options["mean"] not in means:
        raise NotOfferedError(f"no aggregation is a mean over {options['mean']}")
    if (options.get("kl") or {}).get("estimator") == "k3_weighted":
        raise NotOfferedError("no KL is weighted by the ratio")
    if "entropy_coef" in options:
        raise NotOfferedError("no loss has an entropy bonus")
    if "scored" in inputs:
        raise NotOfferedError("rewards must be finite")
