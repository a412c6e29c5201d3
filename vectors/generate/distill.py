"""Distillation from a teacher of whom only the k likeliest tokens are known, with eight tokens."""

import math

from .arithmetic import central_difference, check_gradient, softmax
from .cases import CONVENTION, Case, Other, Subject
from .kl import divergence

# --- the top-k KL ---


def likeliest(chances, count):
    """Return the ids of the `count` likeliest tokens."""
    ranked = sorted(range(len(chances)), key=lambda token: -chances[token])
    return sorted(ranked[:count])


def coarse(chances, chosen, tail):
    """Return the chances of the chosen tokens, and as `tail` says what becomes of the rest."""
    kept = [chances[token] for token in chosen]
    if tail == "bucket":
        return [*kept, 1 - sum(kept)]
    if tail == "renormalized":
        return [chance / sum(kept) for chance in kept]
    return kept


def topk_value(logits, chosen, teacher, options):
    """Return the KL of one position over the chosen tokens."""
    policy = coarse(softmax(logits), chosen, options["tail"])
    target = coarse(teacher, chosen, options["tail"])
    if options["direction"] == "forward":
        return divergence(target, policy)
    return divergence(policy, target)


def topk_kl(inputs, options):
    """Return the top-k KL at each position, and its gradient by the policy's logits.

    forward is KL(teacher || policy), reverse KL(policy || teacher).
    """
    values = []
    gradient = []
    rows = zip(inputs["logits"], inputs["teacher_logits"], strict=True)
    for logits, teacher_logits in rows:
        teacher = softmax(teacher_logits)
        chosen = chosen_by(options, softmax(logits), teacher)

        def value_at(numbers, chosen=chosen, teacher=teacher):
            return topk_value(numbers, chosen, teacher, options)

        value = value_at(logits)
        row = topk_slope(softmax(logits), teacher, chosen, options)
        check_gradient(lambda table, value_at=value_at: value_at(table[0]), [logits], [row])
        if options.get("floor") == "zero" and value < 0:  # a mistake
            value = 0.0
            row = [0.0] * len(row)
        values.append(value)
        gradient.append(row)
    return {"loss": values, "gradient": gradient}, {}


def chosen_by(options, policy, teacher):
    owner = {"teacher": teacher, "policy": policy}[options["top_k_of"]]
    return likeliest(owner, options["top_k"])


def topk_slope(policy, teacher, chosen, options):
    """Return the derivative of the top-k KL by the logits: sum_a (dKL / dq_a) q_a (1 - q)."""
    kept = sum(policy[token] for token in chosen)
    known = sum(teacher[token] for token in chosen)
    by_chance = [0.0] * len(policy)  # the derivative by each token's probability
    for token in range(len(policy)):
        inside = token in chosen
        if inside:
            q, p = policy[token], teacher[token]
        elif options["tail"] == "bucket":
            q, p = 1 - kept, 1 - known
        else:
            continue
        by_chance[token] = -p / q if options["direction"] == "forward" else math.log(q / p) + 1
    if options["tail"] == "renormalized":
        by_chance = renormalized_slope(policy, teacher, chosen, options)
    center = sum(q * slope for q, slope in zip(policy, by_chance, strict=True))
    return [q * (slope - center) for q, slope in zip(policy, by_chance, strict=True)]


def renormalized_slope(policy, teacher, chosen, options):
    """Return the derivative by each probability, if those of the chosen tokens are renormalized."""
    q = coarse(policy, chosen, "renormalized")
    p = coarse(teacher, chosen, "renormalized")
    kept = sum(policy[token] for token in chosen)
    result = [0.0] * len(policy)
    value = divergence(q, p)
    for token, own, target in zip(chosen, q, p, strict=True):
        slope = math.log(own / target) - value
        result[token] = (1 - target / own if options["direction"] == "forward" else slope) / kept
    return result


# --- distillation by a policy gradient ---


def distill_expected_gradient(inputs, options):
    """Return the expected gradient by the logits of -A log pi, over tokens of the policy.

    `advantage` is "topk_kl", minus the top-k KL of the position, or "sampled", the log of
    pi_teacher / pi of the sampled token. Neither has a gradient of its own. With "loss" there is
    no policy gradient: the top-k KL itself is the loss.
    """
    logits = inputs["logits"]
    policy = softmax(logits)
    teacher = softmax(inputs["teacher_logits"])
    chosen = chosen_by(options, policy, teacher)
    value = topk_value(logits, chosen, teacher, options)
    gradient = [0.0] * len(policy)
    for token, chance in enumerate(policy):
        advantage = -value
        if options["advantage"] == "sampled":
            advantage = math.log(teacher[token] / chance)
        for other, probability in enumerate(policy):
            gradient[other] -= chance * advantage * ((token == other) - probability)
    if options["advantage"] == "loss":
        gradient = topk_slope(policy, teacher, chosen, options)
    worked = {"topk_kl": value, "kl": divergence(policy, teacher)}
    return {"gradient": gradient}, worked


def check_sampled_token():
    """Check that distilling by the sampled token follows the gradient of KL(pi || teacher)."""
    teacher = softmax(STATE["teacher_logits"])
    options = AS_REWARD | {"advantage": "sampled"}
    expected, _ = distill_expected_gradient(STATE, options)
    for place, logit in enumerate(STATE["logits"]):

        def moved(value, place=place):
            logits = list(STATE["logits"])
            logits[place] = value
            return divergence(softmax(logits), teacher)

        assert abs(central_difference(moved, logit) - expected["gradient"][place]) < 1e-9


# --- the cases ---

POSITIONS = {
    "logits": [
        [2.1, 0.3, -1.2, 1.4, -0.5, 0.9, -2.3, 0.1],
        [0.2, 1.9, 1.1, -0.7, 2.4, -1.6, 0.5, -0.1],
        [-0.4, 0.8, 3.6, -1.1, 0.1, 1.3, -0.9, -2.0],
    ],
    "teacher_logits": [
        [1.2, 0.6, -0.9, 2.2, -0.1, 0.4, -1.5, 0.8],
        [0.9, 1.3, 0.8, -0.2, 1.6, -0.6, 1.1, 0.4],
        [0.3, 1.9, 2.2, -0.8, 0.7, 2.0, -0.3, -1.1],
    ],
}
STATE = {name: table[0] for name, table in POSITIONS.items()}
FORWARD = {"top_k": 3, "top_k_of": "teacher", "direction": "forward", "tail": "bucket"}
REVERSE = FORWARD | {"direction": "reverse"}
AS_REWARD = REVERSE | {"top_k_of": "policy", "tail": "renormalized", "advantage": "topk_kl"}
TAIL_THREADS = ["verl-project/verl/issues/7856", "verl-project/verl/pull/7855"]
REWARD_THREADS = ["radixark/miles/issues/2362", "radixark/miles/issues/2352"]
WITHOUT_TAIL = Other("the sum over the k tokens, without a tail", options={"tail": "none"})
CUT_AT_ZERO = Other(
    "the sum over the k tokens, cut off at 0, where it has no gradient",
    options={"tail": "none", "floor": "zero"},
)
RENORMALIZED = Other("the k probabilities are renormalized", options={"tail": "renormalized"})
WHOLE = Other("the KL of the whole vocabulary", options={"top_k": 8, "tail": "none"})


def topk_case(name, options, **fields):
    fields = {"rests_on": CONVENTION, "threads": TAIL_THREADS} | fields
    return Case(
        id=f"distill/{name}",
        operation=topk_kl,
        inputs_from="three positions",
        options=options,
        **fields,
    )


def reward_case(name, options, others, **fields):
    return Case(
        id=f"distill/{name}",
        operation=distill_expected_gradient,
        inputs=STATE,
        options=options,
        threads=REWARD_THREADS,
        others=[Other(says, options=changed) for says, changed in others],
        **fields,
    )


CASES = [
    topk_case(
        "topk-tail",
        FORWARD,
        source="KL(teacher || policy) of the teacher's k likeliest tokens and one tail that has "
        "the rest: a KL of k + 1 outcomes, at least 0 and at most the whole KL",
        catches="A sum over k tokens, which is no KL, may be negative, and ignores the tail.",
        others=[
            WITHOUT_TAIL,
            CUT_AT_ZERO,
            RENORMALIZED,
            Other("the other direction", options={"direction": "reverse"}),
            WHOLE,
        ],
    ),
    topk_case(
        "topk-tail-reverse",
        REVERSE,
        source="KL(policy || teacher) of the teacher's k likeliest tokens and one tail that has "
        "the rest",
        catches="A sum over k tokens, which falls as the policy's mass leaves them.",
        others=[
            WITHOUT_TAIL,
            RENORMALIZED,
            Other("the policy's k likeliest tokens", options={"top_k_of": "policy"}),
            Other("the other direction", options={"direction": "forward"}),
            WHOLE,
        ],
    ),
    reward_case(
        "topk-as-reward",
        AS_REWARD,
        [
            (
                "the gradient of KL(pi || teacher), as by the sampled token",
                {"advantage": "sampled"},
            ),
            ("the gradient of the top-k KL as a loss", {"advantage": "loss"}),
        ],
        source="derived: a number that does not contain the sampled token is a baseline, and its "
        "expected gradient is 0",
        catches="A top-k KL subtracted from the advantage, mistaken for distillation.",
    ),
    reward_case(
        "sampled-token",
        AS_REWARD | {"advantage": "sampled"},
        [
            ("the top-k KL of the position as the advantage: 0", {"advantage": "topk_kl"}),
            ("the gradient of the top-k KL as a loss", {"advantage": "loss"}),
        ],
        source="derived: with A = log(pi_teacher / pi) of the sampled token the expected gradient "
        "is that of KL(pi || teacher)",
        catches="An advantage that is the same for all tokens of the position.",
    ),
]
check_sampled_token()

SUBJECT = Subject(
    name="distill",
    about="Distillation: a top-k KL in the loss or in the advantage, and its gradient.",
    shared_inputs={"three positions": POSITIONS},
    cases=CASES,
)
