"""Steps that leave tokens or rows out of the policy's term, or add a term to some of them."""

import math

from . import steps
from .arithmetic import add, check_gradient, each, filled, flat, mean, weighted_sum
from .policy import advantages_of, log_ratios, policy_step, row_mean

# --- which tokens belong together: those of the optimizer step, unless by mistake ---


def scopes_of(inputs, options):
    """Return the lists of rows whose tokens are compared with each other.

    `within` builds in a mistake: "micro_batch", "process", or "together", the n-th micro-batch of
    every process.
    """
    pieces = steps.pieces_of(inputs, len(inputs["logprobs"]))
    within = options.get("within", "step")
    if within == "micro_batch":
        return flat(pieces)
    if within == "process":
        return [flat(process) for process in pieces]
    if within == "together":
        return [flat(rows) for rows in zip(*pieces, strict=True)]
    return [flat(flat(pieces))]


def numbers_of(table, rows, mask):
    """Return the unmasked numbers of these rows as a list."""
    numbers = []
    for row in rows:
        numbers += [number for number, cell in zip(table[row], mask[row], strict=True) if cell]
    return numbers


def quantile(numbers, share):
    """Return a quantile with linear interpolation."""
    ordered = sorted(numbers)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


# --- the operations ---


def top_entropy_step(inputs, options):
    """The 80/20 rule: only the `share` of the step's tokens with the highest entropy has a loss."""
    mask = steps.mask_of(inputs, inputs["logprobs"])
    entropies = inputs["entropies"]
    chosen = filled(entropies, 0)
    for rows in scopes_of(inputs, options):
        threshold = quantile(numbers_of(entropies, rows, mask), 1 - options["share"])
        for row in rows:
            cells = zip(entropies[row], mask[row], strict=True)
            chosen[row] = [int(cell and entropy >= threshold) for entropy, cell in cells]
    if options.get("counted") == "chosen":  # a mistake
        inputs = inputs | {"mask": chosen}
    expected, worked = policy_step(inputs | {"in_loss": chosen}, options)
    return expected, worked | {"chosen": chosen}


def covariance_step(inputs, options):
    """KL-Cov: -r A, plus a penalty on the tokens whose covariance is among the highest."""
    table = inputs["logprobs"]
    mask = steps.mask_of(inputs, table)
    advantages = advantages_of(inputs)
    covariances = filled(table, 0.0)
    chosen = filled(table, 0)
    for rows in scopes_of(inputs, options):
        center = mean(numbers_of(table, rows, mask))
        baseline = mean(numbers_of(advantages, rows, mask))
        ranked = []
        for row in rows:
            for t, cell in enumerate(mask[row]):
                covariance = (table[row][t] - center) * (advantages[row][t] - baseline)
                covariances[row][t] = covariance
                ranked += [(covariance, row, t)] * cell
        count = max(1, int(options["share"] * len(ranked)))
        for _, row, t in sorted(ranked, reverse=True)[:count]:
            chosen[row][t] = 1
    expected, worked = with_penalty(inputs, options, chosen, abs, signed)
    return expected, worked | {"covariances": covariances, "chosen": chosen}


def off_policy_mask_step(inputs, options):
    """DeepSeek-V3.2: rows with A < 0 that the policy has left behind have no policy term."""
    table = inputs["logprobs"]
    mask = steps.mask_of(inputs, table)
    advantages = advantages_of(inputs)
    change = log_ratios(table, inputs, {"ratio": "token"})
    sign = 1 if options.get("direction") == "turned" else -1  # turned is a mistake
    in_loss = []
    for numbers, own, cells in zip(change, advantages, mask, strict=True):
        divergence = sign * row_mean(numbers, cells)
        if options.get("divergence") == "sum":  # a mistake
            divergence *= sum(cells)
        of_tokens = [divergence] * len(own)
        if options.get("divergence") == "token":  # a mistake
            of_tokens = [sign * number for number in numbers]
        signs = [row_mean(own, cells)] * len(own)
        if options.get("sign_of") == "token":
            signs = own
        if options.get("sign_of") == "none":  # a mistake
            signs = [-1.0] * len(own)
        pairs = zip(of_tokens, signs, strict=True)
        in_loss.append([int(not (a < 0 and d > options["max_divergence"])) for d, a in pairs])
    if options.get("counted") == "kept":  # a mistake
        kept = each(lambda cell, inside: cell * inside, mask, in_loss)
        inputs = inputs | {"mask": kept}
    expected, worked = policy_step(inputs | {"in_loss": in_loss}, options)
    return expected, worked | {"in_loss": in_loss}


def sampler_square_step(inputs, options):
    """A step with the squared log-ratio to the sampler, whose log-probs are `old_logprobs`."""
    everywhere = filled(inputs["logprobs"], 1)
    if options.get("square_of") == "unmasked":  # a mistake: none where the surrogate is 0
        _, worked = policy_step(inputs, options)
        everywhere = each(lambda term: int(term != 0), worked["policy_terms"])
    return with_penalty(inputs, options, everywhere, lambda x: x * x, lambda x: 2 * x)


def with_penalty(inputs, options, chosen, value, slope):
    """Return a policy step plus `penalty_coef` times `value(log r)` of the chosen tokens."""
    table = inputs["logprobs"]
    old = inputs["old_logprobs"]
    weights = steps.step_weights(inputs, table, options)
    scale = each(lambda weight, cell: options["penalty_coef"] * weight * cell, weights, chosen)

    def penalty_at(logprobs):
        return weighted_sum(scale, each(lambda x, y: value(x - y), logprobs, old))

    gradient = each(lambda factor, x, y: factor * slope(x - y), scale, table, old)
    check_gradient(penalty_at, table, gradient)
    expected, worked = policy_step(inputs, options)
    expected["loss"] += penalty_at(table)
    expected["gradient"] = add(expected["gradient"], gradient)
    return expected, worked


def signed(number):
    return (number > 0) - (number < 0)
