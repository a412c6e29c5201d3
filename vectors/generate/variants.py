"""Variants: other gates, weights and advantages, and a curriculum."""

import math

from . import eight_rows, steps
from .advantages import ANY_EPSILON, centre, deviation, given, nearly_equal
from .arithmetic import check_gradient, clip, each, flat, mean, sigmoid, variance, weighted_sum
from .cases import CONVENTION, Case, Other, Subject
from .critic import gae
from .methods import CLIP, GRPO, GSPO, ROW_MEANS, TOKEN_MEAN
from .policy import step_case
from .selections import off_policy_mask_step, sampler_square_step
from .surrogates import SURROGATES

# --- gates: the loss of a token, and its derivative by the log of the ratio ---


def soft_gate(log_ratio, advantage, options):
    """Return SAPO's sigmoid, its steepness tau, and its factor."""
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
    """Return DPPO's loss: 0 where the probability moved too far, and still moves away."""
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


# --- the clipped weight ---


def weighted_logprob_step(inputs, options):
    """CISPO: -w A log pi of each token, with the clipped ratio w as a constant."""
    advantages = inputs["advantages"]
    table = inputs["logprobs"]
    low = 1 - options["clip_low"]
    high = 1 + options["clip_high"]
    weights = steps.step_weights(inputs, table, options)
    ratios = each(lambda new, old: math.exp(new - old), table, inputs["old_logprobs"])
    if options.get("weight") == "unclipped":
        low = -math.inf
        high = math.inf

    def factor_of(ratio, advantage):
        if options.get("beyond_clip") == "dropped" and not low <= ratio <= high:
            return 0.0
        return -clip(ratio, low, high) * advantage

    factors = []
    for row, advantage in zip(ratios, advantages, strict=True):
        factors.append([factor_of(ratio, advantage) for ratio in row])

    def loss_at(logprobs):
        losses = each(lambda factor, logprob: factor * logprob, factors, logprobs)
        return weighted_sum(weights, losses)

    gradient = each(lambda weight, factor: weight * factor, weights, factors)
    check_gradient(loss_at, table, gradient)
    return {"loss": loss_at(table), "gradient": gradient}, {"factors": factors}


# --- the geometric mean ---


def mean_log_ratio(log_ratios, advantage, options):
    """Return the mean of a row's clipped log-ratios, and 1.0 for each token that is not clipped."""
    low = -options["clip_low"]
    high = options["clip_high"]
    if options.get("sides") != "both":
        low, high = (-math.inf, high) if advantage > 0 else (low, math.inf)
    if options.get("clip") == "row":
        log_ratios = [mean(log_ratios)] * len(log_ratios)
    clipped = [clip(log_ratio, low, high) for log_ratio in log_ratios]
    return mean(clipped), [float(low <= log_ratio <= high) for log_ratio in log_ratios]


def geometric_mean_step(inputs, options):
    """GMPO: the mean over rows of -A times the geometric mean of the clipped ratios."""
    advantages = inputs["advantages"]
    table = inputs["logprobs"]
    shares = [sum(row) for row in steps.step_weights(inputs, table, options)]

    def ratios_at(logprobs):
        """Return (ratio, mask of the tokens that are not clipped) of each row."""
        log_ratios = each(lambda new, old: new - old, logprobs, inputs["old_logprobs"])
        result = []
        for row, advantage in zip(log_ratios, advantages, strict=True):
            log, moves = mean_log_ratio(row, advantage, options)
            result.append((math.exp(log), moves))
        return result

    def loss_at(logprobs):
        rows = zip(ratios_at(logprobs), advantages, shares, strict=True)
        return sum(-share * advantage * ratio for (ratio, _), advantage, share in rows)

    gradient = []
    for (ratio, moves), advantage, share in zip(ratios_at(table), advantages, shares, strict=True):
        gradient.append([-share * advantage * ratio / len(moves) * move for move in moves])
    check_gradient(loss_at, table, gradient)
    ratios = [ratio for ratio, _ in ratios_at(table)]
    return {"loss": loss_at(table), "gradient": gradient}, {"ratios": ratios}


# --- advantages ---


def mean_normalized_advantages(inputs, options):
    """MaxRL: (R - mean) / mean of the group; 0 where the mean is 0 or the reward is missing."""
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
    """GDPO: standardize each reward term in its group, sum, and standardize over the batch."""
    parts = inputs["parts"]
    weights = options["weights"]
    if options.get("missing") == "zero":  # a mistake
        parts = [each(lambda reward: reward or 0.0, groups) for groups in parts]
    if options.get("order") == "sum_first":
        summed = each(lambda *rewards: weighted(rewards, weights), *parts)
        parts = [summed]
        weights = [1.0]
    standard = []
    for groups in parts:
        standard.append([standardized(group, options) for group in groups])
    sums = each(lambda *advantages: weighted(advantages, weights), *standard)
    if options.get("over_batch") is False:
        return {"advantages": each(lambda number: number or 0.0, sums)}, {}
    numbers = given(flat(sums))
    center = mean(numbers)
    spread = math.sqrt(variance(numbers, options["std_ddof"]))

    def over_batch(number):
        return 0.0 if number is None else (number - center) / (spread + options["std_eps"])

    return {"advantages": each(over_batch, sums)}, {"sums": each(lambda x: x or 0.0, sums)}


def weighted(numbers, weights):
    """Return the weighted sum of the numbers that are not None, or None."""
    pairs = [(x, weight) for x, weight in zip(numbers, weights, strict=True) if x is not None]
    return sum(x * weight for x, weight in pairs) if pairs else None


def standardized(rewards, options):
    """Return a group's advantages by its own mean and std; None for a missing reward."""
    options = options | {"baseline": "group_mean", "deviation": "group"}
    centred = centre(rewards, options)
    divisor = deviation(rewards, [rewards], [centred], options)
    return [None if difference is None else difference / divisor for difference in centred]


def length_penalized_advantages(inputs, options):
    """Return centred rewards after a length penalty in proportion to the group's mean reward."""
    longest = max(flat(inputs["lengths"]))  # of the batch, used by mistake alone
    advantages = []
    for rewards, lengths in zip(inputs["rewards"], inputs["lengths"], strict=True):
        rate = 1.0 if options.get("scaled") is False else mean(rewards)
        most = longest if options.get("longest_of") == "batch" else max(lengths)
        penalties = [options["length_coef"] * rate * length / most for length in lengths]
        shaped = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        center = mean(rewards) if options.get("baseline") == "unshaped" else mean(shaped)
        advantages.append([reward - center for reward in shaped])
    return {"advantages": advantages}, {}


def gae_with_two_lambdas(inputs, options):
    """VC-PPO and VAPO: returns use the critic's lambda, advantages the policy's."""
    result = {"advantages": [], "returns": []}
    for row in range(len(inputs["values"])):
        one = {name: [table[row]] for name, table in inputs.items()}
        own = options["lambda"]
        if "length_adaptive_alpha" in options:
            own = 1 - 1 / (options["length_adaptive_alpha"] * sum(inputs["mask"][row]))
            own = own if options.get("clamped") is False else max(own, 0.0)
        of_policy, _ = gae(one, options | {"lambda": own})
        of_critic, _ = gae(one, options | {"lambda": options.get("lambda_critic", own)})
        result["advantages"] += of_policy["advantages"]
        result["returns"] += of_critic["returns"]
    return result, {}


# --- the curriculum ---


def pass_rate_curriculum(inputs, options):
    """Return the pass rates after visits [prompt, accuracy], and each prompt's probability."""
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
CISPO = {"clip_low": 1.0, "clip_high": 4.0, "mean": "tokens"}
EPISODES = {
    "rewards": [[0.0, -0.1, 0.05, 0.0, 1.0], [0.1, -0.5]],
    "values": [[0.3, 0.5, 0.2, 0.6, 0.8], [0.4, 0.1]],
    "mask": [[1, 1, 1, 1, 1], [1, 1]],
}
DPPO = {"objective": "divergence", "ratio": "token", "max_divergence": 0.15, "mean": "rows"}
GMPO = {"clip_low": 0.4, "clip_high": 0.4, "mean": "rows"}
GMPO_ADVANTAGES = [0.9, -1.1, -0.7, 0.9, -0.4, 1.3, 0.8, 0.6]
GDPO = {"weights": [1.0, 0.5], "std_ddof": 1, "std_eps": 1e-6}
RIGHT = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4]
SHORT = [[0.9, 0.8, 0.1, 0.2], [0.3, 0.3, 0.3, 0.3], [0.1, 0.2, 0.3, 0.4], [0.6, 0.5, 0.7, 0.6]]
NO_FACTOR = Other("the factor 4 / tau is missing", options={"factor": "none"})
LUSPO = GSPO | {"mean": "sums"}
OPSM = GRPO | {"max_divergence": 0.1}
DROPPED_ROWS = {"advantages": [0.9, -1.1, -0.7, -0.9, -0.4, 1.3, -0.8, 0.6]}
OPSM_THREADS = [
    "huggingface/trl/pull/4857",
    "THUDM/slime/pull/1917",
    "radixark/miles/pull/1127",
]
V32 = "DeepSeek-V3.2 2512.02556, section 3.1 (Off-Policy Sequence Masking)"
HARD_CLIP = Other("the ratio is clipped, as in GRPO", options=CLIP)

CASES = [
    step_case(
        "variants/sapo",
        SAPO,
        source="SAPO 2511.20347 Eq. 5-6",
        catches="One steepness for both signs, or a gate without its factor 4 / tau.",
        others=[
            HARD_CLIP,
            Other("tau_positive for both signs", options={"tau_negative": 1.0}),
            Other(
                "tau depends on the ratio instead of the sign of A",
                options={"steepness_by": "ratio"},
            ),
            NO_FACTOR,
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "variants/sapo-first-step",
        SAPO,
        inputs={"logprobs": eight_rows.OLD},
        source="SAPO 2511.20347 Eq. 5-6 at pi = pi_old: the gradient is GRPO's",
        catches="A gate whose slope at ratio 1 is not 1.",
        others=[NO_FACTOR, TOKEN_MEAN],
    ),
    step_case(
        "variants/cispo",
        CISPO,
        operation=weighted_logprob_step,
        inputs=eight_rows.RARE,
        source="CISPO 2506.13585 Eq. 4-5, with weights up to 5 and no lower bound",
        catches="A token beyond the clip that loses its gradient, which this method keeps.",
        others=[
            Other("tokens beyond the clip are dropped", options={"beyond_clip": "dropped"}),
            Other("the weight is not clipped", options={"weight": "unclipped"}),
            ROW_MEANS,
        ],
    ),
    step_case(
        "variants/gmpo",
        GMPO,
        operation=geometric_mean_step,
        inputs={"advantages": GMPO_ADVANTAGES},
        source="GMPO 2507.20673: token log-ratios are clipped on one side, then averaged",
        catches="A clip after the mean, or on both sides.",
        others=[
            Other("the clip is on both sides", options={"sides": "both"}),
            Other("the row's mean is clipped, as in GSPO", options={"clip": "row"}),
        ],
    ),
    step_case(
        "variants/gmpo-cut",
        GMPO,
        operation=geometric_mean_step,
        inputs={"advantages": GMPO_ADVANTAGES, "pieces": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]},
        source="GMPO 2507.20673: the mean is over the rows of the step, however it is split",
        catches="A mean over the rows of each micro-batch, summed over micro-batches.",
        threads=["verl-project/verl/issues/7913", "verl-project/verl/pull/5614"],
        others=[
            Other(
                "the mean over each micro-batch, then summed",
                options={"totals": "micro_batch_summed"},
            ),
        ],
    ),
    step_case(
        "variants/dppo",
        DPPO,
        inputs=eight_rows.RARE,
        source="DPPO 2602.04879, binary total variation; old_logprobs are the sampler's",
        catches="A mask that also stops tokens on their way back, or that bounds the ratio.",
        others=[
            HARD_CLIP,
            Other("the mask applies in both directions", options={"direction": "any"}),
            Other(
                "the bound is on the ratio instead of the probability", options={"measure": "ratio"}
            ),
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "variants/dppo-square",
        DPPO | {"mean": "tokens", "penalty_coef": 0.05},
        operation=sampler_square_step,
        inputs=eight_rows.RARE,
        rests_on=CONVENTION,
        source="DPPO 2602.04879, plus penalty_coef log(pi / pi_sampler)², as in Kimi K2.5 "
        "2602.02276 and in prime-rl's default loss; old_logprobs are the sampler's",
        catches="A square that stops where the mask does, or half of it.",
        threads=["PrimeIntellect-ai/prime-rl/pull/1776"],
        others=[
            Other("half of the square (k2)", options={"penalty_coef": 0.025}),
            Other("masked tokens have no square", options={"square_of": "unmasked"}),
            Other("there is no square", options={"penalty_coef": 0.0}),
            ROW_MEANS,
        ],
    ),
    step_case(
        "variants/luspo",
        LUSPO,
        inputs={"logprobs": eight_rows.GSPO_LOGPROBS},
        source="LUSPO 2602.05261: GSPO's loss of a row times its length, the mean over rows",
        catches="GSPO, whose gradient has a factor 1 / length.",
        others=[
            Other("GSPO: a row's loss is not multiplied by its length", options={"mean": "rows"}),
            Other("the sum over rows is divided by all tokens", options={"mean": "tokens"}),
            Other("each token's own ratio", options={"ratio": "token"}),
        ],
        threads=["huggingface/trl/pull/4988"],
    ),
    step_case(
        "variants/luspo-first-step",
        LUSPO,
        inputs={"logprobs": eight_rows.OLD},
        source="LUSPO 2602.05261 at pi = pi_old: every token has the gradient -A / rows",
        catches="A factor 1 / length, which GSPO shares with GRPO here.",
        others=[
            Other("GSPO: a row's loss is not multiplied by its length", options={"mean": "rows"}),
            Other("the sum over rows is divided by all tokens", options={"mean": "tokens"}),
        ],
    ),
    step_case(
        "variants/off-policy-mask",
        OPSM,
        operation=off_policy_mask_step,
        inputs=DROPPED_ROWS,
        source=f"{V32}: a row with A < 0 whose mean log(pi_old / pi) is above max_divergence has "
        "no policy term; it stays in the mean",
        catches="A mask of tokens by their own log-ratio, of the other direction, or for any A.",
        threads=OPSM_THREADS,
        others=[
            Other("tokens by their own log-ratio", options={"divergence": "token"}),
            Other("the sum of the log-ratios, not their mean", options={"divergence": "sum"}),
            Other("log(pi / pi_old) instead of log(pi_old / pi)", options={"direction": "turned"}),
            Other("rows with A > 0 are masked too", options={"sign_of": "none"}),
            Other(
                "masked rows are not counted",
                options={"counted": "kept", "empty_rows_count": False},
            ),
            Other("there is no mask", options={"max_divergence": 1e9}),
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "variants/off-policy-mask-token-advantages",
        OPSM,
        operation=off_policy_mask_step,
        inputs={"advantages": eight_rows.OF_TOKENS},
        rests_on=CONVENTION,
        source=f"{V32}, whose A is one number per row; with token advantages the row's mean "
        "decides, so that rows are masked whole",
        catches="A mask that takes only the tokens with A < 0 out of a row.",
        threads=OPSM_THREADS[1:],
        others=[
            Other("the sign of each token's own advantage decides", options={"sign_of": "token"}),
            Other("tokens by their own log-ratio", options={"divergence": "token"}),
            Other("there is no mask", options={"max_divergence": 1e9}),
        ],
    ),
    step_case(
        "variants/masked-sampling",
        GRPO | {"sampler_cap": 2.0, "beyond_cap": "mask"},
        inputs={"sampler_logprobs": eight_rows.SAMPLER},
        rests_on=CONVENTION,
        source="masked importance sampling: 0 where pi_old / pi_sampler is above 2",
        catches="A weight that is truncated at the cap, or left as it is.",
        others=[
            Other("the weight is truncated at the cap", options={"beyond_cap": "truncate"}),
            Other("the weight has no cap", options={"sampler_cap": 1e9}),
            TOKEN_MEAN,
        ],
    ),
    step_case(
        "variants/icepop",
        GRPO | {"sampler_cap": 5.0, "beyond_cap": "mask", "sampler_floor": 0.5},
        inputs={"sampler_logprobs": [[-0.45, -0.4, -0.25], *eight_rows.SAMPLER[1:]]},
        rests_on=CONVENTION,
        source="IcePop 2510.18855: 0 where pi_old / pi_sampler is not between 0.5 and 5",
        catches="A mask with only one bound.",
        others=[Other("there is no lower bound", options={"sampler_floor": 0.0}), TOKEN_MEAN],
    ),
    Case(
        id="variants/maxrl",
        operation=mean_normalized_advantages,
        inputs={"rewards": [*RIGHT, [1.0, None, 0.0, 0.0]]},
        options={"divisor": "mean"},
        source="MaxRL 2602.02710, Algorithm 1, whose 1 / N is in the mean over rows",
        catches="0 / 0 if no completion is right, or a division by the std.",
        others=[
            Other("the advantage is divided by the std", options={"divisor": "deviation"}),
            Other("the advantage is not divided", options={"divisor": "none"}),
        ],
    ),
    Case(
        id="variants/gdpo",
        operation=decoupled_advantages,
        inputs={"parts": [RIGHT, SHORT]},
        options=GDPO,
        source="GDPO 2601.05242 Eq. 4-6; it gives no ddof and no epsilon, here 1 and 1e-6",
        catches="Reward terms that are not standardized, or a sum that is not.",
        tolerance=ANY_EPSILON,
        others=[
            Other("the sum is standardized, not its terms", options={"order": "sum_first"}),
            Other("the sum is not standardized over the batch", options={"over_batch": False}),
            Other("the terms have no weights", options={"weights": [1.0, 1.0]}),
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
        source="a missing term (null) is in no statistic and adds nothing; a row without terms is "
        "not counted and has 0. In the authors' code a missing term is 0",
        catches="A missing term that turns its group into NaN, or that counts as 0.",
        threads=["modelscope/ms-swift/issues/8123"],
        tolerance=ANY_EPSILON,
        others=[Other("a missing term counts as 0", options={"missing": "zero"})],
    ),
    Case(
        id="variants/length-by-pass-rate",
        operation=length_penalized_advantages,
        inputs={
            "rewards": RIGHT,
            "lengths": [[40, 25, 10, 50], [20, 80, 30, 60], [90, 70, 50, 30], [10, 20, 30, 40]],
        },
        options={"length_coef": 0.25},
        rests_on=CONVENTION,
        source="prime-rl's linear length penalty: R - length_coef mean(R) length / longest, mean "
        "and longest of the group; the advantage is that minus its mean",
        catches="A penalty that is as large where no answer is right.",
        others=[
            Other("the penalty has no pass rate", options={"scaled": False}),
            Other("the longest of the batch", options={"longest_of": "batch"}),
            Other(
                "the baseline is the mean of the rewards before the penalty",
                options={"baseline": "unshaped"},
            ),
        ],
    ),
    Case(
        id="variants/vc-ppo",
        operation=gae_with_two_lambdas,
        inputs=EPISODES,
        options={"gamma": 1.0, "lambda": 0.9, "lambda_critic": 1.0},
        source="VC-PPO 2503.01491: lambda 1 for the returns, a smaller one for the advantages",
        catches="Returns computed from the policy's advantages.",
        others=[
            Other("both use the policy's lambda", options={"lambda_critic": 0.9}),
            Other("both use the critic's lambda", options={"lambda": 1.0}),
        ],
    ),
    Case(
        id="variants/vapo",
        operation=gae_with_two_lambdas,
        inputs=EPISODES,
        options={"gamma": 1.0, "lambda": 1.0, "lambda_critic": 1.0, "length_adaptive_alpha": 0.4},
        source="VAPO 2504.05118 Eq. 4-5: lambda is 1 - 1 / (alpha length), here at least 0",
        catches="One lambda for all lengths, or a negative one.",
        others=[
            Other("lambda is 1 for all lengths", options={"length_adaptive_alpha": 1e9}),
            Other("a negative lambda is not clamped", options={"clamped": False}),
        ],
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
        source="this project's own: a prompt of pass rate p is drawn in proportion to p (1 - p), "
        "the size of its signal (2504.03380); p moves halfway at each visit",
        catches="A rate that is replaced at each visit, or probabilities in proportion to 1 - p.",
        others=[
            Other("the rate is that of the last visit", options={"step": 1.0}),
            Other("there is no uniform share", options={"uniform_share": 0.0}),
        ],
    ),
]

SUBJECT = Subject(
    name="variants",
    about="Variants of the policy loss, of advantages, and of drawing prompts.",
    shared_inputs={"eight rows": eight_rows.BATCH},
    cases=CASES,
)
