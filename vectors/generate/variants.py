"""Variants that people ask for: other gates, other weights, other advantages, a curriculum."""

import math

from vectors.generate.advantages import ANY_EPSILON, given, nearly_equal
from vectors.generate.arithmetic import check_gradient, clip, each, mean, sigmoid, variance
from vectors.generate.cases import CONVENTION, FORMULA, Case, Other, Subject
from vectors.generate.policy import (
    CLIP,
    EIGHT_ROWS,
    GRPO,
    OLD,
    RARE_NEW,
    RARE_OLD,
    SAMPLER,
    SURROGATES,
    TOKEN_MEAN,
    policy_step,
)

# --- gates: the loss of a token, and its slope by the log of its ratio ---


def soft_gate(log_ratio, advantage, options):
    """SAPO's sigmoid, its steepness tau, and the factor before it."""
    sign = log_ratio if options.get("steepness_by") == "ratio" else advantage
    tau = options["tau_positive"] if sign > 0 else options["tau_negative"]
    factor = 1.0 if options.get("factor") == "none" else 4 / tau
    return sigmoid(tau * (math.exp(log_ratio) - 1)), tau, factor


def soft_gate_loss(log_ratio, advantage, old_logprob, options):
    gate, _, factor = soft_gate(log_ratio, advantage, options)
    return -factor * gate * advantage


def soft_gate_slope(log_ratio, advantage, old_logprob, options):
    gate, tau, factor = soft_gate(log_ratio, advantage, options)
    return -factor * tau * gate * (1 - gate) * math.exp(log_ratio) * advantage


def divergence_loss(log_ratio, advantage, old_logprob, options):
    """DPPO's: 0 where the probability has moved too far, and away from the old one."""
    ratio = math.exp(log_ratio)
    moved = math.exp(old_logprob) * (ratio - 1)
    if options.get("measure") == "ratio":
        moved = ratio - 1
    away = moved * advantage > 0 or options.get("direction") == "any"
    if abs(moved) > options["max_divergence"] and away:
        return 0.0
    return -ratio * advantage


SURROGATES["soft_gate"] = (soft_gate_loss, soft_gate_slope)
SURROGATES["divergence"] = (divergence_loss, divergence_loss)  # -r A is its own slope by log r


# --- the geometric mean ---


def mean_log_ratio(log_ratios, advantage, options):
    """The mean of a row's clipped log-ratios, and 1 or 0 for each token: whether it moves it."""
    low, high = -options["clip_low"], options["clip_high"]
    if options.get("sides") != "both":
        low, high = (-math.inf, high) if advantage > 0 else (low, math.inf)
    if options.get("clip") == "row":
        log_ratios = [mean(log_ratios)] * len(log_ratios)
    clipped = [clip(log_ratio, low, high) for log_ratio in log_ratios]
    return mean(clipped), [float(low <= log_ratio <= high) for log_ratio in log_ratios]


def geometric_mean_step(inputs, options):
    """GMPO: the mean over rows of -A times the geometric mean of the clipped ratios."""
    advantages = inputs["advantages"]

    def ratios_at(table):
        """(ratio, whether its tokens move it) of each row."""
        log_ratios = each(lambda new, old: new - old, table, inputs["old_logprobs"])
        result = []
        for row, advantage in zip(log_ratios, advantages, strict=True):
            log, moves = mean_log_ratio(row, advantage, options)
            result.append((math.exp(log), moves))
        return result

    def loss_at(table):
        pairs = zip(ratios_at(table), advantages, strict=True)
        return mean([-advantage * ratio for (ratio, _), advantage in pairs])

    gradient = []
    for (ratio, moves), advantage in zip(ratios_at(inputs["logprobs"]), advantages, strict=True):
        share = -advantage * ratio / len(moves) / len(advantages)
        gradient.append([share * move for move in moves])
    check_gradient(loss_at, inputs["logprobs"], gradient)
    ratios = [ratio for ratio, _ in ratios_at(inputs["logprobs"])]
    return {"loss": loss_at(inputs["logprobs"]), "gradient": gradient}, {"ratios": ratios}


# --- advantages ---


def mean_normalized_advantages(inputs, options):
    """MaxRL: (R - mean) / mean of the group; 0 where the mean is 0, or without a reward."""
    advantages = []
    for rewards in inputs["rewards"]:
        scored = given(rewards)
        center = mean(scored)
        divisor = {"mean": center, "deviation": math.sqrt(variance(scored, 1)), "none": 1.0}
        row = []
        for reward in rewards:
            agrees = reward is None or nearly_equal(scored)
            row.append(0.0 if agrees else (reward - center) / divisor[options["divisor"]])
        advantages.append(row)
    return {"advantages": advantages}, {}


def decoupled_advantages(inputs, options):
    """GDPO: each part standardized in its group, the weighted sum, and that over the batch."""
    parts, weights = inputs["parts"], options["weights"]
    if options.get("missing") == "zero":  # a mistake
        parts = [each(lambda reward: reward or 0.0, groups) for groups in parts]
    if options.get("order") == "sum_first":
        summed = each(lambda *rewards: weighted(rewards, weights), *parts)
        parts, weights = [summed], [1.0]
    standard = [[standardized(group, options) for group in groups] for groups in parts]
    sums = each(lambda *advantages: weighted(advantages, weights), *standard)
    if options.get("over_batch") is False:
        return {"advantages": each(lambda number: number or 0.0, sums)}, {}
    numbers = given([number for row in sums for number in row])
    center, spread = mean(numbers), math.sqrt(variance(numbers, options["std_ddof"]))

    def over_batch(number):
        return 0.0 if number is None else (number - center) / (spread + options["std_eps"])

    return {"advantages": each(over_batch, sums)}, {"sums": each(lambda x: x or 0.0, sums)}


def weighted(numbers, weights):
    """The weighted sum of what is there, or None."""
    pairs = [(x, weight) for x, weight in zip(numbers, weights, strict=True) if x is not None]
    return sum(x * weight for x, weight in pairs) if pairs else None


def standardized(rewards, options):
    """The advantages of a group by its own mean and deviation; None without a reward."""
    scored = given(rewards)
    result = []
    for reward in rewards:
        if reward is None:
            result.append(None)
        elif nearly_equal(scored):
            result.append(0.0)
        else:
            spread = math.sqrt(variance(scored, options["std_ddof"])) + options["std_eps"]
            result.append((reward - mean(scored)) / spread)
    return result


# --- the curriculum ---


def pass_rate_curriculum(inputs, options):
    """The pass rates after visits [prompt, share of right answers], and the chances of a draw."""
    rates = [0.5] * inputs["prompts"]
    for prompt, share in inputs["visits"]:
        rates[prompt] = rates[prompt] + options["step"] * (share - rates[prompt])
    weights = [rate * (1 - rate) for rate in rates]
    uniform = options["uniform_share"]
    chances = [(1 - uniform) * weight / sum(weights) + uniform / len(rates) for weight in weights]
    return {"rates": rates, "chances": chances}, {}


# --- the cases ---

SAPO = {
    "objective": "soft_gate",
    "ratio": "token",
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "mean": "rows",
}
DPPO = {"objective": "divergence", "ratio": "token", "max_divergence": 0.15, "mean": "rows"}
GMPO = {"clip_low": 0.4, "clip_high": 0.4}
GDPO = {"weights": [1.0, 0.5], "std_ddof": 1, "std_eps": 1e-6}
RIGHT = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4]
SHORT = [[0.9, 0.8, 0.1, 0.2], [0.3, 0.3, 0.3, 0.3], [0.1, 0.2, 0.3, 0.4], [0.6, 0.5, 0.7, 0.6]]
RARE = {"logprobs": RARE_NEW, "old_logprobs": RARE_OLD}
HARD_CLIP = Other(says="GRPO's clip of the ratio", options=CLIP)

CASES = [
    Case(
        id="variants/sapo",
        operation=policy_step,
        inputs_from="eight rows",
        options=SAPO,
        rests_on=FORMULA,
        source="SAPO 2511.20347 Eq. 5-6",
        catches="One steepness for both signs, or a gate without its factor 4 / tau.",
        others=[
            HARD_CLIP,
            Other(says="tau_positive for both signs", options={"tau_negative": 1.0}),
            Other(says="the ratio chooses tau", options={"steepness_by": "ratio"}),
            Other(says="the factor 4 / tau is missing", options={"factor": "none"}),
            TOKEN_MEAN,
        ],
    ),
    Case(
        id="variants/sapo-first-step",
        operation=policy_step,
        inputs_from="eight rows",
        inputs={"logprobs": OLD},
        options=SAPO,
        rests_on=FORMULA,
        source="SAPO 2511.20347 Eq. 5-6 where pi is pi_old: the gradient is GRPO's",
        catches="A gate whose slope at ratio 1 is not 1.",
        others=[
            Other(says="the factor 4 / tau is missing", options={"factor": "none"}),
            TOKEN_MEAN,
        ],
    ),
    Case(
        id="variants/gmpo",
        operation=geometric_mean_step,
        inputs_from="eight rows",
        inputs={"advantages": [0.9, -1.1, -0.7, 0.9, -0.4, 1.3, 0.8, 0.6]},
        options=GMPO,
        rests_on=FORMULA,
        source="GMPO 2507.20673: a token's log-ratio is clipped on one side, and then averaged",
        catches="The clip after the mean, or on both sides.",
        others=[
            Other(says="the clip is on both sides", options={"sides": "both"}),
            Other(says="the row's mean is clipped, as in GSPO", options={"clip": "row"}),
        ],
    ),
    Case(
        id="variants/dppo",
        operation=policy_step,
        inputs_from="eight rows",
        inputs=RARE,
        options=DPPO,
        rests_on=FORMULA,
        source="DPPO 2602.04879, binary total variation, with delta 0.15; old_logprobs are those of the sampler",
        catches="A mask that also stops tokens on their way back, or that measures the ratio.",
        others=[
            HARD_CLIP,
            Other(says="the mask acts in both directions", options={"direction": "any"}),
            Other(says="delta bounds the ratio", options={"measure": "ratio"}),
            TOKEN_MEAN,
        ],
    ),
    Case(
        id="variants/masked-sampling",
        operation=policy_step,
        inputs_from="eight rows",
        inputs={"sampler_logprobs": SAMPLER},
        options=GRPO | {"sampler_cap": 2.0, "beyond_cap": "mask"},
        rests_on=CONVENTION,
        source="masked importance sampling: 0 where pi_old / pi_sampler is above 2",
        catches="A weight that is cut to the cap, or left as it is.",
        others=[
            Other(says="the weight is cut to the cap", options={"beyond_cap": "truncate"}),
            Other(says="the weight has no cap", options={"sampler_cap": 1e9}),
        ],
    ),
    Case(
        id="variants/icepop",
        operation=policy_step,
        inputs_from="eight rows",
        inputs={"sampler_logprobs": [[-0.45, -0.4, -0.25], *SAMPLER[1:]]},
        options=GRPO | {"sampler_cap": 5.0, "beyond_cap": "mask", "sampler_floor": 0.5},
        rests_on=CONVENTION,
        source="IcePop 2510.18855: 0 where pi_old / pi_sampler is not between 0.5 and 5",
        catches="A mask that has one bound only.",
        others=[Other(says="there is no lower bound", options={"sampler_floor": 0.0})],
    ),
    Case(
        id="variants/maxrl",
        operation=mean_normalized_advantages,
        inputs={"rewards": [*RIGHT, [1.0, None, 0.0, 0.0]]},
        options={"divisor": "mean"},
        rests_on=FORMULA,
        source="MaxRL 2602.02710, Algorithm 1; the mean over rows has its 1 / N",
        catches="0 / 0 where no completion is right, or the deviation for the mean.",
        others=[
            Other(says="the divisor is the deviation", options={"divisor": "deviation"}),
            Other(says="nothing divides", options={"divisor": "none"}),
        ],
    ),
    Case(
        id="variants/gdpo",
        operation=decoupled_advantages,
        inputs={"parts": [RIGHT, SHORT]},
        options=GDPO,
        rests_on=FORMULA,
        source="GDPO 2601.05242 Eq. 4-6; it gives no ddof and no epsilon, here 1 and 1e-6",
        catches="A sum whose parts are not standardized, or one that the batch does not divide.",
        tolerance=ANY_EPSILON,
        others=[
            Other(says="the sum is standardized, not its parts", options={"order": "sum_first"}),
            Other(says="the batch does not divide", options={"over_batch": False}),
            Other(says="the parts have no weights", options={"weights": [1.0, 1.0]}),
        ],
    ),
    Case(
        id="variants/gdpo-missing",
        operation=decoupled_advantages,
        inputs={
            "parts": [
                [[1.0, 0.0, None, 0.0], [1.0, 1.0, 0.0, None]],
                [[0.9, None, None, 0.2], [0.3, 0.4, 0.1, 0.7]],
            ]
        },
        options=GDPO,
        rests_on=CONVENTION,
        source="a part that is missing (null) counts in no statistic, and adds nothing; a row "
        "without any part counts nowhere and has 0. The authors' code takes a missing one for 0",
        catches="One missing part that makes a group NaN, or that counts as 0.",
        tolerance=ANY_EPSILON,
        others=[Other(says="a missing part is 0", options={"missing": "zero"})],
    ),
    Case(
        id="variants/curriculum",
        operation=pass_rate_curriculum,
        inputs={
            "prompts": 5,
            "visits": [[0, 1.0], [1, 0.0], [2, 0.5], [0, 1.0], [3, 0.25], [0, 0.75], [1, 0.125]],
        },
        options={"step": 0.5, "uniform_share": 0.1},
        rests_on=CONVENTION,
        source="this project's own: chances go with p (1 - p), as the signal of a prompt of pass "
        "rate p does (2504.03380); p moves halfway at each visit",
        catches="A rate that is replaced at each visit, or chances that go with 1 - p.",
        others=[
            Other(says="the last visit is the rate", options={"step": 1.0}),
            Other(says="no share is uniform", options={"uniform_share": 0.0}),
        ],
    ),
]

SUBJECT = Subject(
    name="variants",
    about="Variants of the policy's loss, of advantages and of the draw of prompts.",
    shared_inputs={"eight rows": EIGHT_ROWS},
    cases=CASES,
)
