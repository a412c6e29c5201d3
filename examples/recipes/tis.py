"""TIS: truncated (or masked) importance sampling, for tokens that another sampler drew.

An engine such as vLLM gives its tokens other probabilities than the training forward does, even
with the same weights. So the objective of each token is multiplied by

    w = pi_old / pi_sampler, without a gradient, and a w larger than C becomes C    truncated
    the same, and a w larger than C becomes 0                                       masked

pi_old is the training forward before the first update. A factor that is not negative can be part of
the advantage. Truncation comes from the page "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025), which numbers no equation. IcePop (arXiv 2510.18855) masks, and also
where w is below a floor: --sampler_cap 5 --sampler_floor 0.5 --beyond_cap mask.

An engine returns the log-probs of its tokens: a `rollout` with one puts them into its batch, as
`sampler_logprobs`. `generate` samples with the weights that are trained, so here every w is 1. With
--sampler_temperature it samples at another temperature, which simulates another engine: a forward
at that temperature then gives pi_sampler. Evaluation samples as always. A KL to the reference is
not weighted.
"""

from dataclasses import replace


class Args:
    sampler_cap: float = option(2.0, "C, the largest importance weight of a token", gt=0)
    beyond_cap: Literal["truncate", "mask"] = option("truncate", "a larger weight becomes C, or 0")
    sampler_floor: float = option(0.0, "a smaller weight becomes 0", ge=0)
    sampler_temperature: float | None = option(None, "of a simulated sampler [--temperature]", gt=0)


LINES = {
    "several_updates = args.num_epochs * args.num_minibatches > 1": """
        several_updates = True  # the weights need the old log-probs, even of a single update
    """,
    'micro["old_logprobs"], _ = completion_logprobs(model, micro, args)': """
        micro["old_logprobs"], _ = completion_logprobs(model, micro, args)
        if "sampler_logprobs" not in micro:
            micro["sampler_logprobs"] = simulated_logprobs(model, micro, args)
        weights = sampler_weights(micro, args, metrics)
        micro["advantages"] = micro["advantages"] * weights  # (R, T)
    """,
}

sample = rollout


def rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
    """Sample, in training at --sampler_temperature if that is given."""
    if args.sampler_temperature and seed[2] > 0:  # the step, 0 in an evaluation
        temperature = args.sampler_temperature
    return sample(lm, tokenizer, prompts, n, temperature, top_p, seed, args)


def simulated_logprobs(model, micro, args):
    """Return the log-probs (R, T) that the tokens were sampled with."""
    sampler = replace(args, temperature=args.sampler_temperature or args.temperature)
    return completion_logprobs(model, micro, sampler)[0]


def sampler_weights(micro, args, metrics):
    """Return the importance weights (R, T) of the tokens, and log them as `sampler/`."""
    mask = micro["loss_mask"]
    ratios = log_ratio(micro["old_logprobs"], micro["sampler_logprobs"], mask).exp()
    too_large = ratios > args.sampler_cap
    cap = args.sampler_cap if args.beyond_cap == "truncate" else 0.0
    weights = ratios.masked_fill(too_large, cap)
    weights = weights.masked_fill(ratios < args.sampler_floor, 0.0)
    metrics.add("sampler/weight", weights, mask)
    metrics.add("sampler/beyond_cap", too_large, mask)
    metrics.add("sampler/ratio_max", ratios, mask)
    return weights
