"""What polgrad computes, by its public functions."""

import contextlib
import importlib.metadata
import math

import torch

from library import NotOfferedError, PPOLibrary, refuse_if
from tensors import flat, group_numbers, on_last_token, policy_answer

ESTIMATORS = {  # the function, or GroupNormConfig's `scale` for grpo_advantages
    ("leave_one_out", "none"): "rloo_advantages",
    ("group_mean", "batch_of_centred"): "reinforce_pp_advantages",
    ("group_mean", "group"): "std",
    ("group_mean", "none"): "none",
}


class Adapter(PPOLibrary):
    ratios = ("token", "sequence", "sequence_token")
    kl_estimators = ("k1", "k2", "k3")
    estimators = ESTIMATORS
    needs_rewards = "an error: rewards must be finite"

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

    def advantages(self, groups, estimator, options):
        rewards = torch.tensor(flat(groups), dtype=torch.float64)
        ids = torch.tensor(group_numbers(groups))
        with errors_as_refusals():
            return map(finite, self.estimate(rewards, ids, estimator, options).tolist())

    def estimate(self, rewards, ids, estimator, options):
        polgrad = self.polgrad
        if estimator == "rloo_advantages":
            return polgrad.rloo_advantages(rewards, ids)
        if estimator == "reinforce_pp_advantages":
            config = polgrad.ReinforcePPConfig(batch_norm=True, eps=options["std_eps"])
            return polgrad.reinforce_pp_advantages(rewards, ids, config=config)
        config = polgrad.GroupNormConfig(
            scale=estimator, eps=options["std_eps"], unbiased=options["std_ddof"] == 1
        )
        return polgrad.grpo_advantages(rewards, ids, config)

    # --- one optimizer step ---

    def policy_step(self, inputs, options):
        self.refuse_step(inputs, options)
        refuse_if("beyond_cap" in options, "importance weights are truncated, never masked")
        refuse_if("entropy_coef" in options, "no loss has an entropy bonus")
        return self.step_by(self.loss_config(options, "PG_CLIP"), inputs)

    def weighted_logprob_step(self, inputs, options):
        config = self.loss_config(options | {"ratio": "token"}, "CISPO")
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
                # It takes no totals. Pieces are averaged, as in its microbatch_token_weights.
                yield result.loss / len(parts)

        return policy_answer(inputs, losses_of)

    def loss_config(self, options, surrogate):
        polgrad = self.polgrad
        kl = options.get("kl")
        if kl:
            kl = polgrad.KLLossConfig(polgrad.KLEstimator(kl["estimator"]), kl["coef"])
        correction = None
        if "sampler_cap" in options:
            correction = polgrad.ISCorrectionConfig(cap=options["sampler_cap"], level="token")
        return polgrad.PolicyLossConfig(
            ratio=polgrad.RatioKind[options["ratio"].upper()],
            surrogate=polgrad.SurrogateKind[surrogate],
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

    def kl(self, logprobs, old, ref, estimator):
        mask = torch.ones_like(ref).bool()
        kind = self.polgrad.KLEstimator(estimator)
        return self.polgrad.kl_estimate(logprobs, ref, kind, response_mask=mask)

    # --- PPO ---

    def token_rewards(self, old, ref, scores, mask, kl_coef):
        mask = mask.bool()
        rewards = on_last_token(scores, mask)
        k1 = self.polgrad.KLEstimator.K1
        return self.polgrad.kl_in_reward(rewards, old, ref, k1, kl_coef, response_mask=mask)

    def critic_advantages(self, rewards, values, mask, gamma, gae_lambda):
        config = self.polgrad.GAEConfig(gamma=gamma, lam=gae_lambda)
        with errors_as_refusals():
            return self.polgrad.gae(rewards, values, config=config, response_mask=mask.bool())

    def whitened(self, advantages, mask, eps):
        return self.polgrad.whiten(advantages, mask.bool(), eps=eps)

    def value_losses(self, parts, processes, options):
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


def finite(number):
    """Return the number, or None for NaN, which JSON does not have."""
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def errors_as_refusals():
    try:
        yield
    except ValueError as error:
        raise NotOfferedError(f"an error: {error}") from None
