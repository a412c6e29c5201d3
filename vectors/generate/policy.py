"""The policy loss of one optimizer step, and its gradient by the log-probs."""

import math
from functools import partial

from . import eight_rows, steps
from .arithmetic import add, check_gradient, each, filled, flat, weighted_sum
from .cases import CONVENTION, Case, Other, Subject
from .kl import FROZEN, kl_slope, kl_value
from .methods import (
    ADJACENT_GROUPS,
    CAP_KEEPS_SLOPE,
    CLIP,
    CLIP_KEEPS_SLOPE,
    DAPO,
    DAPO_PAPER,
    DCPO,
    DCPO_PAPER,
    DIVIDED_TWICE,
    DR_GRPO,
    DR_GRPO_PAPER,
    ENTROPY_OF_TOKENS,
    GROUPS_ADDED,
    GRPO,
    GRPO_PAPER,
    GSPO,
    GSPO_PAPER,
    K3,
    KL_OF_TOKENS,
    KL_TURNED,
    KL_UNMASKED,
    KL_UNWEIGHTED,
    LOSS_UNMASKED,
    MASKED_COUNT,
    MAXIMUM,
    MAXIMUM_BELOW_ZERO,
    NO_CAP,
    NO_MINIMUM,
    NOTHING_MASKED,
    OF_UNSCORED_ROWS,
    PPO,
    RATIO_BY_WIDTH,
    RATIO_OF_SUM,
    ROW_MEANS,
    TOKEN_MEAN,
    TURNED,
    with_kl,
)
from .surrogates import SURROGATES, clip_bounds_of


def policy_step(inputs, options):
    """Return the loss of one optimizer step, and its gradients by log-probs and entropies."""
    logprobs = inputs["logprobs"]
    weights = {}
    for term in ("loss", "kl", "entropy"):
        weights[term] = term_weights(term, inputs, options)
    if "in_loss" in inputs:  # an operation that leaves tokens out of the policy's term alone
        weights["loss"] = each(lambda w, cell: w * cell, weights["loss"], inputs["in_loss"])
    if options.get("kl_times_weight"):  # a mistake
        caps = sampler_weights(inputs, options)
        weights["kl"] = each(lambda w, cap: w * cap, weights["kl"], caps)

    def loss_at(table):
        loss = weighted_sum(weights["loss"], policy_terms(table, inputs, options))
        if "kl" in options:
            loss += weighted_sum(weights["kl"], kl_terms(table, inputs, options))
        if "entropy_coef" in options:
            bonus = weighted_sum(weights["entropy"], inputs["entropies"])
            loss -= options["entropy_coef"] * bonus
        return loss

    gradient = policy_gradient(inputs, options, weights["loss"])
    if "kl" in options and options.get("kl_gradient") != "none":
        gradient = add(gradient, kl_gradient(inputs, options, weights["kl"]))
    if not has_wrong_gradient(options):
        check_gradient(loss_at, logprobs, gradient)
    expected = {"loss": loss_at(logprobs), "gradient": gradient}
    if "entropy_coef" in options:
        coefficient = -options["entropy_coef"]
        by_entropy = each(lambda weight: coefficient * weight, weights["entropy"])
        expected["entropy_gradient"] = by_entropy
    worked = {"policy_terms": policy_terms(logprobs, inputs, options), "weights": weights["loss"]}
    if "kl" in options:
        worked["kl_terms"] = kl_terms(logprobs, inputs, options)
    return expected, worked


def has_wrong_gradient(options):
    """Return whether the options build in a mistake whose gradient is not that of its loss."""
    return (
        options["objective"] in ("clip_keeps_slope", "cap_keeps_slope")
        or options.get("ratio_gradient") == "divided_twice"
        or options.get("kl_gradient") == "none"
        or options.get("kl", {}).get("estimator") in FROZEN
    )


def term_weights(term, inputs, options):
    """Return the weights of a term: "loss", "kl" or "entropy". They differ by mistake alone.

    To build in a mistake, {term}_mean and {term}_totals override the options, {term}_mask may be
    "none", and {term}_unscored makes rows without a reward "weighed" or just "counted".
    """
    table = inputs["logprobs"]
    changed = dict(options)
    for name in ("mean", "totals"):
        if f"{term}_{name}" in options:
            changed[name] = options[f"{term}_{name}"]
    unscored = options.get(f"{term}_unscored")
    if unscored == "weighed":
        return steps.with_unscored_rows(inputs, table, changed)
    if unscored == "counted":
        return steps.with_unscored_count(inputs, table, changed)
    weights = steps.step_weights(inputs, table, changed)
    return steps.without_mask(weights) if options.get(f"{term}_mask") == "none" else weights


def log_ratios(table, inputs, options):
    """Return the log of each token's ratio: its own, or the mean over its row (GSPO)."""
    old = inputs["old_logprobs"]
    differences = each(lambda new, before: new - before, table, old)
    if options["ratio"] == "token":
        return differences
    mask = ratio_mask(table, inputs, options)
    if options.get("ratio_of_batch"):
        return filled(table, row_mean(flat(differences), flat(mask)))
    divisors = ratio_divisors(mask, options)
    result = []
    for row, cells, divisor in zip(differences, mask, divisors, strict=True):
        result.append([row_sum(row, cells) / divisor] * len(row))
    if options["ratio"] == "sequence":
        return result
    # "sequence_token": the row's ratio as a constant, times pi / pi with a constant denominator.
    constant = log_ratios(inputs["logprobs"], inputs, options | {"ratio": "sequence"})
    moved = each(lambda new, now: new - now, table, inputs["logprobs"])
    return add(constant, moved)


def ratio_mask(table, inputs, options):
    """Return the mask of the tokens in a row's ratio: the batch's, unless by mistake."""
    if options.get("ratio_of_masked_tokens"):
        return filled(table, 1)
    return steps.mask_of(inputs, table)


def row_sum(numbers, mask):
    return sum(number for number, cell in zip(numbers, mask, strict=True) if cell)


def row_mean(numbers, mask):
    return row_sum(numbers, mask) / max(sum(mask), 1)


def ratio_divisors(mask, options):
    """Return the divisor of each row's summed log-ratios: its tokens, unless by mistake."""
    divisor = options.get("ratio_divisor")
    if divisor == "one":
        return [1] * len(mask)
    if divisor == "width":
        return [max(map(len, mask))] * len(mask)
    return [max(sum(cells), 1) for cells in mask]


def advantages_of(inputs):
    """Return the advantages as a table; a row's number is repeated for each token."""
    result = []
    for advantage, row in zip(inputs["advantages"], inputs["logprobs"], strict=True):
        result.append(advantage if isinstance(advantage, list) else [advantage] * len(row))
    return result


def sampler_weights(inputs, options):
    """Return constant importance weights pi_old / pi_sampler, truncated at the cap.

    With `beyond_cap` "mask" they are 0 beyond the cap and below the floor.
    """
    if "sampler_cap" not in options:
        return filled(inputs["logprobs"], 1.0)

    def weight(old, sampler):
        ratio = math.exp(old - sampler)
        if ratio < options.get("sampler_floor", 0.0):
            return 0.0
        if ratio > options["sampler_cap"] and options.get("beyond_cap") == "mask":
            return 0.0
        return min(ratio, options["sampler_cap"])

    numerator = options.get("sampler_numerator", "old_logprobs")
    return each(weight, inputs[numerator], inputs["sampler_logprobs"])


def policy_terms(table, inputs, options):
    """Return the policy's loss of each token at the log-probs `table`."""
    loss, _ = SURROGATES[options["objective"]]

    def policy_term(log_ratio, advantage, old, weight):
        return weight * loss(log_ratio, advantage, old, options)

    return each(
        policy_term,
        log_ratios(table, inputs, options),
        advantages_of(inputs),
        inputs["old_logprobs"],
        sampler_weights(inputs, options),
    )


def kl_terms(table, inputs, options):
    """Return the KL of each token to the reference, times its coefficient."""
    coefficient = options["kl"]["coef"]
    estimator = options["kl"]["estimator"]

    def term(new, log_ratio, ref):
        return coefficient * kl_value(new, new - log_ratio, ref, estimator)

    return each(term, table, kl_log_ratios(table, inputs, options), inputs["ref_logprobs"])


def kl_log_ratios(table, inputs, options):
    """Return the log-ratios of the weighted k3: the token's own, whatever the surrogate uses."""
    level = options.get("kl_ratio", "token")
    return log_ratios(table, inputs, options | {"ratio": level})


def policy_gradient(inputs, options, weights):
    """Return the gradient of the policy's terms by the log-probs, in closed form."""
    _, slope = SURROGATES[options["objective"]]

    def policy_slope(log_ratio, advantage, old, sampler, weight):
        return weight * sampler * slope(log_ratio, advantage, old, options)

    table = inputs["logprobs"]
    by_log_ratio = each(
        policy_slope,
        log_ratios(table, inputs, options),
        advantages_of(inputs),
        inputs["old_logprobs"],
        sampler_weights(inputs, options),
        weights,
    )
    return spread_over_row(by_log_ratio, inputs, options, options["ratio"])


def spread_over_row(by_log_ratio, inputs, options, ratio):
    """Turn derivatives by the log-ratios into derivatives by the log-probs."""
    if ratio != "sequence":
        return by_log_ratio
    mask = ratio_mask(by_log_ratio, inputs, options)
    if options.get("ratio_of_batch"):
        share = sum(map(sum, by_log_ratio)) / sum(map(sum, mask))
        return each(lambda cell: share * cell, mask)
    divisors = ratio_divisors(mask, options)
    if options.get("ratio_gradient") == "divided_twice":  # a mistake
        divisors = [divisor * divisor for divisor in divisors]
    gradient = []
    for slopes, cells, divisor in zip(by_log_ratio, mask, divisors, strict=True):
        share = sum(slopes) / divisor
        gradient.append([share * cell for cell in cells])
    return gradient


def kl_gradient(inputs, options, weights):
    coefficient = options["kl"]["coef"]
    estimator = options["kl"]["estimator"]
    table = inputs["logprobs"]
    ref = inputs["ref_logprobs"]
    ratios = kl_log_ratios(table, inputs, options)

    def slope(new, log_ratio, ref, weight, estimator=estimator):
        return weight * coefficient * kl_slope(new, new - log_ratio, ref, estimator)

    if "kl_ratio" not in options:
        return each(slope, table, ratios, ref, weights)

    # The mistake: the row's ratio passes its gradient to every token of the row.
    def by_ratio(new, log_ratio, ref, weight):
        return weight * coefficient * kl_value(new, new - log_ratio, ref, estimator)

    frozen = each(partial(slope, estimator="k3_frozen_weight"), table, ratios, ref, weights)
    by_row_ratio = each(by_ratio, table, ratios, ref, weights)
    return add(frozen, spread_over_row(by_row_ratio, inputs, options, "sequence"))


def clip_bounds(inputs, options):
    """Return DCPO's bounds of each token's ratio, by its old probability."""
    bounds = [clip_bounds_of(old, options) for old in inputs["old_logprobs"]]
    return {"low": [low for low, _, _ in bounds], "high": [high for _, high, _ in bounds]}, {}


# --- the cases ---


def step_case(name, options, operation=policy_step, **fields):
    """Return a case that starts from the eight rows; `fields` are those of `Case`."""
    return Case(id=name, operation=operation, inputs_from="eight rows", options=options, **fields)


CASES = [
    step_case(
        "policy/first-step",
        GRPO,
        inputs={
            "logprobs": eight_rows.OLD,
            "advantages": [1.0, -1.0, -1.0, 1.0, 0.5, -0.5, 1.5, -1.5],
        },
        source=f"{GRPO_PAPER} at pi = pi_old",
        catches="A loss of 0, mistaken for a bug or tested alone: the gradient is -A / |o| / rows.",
        others=[TOKEN_MEAN],
        threads=[
            "huggingface/open-r1/issues/239",
            "huggingface/trl/issues/2703",
            "huggingface/trl/issues/3452",
        ],
    ),
    step_case(
        "policy/ppo",
        PPO,
        inputs={"advantages": eight_rows.OF_TOKENS},
        source="PPO 1707.06347 Eq. 7; the mean is over tokens",
        catches="A wrong sign, or a clip without the minimum.",
        threads=["rasbt/reasoning-from-scratch/pull/240"],
        others=[
            TURNED,
            CLIP_KEEPS_SLOPE,
            NO_MINIMUM,
            MAXIMUM,
            MAXIMUM_BELOW_ZERO,
            ROW_MEANS,
            Other(
                "the row's mean advantage instead of the token's",
                inputs={"advantages": eight_rows.ROW_ADVANTAGES},
            ),
        ],
    ),
    step_case(
        "policy/dual-clip",
        PPO | {"dual_clip": 3.0},
        source="dual-clip PPO 1912.09729",
        catches="A cap that also applies where A > 0, or that is missing.",
        others=[
            Other("the cap also applies where A > 0", options={"objective": "cap_on_both_signs"}),
            NO_CAP,
            CAP_KEEPS_SLOPE,
        ],
        threads=["thu-ml/tianshou/issues/433"],
    ),
    step_case(
        "policy/ppo-penalty",
        {"objective": "penalty", "penalty_coef": 0.5, "ratio": "token", "mean": "tokens"},
        inputs={"advantages": eight_rows.OF_TOKENS},
        source="PPO 1707.06347 Eq. 8, KL(old || new) estimated by log(pi_old / pi) of a sample",
        catches="A penalty on KL(new || old), or a wrong sign.",
        others=[Other("the penalty has the wrong sign", options={"penalty_coef": -0.5})],
    ),
    step_case(
        "policy/grpo",
        GRPO,
        source=f"{GRPO_PAPER} with beta 0",
        catches="One mean over all tokens instead of the mean of the rows' means.",
        others=[
            TOKEN_MEAN,
            NO_MINIMUM,
            MAXIMUM,
            MAXIMUM_BELOW_ZERO,
            TURNED,
            CLIP_KEEPS_SLOPE,
            Other(
                "every ratio is 1: the current log-probs stand for the old ones",
                inputs={"old_logprobs": eight_rows.BATCH["logprobs"]},
            ),
        ],
        threads=["huggingface/trl/issues/2995", "inclusionAI/AReno/issues/68"],
    ),
    step_case(
        "policy/grpo-kl",
        GRPO | K3,
        inputs={"ref_logprobs": eight_rows.REF},
        source=f"{GRPO_PAPER}-4 with beta 0.04",
        catches="A KL with other weights than the loss, or in the other direction.",
        others=[
            KL_TURNED,
            Other("k3 times the token's ratio", options=with_kl("k3_weighted")),
            Other("the KL is left out", options=with_kl("k3", 0.0)),
            Other("k2 instead of k3", options=with_kl("k2")),
            KL_OF_TOKENS,
            Other("the KL has no gradient", options={"kl_gradient": "none"}),
            TOKEN_MEAN,
        ],
        threads=["huggingface/trl/issues/2995", "allenai/open-instruct/pull/535"],
    ),
    step_case(
        "policy/grpo-k1",
        GRPO | with_kl("k1"),
        inputs={"ref_logprobs": eight_rows.REF},
        source=f"{GRPO_PAPER} with k1 for the KL",
        catches="Another estimator than k1, or a wrong sign.",
        others=[
            Other("log(pi_ref / pi) instead of log(pi / pi_ref)", options=with_kl("k1_of_ref")),
            KL_OF_TOKENS,
            Other("k3 instead of k1", options=with_kl("k3")),
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/grpo-k2",
        GRPO | with_kl("k2"),
        inputs={"ref_logprobs": eight_rows.REF},
        source=f"{GRPO_PAPER} with k2 for the KL",
        catches="Another estimator than k2, or a missing factor 1/2.",
        others=[
            Other("k2 without the factor 1/2", options=with_kl("k2_without_half")),
            KL_OF_TOKENS,
            Other("k3 instead of k2", options=with_kl("k3")),
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/grpo-kl-masked",
        GRPO | K3,
        inputs={"ref_logprobs": eight_rows.REF, "mask": eight_rows.PARTLY},
        source=f"{GRPO_PAPER}-4; |o| and both sums are over unmasked tokens",
        catches="A KL without the mask, or a mean over all tokens of a row, masked ones too.",
        others=[KL_UNMASKED, LOSS_UNMASKED, MASKED_COUNT, NOTHING_MASKED, KL_OF_TOKENS, TOKEN_MEAN],
    ),
    step_case(
        "policy/grpo-kl-missing-rewards",
        GRPO | K3,
        inputs={"ref_logprobs": eight_rows.REF, "scored": eight_rows.WITHOUT_REWARD},
        source="a row without a reward (`scored` 0) has no loss and no KL, and is not counted",
        catches="A row without a reward that keeps its KL, or that is counted in the mean.",
        rests_on=CONVENTION,
        others=[
            Other("rows without a reward keep their KL", options={"kl_unscored": "weighed"}),
            Other(
                "rows without a reward have advantage 0, keep their KL, and are counted",
                inputs={"scored": [1] * 8, "advantages": eight_rows.ZERO_WITHOUT_REWARD},
            ),
            *OF_UNSCORED_ROWS,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/grpo-kl-weighted",
        GRPO | with_kl("k3_weighted"),
        inputs={"ref_logprobs": eight_rows.REF},
        source="DeepSeek-V3.2 2512.02556: k3 times pi / pi_old, gradient included",
        catches="k3 without the weight, or a weight without a gradient.",
        others=[
            KL_UNWEIGHTED,
            Other("k2, which has this gradient only at ratio 1", options=with_kl("k2")),
            Other("the weight has no gradient", options=with_kl("k3_frozen_weight")),
            KL_OF_TOKENS,
            TOKEN_MEAN,
        ],
        threads=["huggingface/trl/pull/4638", "huggingface/trl/pull/6503"],
    ),
    step_case(
        "policy/grpo-entropy",
        GRPO | {"entropy_coef": 0.01},
        inputs={"entropies": eight_rows.ENTROPIES},
        source="an entropy bonus: each token's entropy is weighted like its loss",
        catches="A bonus with the wrong sign, or with another mean than the loss.",
        rests_on=CONVENTION,
        others=[
            Other("the entropy has the wrong sign", options={"entropy_coef": -0.01}),
            ENTROPY_OF_TOKENS,
            TOKEN_MEAN,
        ],
        threads=["huggingface/trl/pull/6140", "huggingface/trl/pull/6648"],
    ),
    step_case(
        "policy/grpo-entropy-masked",
        GRPO | {"entropy_coef": 0.01},
        inputs={"entropies": eight_rows.ENTROPIES, "mask": eight_rows.PARTLY},
        source="an entropy bonus: each token's entropy is weighted like its loss, 0 if masked",
        catches="An entropy bonus without the mask.",
        rests_on=CONVENTION,
        others=[
            Other("the entropy is not masked", options={"entropy_mask": "none"}),
            ENTROPY_OF_TOKENS,
            MASKED_COUNT,
            NOTHING_MASKED,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/grpo-empty-rows",
        GRPO,
        inputs={"mask": eight_rows.EMPTY},
        source="a row whose tokens are all masked is still a row; no paper says so",
        catches="0 / 0 in a row without tokens, or another number of rows.",
        rests_on=CONVENTION,
        others=[
            Other("rows without tokens are not counted", options={"empty_rows_count": False}),
            MAXIMUM,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/dr-grpo",
        DR_GRPO,
        source=f"{DR_GRPO_PAPER}, with the constant 8",
        catches="The width of the batch, here 6, instead of a constant, or no mean over rows.",
        others=[
            Other("the longest row instead of the constant", options={"constant": 6}),
            Other(
                "the constant or the mean over 8 rows is missing (the same here)",
                options={"constant": 1.0},
            ),
            ROW_MEANS,
            TOKEN_MEAN,
            MAXIMUM,
            CLIP_KEEPS_SLOPE,
        ],
        threads=["allenai/open-instruct/issues/636", "huggingface/trl/pull/3138"],
    ),
    step_case(
        "policy/dr-grpo-entropy",
        DR_GRPO | {"entropy_coef": 0.01},
        inputs={"entropies": eight_rows.ENTROPIES},
        source=f"{DR_GRPO_PAPER}, with an entropy bonus that is divided by the same constant",
        catches="An entropy bonus that is a mean over tokens, while the loss is not.",
        rests_on=CONVENTION,
        others=[
            ENTROPY_OF_TOKENS,
            Other("the entropy bonus is a mean of row means", options={"entropy_mean": "rows"}),
            Other("the entropy has the wrong sign", options={"entropy_coef": -0.01}),
            TOKEN_MEAN,
        ],
        threads=["verl-project/verl/issues/3741", "verl-project/verl/issues/3986"],
    ),
    step_case(
        "policy/sums",
        CLIP | {"mean": "sums"},
        source="the mean over rows of the sum over tokens, as in RLOO 2402.14740",
        catches="A division by the length, or rows that are summed.",
        others=[
            Other(
                "the sum is divided by the longest row", options={"mean": "constant", "constant": 6}
            ),
            Other(
                "the rows are summed, not averaged", options={"mean": "constant", "constant": 0.125}
            ),
            ROW_MEANS,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/sums-empty-rows",
        CLIP | {"mean": "sums"},
        inputs={"mask": eight_rows.EMPTY},
        source="a row whose tokens are all masked is still a row; no paper says so",
        catches="Another number of rows.",
        rests_on=CONVENTION,
        others=[
            Other("rows without tokens are not counted", options={"empty_rows_count": False}),
            ROW_MEANS,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/dapo",
        DAPO,
        source=f"{DAPO_PAPER} over the whole step, as in verl",
        catches="A symmetric clip, or the mean of the rows' means.",
        rests_on=CONVENTION,
        others=[
            Other("clip_low on both sides", options={"clip_high": 0.2}),
            Other("clip_high on both sides", options={"clip_low": 0.28}),
            TURNED,
            MAXIMUM,
            CLIP_KEEPS_SLOPE,
            ROW_MEANS,
            Other("one denominator for each prompt", options={"mean": "groups"}),
        ],
    ),
    step_case(
        "policy/dapo-group",
        DAPO | {"mean": "groups"},
        source=f"{DAPO_PAPER} as printed: the sum over |o_i| is over one prompt's group",
        catches="The other reading of Eq. 8.",
        others=[TOKEN_MEAN, GROUPS_ADDED],
        threads=["verl-project/verl/issues/2776"],
    ),
    step_case(
        "policy/dapo-group-interleaved",
        DAPO | {"mean": "groups"},
        inputs={"groups": eight_rows.INTERLEAVED, "mask": eight_rows.PARTLY},
        source=f"{DAPO_PAPER} as printed: the sum over |o_i| is over one prompt's group",
        catches="Groups formed by position: the rows of a prompt are not adjacent here.",
        others=[
            MASKED_COUNT,
            ADJACENT_GROUPS,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/dapo-group-empty-rows",
        DAPO | {"mean": "groups"},
        inputs={"mask": eight_rows.EMPTY, "groups": eight_rows.GROUPS_OF_TWO},
        source="a prompt whose tokens are all masked is still a prompt; no paper says so",
        catches="0 / 0 in a prompt without tokens, or another number of prompts.",
        rests_on=CONVENTION,
        others=[
            GROUPS_ADDED,
            Other("prompts without tokens are not counted", options={"empty_rows_count": False}),
        ],
    ),
    step_case(
        "policy/dapo-kl-masked",
        DAPO | K3,
        inputs={"ref_logprobs": eight_rows.REF, "mask": eight_rows.PARTLY},
        source=f"{DAPO_PAPER} with GRPO's KL; the count and both sums are over unmasked tokens",
        catches="A KL without the mask, or masked tokens in the denominator.",
        others=[KL_UNMASKED, LOSS_UNMASKED, MASKED_COUNT, NOTHING_MASKED],
    ),
    step_case(
        "policy/dapo-kl-far",
        DAPO | K3,
        inputs=eight_rows.FAR,
        source=f"{DAPO_PAPER} with GRPO's KL, where log(pi / pi_ref) is -13 at two tokens",
        catches="A KL clamped at 10, without a gradient just where the policy has run away.",
        others=[
            Other("k3 is clamped at 10, without a gradient beyond", options=with_kl("k3_clamped")),
            ROW_MEANS,
        ],
        threads=["verl-project/verl/issues/2928"],
    ),
    step_case(
        "policy/gspo",
        GSPO,
        inputs={"logprobs": eight_rows.GSPO_LOGPROBS},
        source=f"{GSPO_PAPER} Eq. 5-7",
        catches="One ratio for the whole batch, or a log-ratio that is not divided by the length.",
        others=[
            Other("one ratio for the whole batch", options={"ratio_of_batch": True}),
            Other("each token's own ratio", options={"ratio": "token"}),
            RATIO_OF_SUM,
            RATIO_BY_WIDTH,
            DIVIDED_TWICE,
            MAXIMUM,
            TOKEN_MEAN,
        ],
        threads=["MakazhanAlpamys/Soup/issues/723"],
    ),
    step_case(
        "policy/gspo-masked",
        GSPO,
        inputs={"logprobs": eight_rows.GSPO_LOGPROBS, "mask": eight_rows.PARTLY},
        source=f"{GSPO_PAPER} Eq. 5-7; |y| and the sum of the log-ratios are over unmasked tokens",
        catches="Masked tokens in the row's ratio.",
        others=[
            Other("masked tokens are in the row's ratio", options={"ratio_of_masked_tokens": True}),
            RATIO_OF_SUM,
            RATIO_BY_WIDTH,
            DIVIDED_TWICE,
            MAXIMUM,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/gspo-token",
        GSPO | {"ratio": "sequence_token"},
        inputs={"logprobs": eight_rows.GSPO_LOGPROBS, "advantages": eight_rows.OF_TOKENS},
        source=f"{GSPO_PAPER} Eq. 13-14",
        catches="The row's mean advantage instead of the token's.",
        others=[
            Other(
                "the gradient of each token flows through the whole row's ratio",
                options={"ratio": "sequence"},
            ),
            RATIO_OF_SUM,
            RATIO_BY_WIDTH,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/gspo-kl-weighted",
        GSPO | with_kl("k3_weighted"),
        inputs={"ref_logprobs": eight_rows.REF},
        source=f"{GSPO_PAPER} Eq. 5-7; the KL of DeepSeek-V3.2 2512.02556, with token ratios",
        catches="A KL weighted by the row's ratio.",
        rests_on=CONVENTION,
        others=[
            Other("the KL is weighted by the row's ratio", options={"kl_ratio": "sequence"}),
            KL_UNWEIGHTED,
            TOKEN_MEAN,
        ],
        threads=["huggingface/trl/issues/6586"],
    ),
    step_case(
        "policy/dcpo",
        DCPO,
        inputs=eight_rows.RARE,
        source=f"{DCPO_PAPER} Eq. 8 and 27: the sum over a group's rows, the mean over prompts",
        catches="A missing cap for A > 0 or for A < 0, or another mean.",
        others=[
            Other("there is no cap", options={"max_ratio": 1e9}),
            ROW_MEANS,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/dcpo-empty-rows",
        DCPO,
        inputs={"mask": eight_rows.EMPTY, "groups": eight_rows.GROUPS_OF_TWO},
        source="a prompt whose tokens are all masked is still a prompt; no paper says so",
        catches="0 / 0 in a row without tokens, or another number of prompts.",
        rests_on=CONVENTION,
        others=[
            Other("prompts without tokens are not counted", options={"empty_rows_count": False}),
            ROW_MEANS,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "policy/tis",
        GRPO | {"sampler_cap": 2.0},
        inputs={"sampler_logprobs": eight_rows.SAMPLER},
        source="truncated importance sampling: each token's loss times min(pi_old / pi_sampler, 2)",
        catches="A weight that is not capped, or that is inverted.",
        rests_on=CONVENTION,
        others=[
            Other("there is no weight", inputs={"sampler_logprobs": eight_rows.OLD}),
            Other("the weight has no cap", options={"sampler_cap": 1e9}),
            Other(
                "the current policy's log-probs instead of the old policy's",
                options={"sampler_numerator": "logprobs"},
            ),
            TOKEN_MEAN,
        ],
        threads=["THUDM/slime/pull/179"],
    ),
    step_case(
        "policy/tis-kl",
        DAPO | K3 | {"sampler_cap": 2.0},
        inputs={"sampler_logprobs": eight_rows.SAMPLER, "ref_logprobs": eight_rows.REF},
        source="truncated importance sampling: the weight is on the objective, and not on the KL",
        catches="A KL that is weighted too.",
        rests_on=CONVENTION,
        others=[
            Other("the weight is on the KL too", options={"kl_times_weight": True}),
            Other("there is no weight", inputs={"sampler_logprobs": eight_rows.OLD}),
            ROW_MEANS,
        ],
    ),
    Case(
        id="policy/dcpo-bounds",
        operation=clip_bounds,
        inputs={
            "old_logprobs": [
                round(math.log(probability), 12)
                for probability in (1.0, 0.9, 1 / 1.2, 0.7, 0.5, 0.1, 0.01, 1 / 450, 0.001)
            ]
        },
        options={"clip_low": 0.16, "clip_high": 0.2, "max_ratio": 10.0},
        source=f"{DCPO_PAPER} Eq. 4 and 27",
        catches="A bound that is not capped at 10, or the root of a negative number.",
        others=[Other("there is no cap", options={"max_ratio": 1e9})],
    ),
]

SUBJECT = Subject(
    name="policy",
    about="The policy loss of one optimizer step, and its gradient by the log-probs.",
    shared_inputs={"eight rows": eight_rows.BATCH},
    cases=CASES,
)
