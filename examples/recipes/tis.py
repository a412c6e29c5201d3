"""TIS: truncated (or masked) importance sampling, for tokens that another sampler drew.

An engine such as vLLM gives its tokens other probabilities than the training forward does, even
with the same weights. So the objective of each token is multiplied by

    w = pi_old / pi_sampler, without a gradient, and a w larger than C becomes C    truncated
    the same, and a w larger than C becomes 0                                       masked

pi_old is the training forward before the first update, and pi_sampler is in `rollout_logprobs`. A
factor that is not negative can be part of the advantage. Truncation comes from the page "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), which numbers no
equation. IcePop (arXiv 2510.18855) masks, and also where w is below a floor: --sampler_cap 5
--sampler_floor 0.5 --beyond_cap mask.

This project samples with the weights that it trains, so every w is 1 to six digits. With
--sampler_temperature the tokens are sampled at another temperature, which simulates another engine
with exact log-probs. Evaluation samples as always. A KL to the reference is not weighted.
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
        if "rollout_logprobs" in batch:
            for micro in micro_batches:
                weights = sampler_weights(micro, args, metrics)
                micro["advantages"] = micro["advantages"] * weights  # (R, T)
    """,
}

sample = rollout


def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """Sample, in training at --sampler_temperature if that is given."""
    if args.sampler_temperature and seed[2] > 0:  # the step, 0 in an evaluation
        temperature = args.sampler_temperature
    batch = sample(policy, prompts, n, temperature, top_p, seed, args)
    if "rollout_logprobs" not in batch:
        raise InputError("--no_fast: stock generate does not return the log-probs")
    return batch


def sampler_weights(micro, args, metrics):
    """Return the importance weights (R, T) of the tokens, and log them as `sampler/`."""
    mask = micro["loss_mask"]
    ratios = log_ratio(micro["old_logprobs"], micro["rollout_logprobs"], mask).exp()
    too_large = ratios > args.sampler_cap
    cap = args.sampler_cap if args.beyond_cap == "truncate" else 0.0
    weights = ratios.masked_fill(too_large, cap)
    weights = weights.masked_fill(ratios < args.sampler_floor, 0.0)
    stats = {"weight": weights, "beyond_cap": too_large, "ratio_max": ratios}
    metrics.add_all("sampler", stats, mask)
    return weights
