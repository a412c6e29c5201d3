"""What polgrad computes, by its public functions."""

import contextlib
import importlib.metadata
import math

import torch

from tensors import (
    NotOfferedError,
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
    value_answer,
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

    # --- advantages ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        refuse_if(None in flat(groups), "an error: rewards must be finite")
        rewards = torch.tensor(flat(groups), dtype=torch.float64)
        ids = torch.tensor(group_numbers(groups))
        with errors_as_refusals():
            advantages = self.advantages(rewards, ids, options).tolist()
        return {"advantages": grouped(map(finite, advantages), groups)}

    def advantages(self, rewards, ids, options):
        baseline = options["baseline"]
        deviation = options["deviation"]
        kind = (baseline, deviation)
        if kind == ("leave_one_out", "none"):
            return self.polgrad.rloo_advantages(rewards, ids)
        if kind == ("group_mean", "batch_of_centred"):
            config = self.polgrad.ReinforcePPConfig(batch_norm=True, eps=options["std_eps"])
            return self.polgrad.reinforce_pp_advantages(rewards, ids, config=config)
        is_grpo = kind in (("group_mean", "group"), ("group_mean", "none"))
        refuse_if(not is_grpo, f"no function has baseline {baseline} and deviation {deviation}")
        config = self.polgrad.GroupNormConfig(
            scale="std" if deviation == "group" else "none",
            eps=options["std_eps"],
            unbiased=options["std_ddof"] == 1,
        )
        return self.polgrad.grpo_advantages(rewards, ids, config)

    # --- one optimizer step ---

    def policy_step(self, inputs, options):
        return self.step_by(self.loss_config(inputs, options), inputs)

    def weighted_logprob_step(self, inputs, options):
        polgrad = self.polgrad
        config = polgrad.PolicyLossConfig(
            ratio=polgrad.RatioKind.TOKEN,
            surrogate=polgrad.SurrogateKind.CISPO,
            clip=polgrad.ClipConfig(eps_low=options["clip_low"], eps_high=options["clip_high"]),
            aggregation=self.means[options["mean"]],
        )
        return self.step_by(config, inputs)

    def step_by(self, config, inputs):
        def losses_of(parts, processes):
            for part in parts:
                refuse_if(not part.mask.any(dim=1).all(), "an error: each row needs a token")
                result = self.polgrad.policy_loss(
                    config,
                    logprobs=part.logprobs,
                    old_logprobs=part.old,
                    advantages=part.advantages,
                    response_mask=part.mask,
                    ref_logprobs=part.ref,
                    rollout_logprobs=part.sampler,
                )
                # It takes no totals. Pieces are averaged, as its microbatch_token_weights does.
                yield result.loss / len(parts)

        return policy_answer(inputs, losses_of)

    def loss_config(self, inputs, options):
        refuse(inputs, options, self.means)
        polgrad = self.polgrad
        kl = options.get("kl")
        if kl:
            kl = polgrad.KLLossConfig(polgrad.KLEstimator(kl["estimator"]), kl["coef"])
        correction = None
        if "sampler_cap" in options:
            correction = polgrad.ISCorrectionConfig(cap=options["sampler_cap"], level="token")
        return polgrad.PolicyLossConfig(
            ratio=polgrad.RatioKind[options["ratio"].upper()],
            surrogate=polgrad.SurrogateKind.PG_CLIP,
            clip=polgrad.ClipConfig(
                eps_low=options["clip_low"],
                eps_high=options["clip_high"],
                ratio_cap=options.get("dual_clip"),
            ),
            aggregation=self.means[options["mean"]],
            norm_len=options.get("constant"),
            is_correction=correction,
            kl=kl,
        )

    # --- KL ---

    def kl(self, logprobs, old, ref, estimator):
        refuse_if(estimator == "k3_weighted", "no KL is weighted by the ratio")
        mask = torch.ones_like(ref).bool()
        kind = self.polgrad.KLEstimator(estimator)
        return self.polgrad.kl_estimate(logprobs, ref, kind, response_mask=mask)

    def kl_tokens(self, inputs, options):
        return kl_answer(inputs, options, self.kl)

    def kl_expected_gradient(self, inputs, options):
        return expected_kl_answer(inputs, options, self.kl)

    # --- PPO ---

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        mask = padded(ones_like(table)).bool()
        rewards = self.polgrad.kl_in_reward(
            on_last_token(inputs["scores"], table),
            padded(table),
            padded(inputs["ref_logprobs"]),
            self.polgrad.KLEstimator.K1,
            options["kl_coef"],
            response_mask=mask,
        )
        return {"rewards": rows_like(rewards, table)}

    def gae(self, inputs, options):
        config = self.polgrad.GAEConfig(gamma=options["gamma"], lam=options["lambda"])
        rewards = padded(inputs["rewards"])
        values = padded(inputs["values"])
        mask = padded(inputs["mask"]).bool()
        with errors_as_refusals():
            advantages, returns = self.polgrad.gae(
                rewards, values, config=config, response_mask=mask
            )
        return {"advantages": advantages.tolist(), "returns": returns.tolist()}

    def whiten(self, inputs, options):
        refuse_if(options["std_ddof"] != 1, "whiten has ddof 1")
        mask = padded(inputs["mask"]).bool()
        eps = options["eps_of_variance"]
        whitened = self.polgrad.whiten(padded(inputs["advantages"]), mask, eps=eps)
        return {"advantages": whitened.tolist()}

    def value_loss(self, inputs, options):
        def losses_of(parts, processes):
            for part in parts:
                result = self.polgrad.value_loss(
                    part.values,
                    part.old,
                    part.returns,
                    part.mask,
                    clip_eps=options["value_clip"] or None,
                    aggregation=self.means[options["mean"]],
                )
                yield result.loss / len(parts)

        return value_answer(inputs, losses_of)


def finite(number):
    """JSON has no NaN: null stands for it."""
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def errors_as_refusals():
    try:
        yield
    except ValueError as error:
        raise NotOfferedError(f"an error: {error}") from None


def refuse(inputs, options, means):
    objective = options["objective"]
    mean = options["mean"]
    estimator = (options.get("kl") or {}).get("estimator")
    refuse_if(objective != "clip", f"no surrogate has the objective {objective}")
    is_masked = "beyond_cap" in options
    refuse_if(is_masked, "a weight of another sampler is cut to the cap, and never masked")
    refuse_if("max_ratio" in options, "no clip is DCPO's")
    refuse_if(mean not in means, f"no aggregation is a mean over {mean}")
    refuse_if(estimator == "k3_weighted", "no KL is weighted by the ratio")
    refuse_if("entropy_coef" in options, "no loss has an entropy bonus")
    refuse_if("scored" in inputs, "rewards must be finite")
