"""The surrogates: the loss of a token, and its derivative by the log of the ratio."""

import math

from .arithmetic import clip


def clip_bounds_of(old_logprob, options):
    """Return a token's lowest and highest ratio, and the cap of the ratio where A < 0."""
    cap = options.get("dual_clip", math.inf)
    if "max_ratio" not in options:
        return 1 - options["clip_low"], 1 + options["clip_high"], cap
    probability = math.exp(old_logprob)
    low = 0.5 + 0.5 * math.sqrt(max(0.0, 1 - 4 * options["clip_low"] / probability))
    high = 0.5 + 0.5 * math.sqrt(1 + 4 * options["clip_high"] / probability)
    return low, min(high, options["max_ratio"]), options["max_ratio"]


def clipped_loss(log_ratio, advantage, old_logprob, options):
    ratio = math.exp(log_ratio)
    low, high, cap = clip_bounds_of(old_logprob, options)
    objective = min(ratio * advantage, clip(ratio, low, high) * advantage)
    if advantage < 0:
        objective = max(objective, cap * advantage)
    return -objective


def clipped_slope(log_ratio, advantage, old_logprob, options):
    """Return 0 where a bound applies: above for A > 0, below (and above the cap) for A < 0."""
    ratio = math.exp(log_ratio)
    low, high, cap = clip_bounds_of(old_logprob, options)
    if advantage > 0 and ratio > high:
        return 0.0
    if advantage < 0 and (ratio < low or ratio > cap):
        return 0.0
    return -ratio * advantage


def penalized_loss(log_ratio, advantage, old_logprob, options):
    """PPO's penalty: for a token of the old policy, k1 of KL(old || new) is -log_ratio."""
    return -math.exp(log_ratio) * advantage - options["penalty_coef"] * log_ratio


def penalized_slope(log_ratio, advantage, old_logprob, options):
    return -math.exp(log_ratio) * advantage - options["penalty_coef"]


def unclipped_loss(log_ratio, advantage, old_logprob, options):
    """Return -r A, which is its own derivative by log r."""
    return -math.exp(log_ratio) * advantage


def loss_without_minimum(log_ratio, advantage, old_logprob, options):
    """A mistake: the clipped ratio alone."""
    low, high, _ = clip_bounds_of(old_logprob, options)
    return -clip(math.exp(log_ratio), low, high) * advantage


def slope_without_minimum(log_ratio, advantage, old_logprob, options):
    low, high, _ = clip_bounds_of(old_logprob, options)
    ratio = math.exp(log_ratio)
    return -ratio * advantage if low <= ratio <= high else 0.0


def loss_with_maximum(log_ratio, advantage, old_logprob, options):
    """A mistake: the maximum of the two terms, which is right for a loss, not for an objective."""
    low, high, _ = clip_bounds_of(old_logprob, options)
    ratio = math.exp(log_ratio)
    return -max(ratio * advantage, clip(ratio, low, high) * advantage)


def slope_with_maximum(log_ratio, advantage, old_logprob, options):
    """Return 0 where the clipped term is larger: below for A > 0, above for A < 0."""
    low, high, _ = clip_bounds_of(old_logprob, options)
    ratio = math.exp(log_ratio)
    if (advantage > 0 and ratio < low) or (advantage < 0 and ratio > high):
        return 0.0
    return -ratio * advantage


def loss_with_maximum_below_zero(log_ratio, advantage, old_logprob, options):
    """A mistake: the maximum of the two terms where A < 0."""
    function = loss_with_maximum if advantage < 0 else clipped_loss
    return function(log_ratio, advantage, old_logprob, options)


def slope_with_maximum_below_zero(log_ratio, advantage, old_logprob, options):
    function = slope_with_maximum if advantage < 0 else clipped_slope
    return function(log_ratio, advantage, old_logprob, options)


def loss_capped_for_both_signs(log_ratio, advantage, old_logprob, options):
    """A mistake: for A > 0 the maximum with cap * A is always cap * A, a constant."""
    if advantage > 0:
        return -options["dual_clip"] * advantage
    return clipped_loss(log_ratio, advantage, old_logprob, options)


def slope_capped_for_both_signs(log_ratio, advantage, old_logprob, options):
    return 0.0 if advantage > 0 else clipped_slope(log_ratio, advantage, old_logprob, options)


def turned_loss(log_ratio, advantage, old_logprob, options):
    """A mistake: the objective is minimized."""
    return -clipped_loss(log_ratio, advantage, old_logprob, options)


def turned_slope(log_ratio, advantage, old_logprob, options):
    return -clipped_slope(log_ratio, advantage, old_logprob, options)


def slope_without_cap(log_ratio, advantage, old_logprob, options):
    """A mistake: a gradient through a ratio beyond the cap of dual clip."""
    without_cap = options | {"dual_clip": math.inf}
    return clipped_slope(log_ratio, advantage, old_logprob, without_cap)


SURROGATES = {  # by `objective`; a variant adds its two functions here
    "clip": (clipped_loss, clipped_slope),
    "penalty": (penalized_loss, penalized_slope),
    "unclipped": (unclipped_loss, unclipped_loss),
    "clip_without_minimum": (loss_without_minimum, slope_without_minimum),
    "maximum": (loss_with_maximum, slope_with_maximum),
    "maximum_below_zero": (loss_with_maximum_below_zero, slope_with_maximum_below_zero),
    "cap_on_both_signs": (loss_capped_for_both_signs, slope_capped_for_both_signs),
    "turned": (turned_loss, turned_slope),
    "clip_keeps_slope": (clipped_loss, unclipped_loss),  # a mistake: the slope of a clipped ratio
    "cap_keeps_slope": (clipped_loss, slope_without_cap),
}
