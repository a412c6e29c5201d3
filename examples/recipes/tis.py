"""TIS: truncated (or masked) importance sampling, for tokens that another sampler drew.

An engine such as vLLM gives its tokens other probabilities than the training forward does, although
both have the same weights. So the objective of each token is multiplied by

    w = pi_old / pi_sampler, without a gradient, and a larger w than C becomes C     truncated
    the same, and a larger w than C becomes 0                                        masked

pi_old is the training forward before the first update, and pi_sampler is what `rollout_logprobs` has.
A factor that is not negative may as well be put into the advantage. Truncation comes from the page
"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), which numbers no
equation. IcePop (arXiv 2510.18855) masks, and also where w is below a floor: --sampler_cap 5
--sampler_floor 0.5 --beyond_cap mask.

This project samples with the weights that it trains, so every w is 1 to six digits. With
--sampler_temperature the tokens are drawn at another temperature, and that simulates another engine;
its log-probs are exact. Evaluation samples as always. An entropy bonus and a KL to the reference are
not weighted.
"""

from harness.errors import InputError


class Args:
    sampler_cap: float = option(2.0, "C, the largest importance weight of a token", gt=0)
    beyond_cap: Literal["truncate", "mask"] = option("truncate", "a larger weight becomes C, or 0")
    sampler_floor: float = option(0.0, "a smaller weight becomes 0", ge=0)
    sampler_temperature: float | None = option(None, "of a simulated sampler [--temperature]", gt=0)


LINES = {
    "several_updates = args.num_epochs * args.num_minibatches > 1": """
        several_updates = True  # the weights need the old log-probs, even of a single update
    """,
    "add_old_and_ref_logprobs(accelerator, model, reference, micro_batches, several_updates)": """
        add_old_and_ref_logprobs(accelerator, model, reference, micro_batches, several_updates)
        for micro in micro_batches:
            micro["advantages"] = micro["advantages"] * sampler_weights(micro, args, metrics)  # (R, T)
    """,
}

sample = rollout


def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """Sample in training at --sampler_temperature, if it is given."""
    if args.sampler_temperature and seed[2] > 0:  # the step; an evaluation has 0
        temperature = args.sampler_temperature
    return sample(policy, prompts, n, temperature, top_p, seed, args)


def sampler_weights(micro, args, metrics):
    """The importance weights (R, T) of the tokens of a micro-batch, which it logs as `sampler/`."""
    if "rollout_logprobs" not in micro:
        raise InputError("--fast false: stock generate does not give the sampler's log-probs")
    mask = micro["loss_mask"]
    ratios = log_ratio(micro["old_logprobs"], micro["rollout_logprobs"], mask).exp()
    too_large = ratios > args.sampler_cap
    weights = ratios.masked_fill(
        too_large, args.sampler_cap if args.beyond_cap == "truncate" else 0.0
    )
    weights = weights.masked_fill(ratios < args.sampler_floor, 0.0)
    metrics.add_all(
        "sampler", {"weight": weights, "beyond_cap": too_large, "ratio_max": ratios}, mask
    )
    return weights
