"""Estimates of KL(pi || pi_ref) from sampled tokens, and their expected gradients."""

import math

from .arithmetic import central_difference, check_gradient, each, softmax
from .cases import Case, Other, Subject

# --- of one token: d is log(pi / pi_ref), log_ratio is log(pi / pi_old) ---


def k3(d):
    return math.exp(-d) + d - 1


VALUES = {
    "k1": lambda d, log_ratio: d,
    "k2": lambda d, log_ratio: d * d / 2,
    "k3": lambda d, log_ratio: k3(d),
    "k3_weighted": lambda d, log_ratio: math.exp(log_ratio) * k3(d),
    # mistakes
    "k1_of_ref": lambda d, log_ratio: -d,
    "k2_without_half": lambda d, log_ratio: d * d,
    "k3_of_ref": lambda d, log_ratio: k3(-d),
    "k3_frozen_weight": lambda d, log_ratio: math.exp(log_ratio) * k3(d),
    "k1_clamped": lambda d, log_ratio: min(max(d, -10.0), 10.0),
    "k3_clamped": lambda d, log_ratio: min(k3(d), 10.0),
}
SLOPES = {  # by the log-prob, which moves both d and log_ratio
    "k1": lambda d, log_ratio: 1.0,
    "k2": lambda d, log_ratio: d,
    "k3": lambda d, log_ratio: 1 - math.exp(-d),
    "k3_weighted": lambda d, log_ratio: math.exp(log_ratio) * d,  # r times k2's
    # mistakes
    "k1_of_ref": lambda d, log_ratio: -1.0,
    "k2_without_half": lambda d, log_ratio: 2 * d,
    "k3_of_ref": lambda d, log_ratio: math.exp(d) - 1,
    "k3_frozen_weight": lambda d, log_ratio: math.exp(log_ratio) * (1 - math.exp(-d)),
    "k1_clamped": lambda d, log_ratio: float(abs(d) < 10.0),
    "k3_clamped": lambda d, log_ratio: 0.0 if k3(d) > 10.0 else 1 - math.exp(-d),
}
FROZEN = {"k3_frozen_weight"}  # its slope is not that of its value


def kl_value(new, old, ref, estimator):
    return VALUES[estimator](new - ref, new - old)


def kl_slope(new, old, ref, estimator):
    return SLOPES[estimator](new - ref, new - old)


# --- the operations ---


def kl_tokens(inputs, options):
    """Return the estimate at each token, and its derivative by the token's log-prob."""
    estimator = options["estimator"]
    new = inputs["logprobs"]
    ref = inputs["ref_logprobs"]
    old = inputs.get("old_logprobs", new)  # only the weighted estimator reads it

    def values(table):
        return each(lambda x, y, z: kl_value(x, y, z, estimator), table, old, ref)

    gradient = each(lambda x, y, z: kl_slope(x, y, z, estimator), new, old, ref)
    if estimator not in FROZEN:
        check_gradient(lambda table: sum(map(sum, values(table))), new, gradient)
    return {"value": values(new), "gradient": gradient}, {}


def kl_expected_gradient(inputs, options):
    """Return the expected gradient by the logits, over tokens sampled from the old policy."""
    new = softmax(inputs["logits"])
    ref = softmax(inputs["ref_logits"])
    old = softmax(inputs["old_logits"])
    estimator = options["estimator"]
    gradient = [0.0] * len(new)
    for token, chance in enumerate(old):
        logs = [math.log(policy[token]) for policy in (new, old, ref)]
        slope = chance * kl_slope(*logs, estimator)
        for j, probability in enumerate(new):
            gradient[j] += slope * ((token == j) - probability)  # of log-softmax
    worked = {"kl_policy_ref": divergence(new, ref), "kl_ref_policy": divergence(ref, new)}
    return {"gradient": gradient}, worked


def divergence(p, q):
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def check_expected_gradients():
    """Check what the cases claim: which KL's gradient an estimator has in expectation."""
    ref = softmax(LOGITS["ref_logits"])

    def reverse(logits):
        return divergence(softmax(logits), ref)

    def forward(logits):
        return divergence(ref, softmax(logits))

    meanings = [
        ("k1", ON_POLICY, lambda logits: 0.0),
        ("k2", ON_POLICY, reverse),
        ("k3", ON_POLICY, forward),
        ("k3_weighted", ON_POLICY, reverse),
        ("k3_weighted", OFF_POLICY, reverse),
    ]
    for estimator, inputs, meaning in meanings:
        expected, _ = kl_expected_gradient(inputs, {"estimator": estimator})
        for j, logit in enumerate(inputs["logits"]):

            def moved(value, inputs=inputs, j=j, meaning=meaning):
                return meaning([*inputs["logits"][:j], value, *inputs["logits"][j + 1 :]])

            assert abs(central_difference(moved, logit) - expected["gradient"][j]) < 1e-9


TOKENS = {
    "logprobs": [[-0.3, -2.1, -0.9], [-1.4]],
    "old_logprobs": [[-0.4, -1.9, -0.9], [-1.2]],
    "ref_logprobs": [[-0.7, -1.2, -0.9], [-2.0]],
}
FAR = {"logprobs": [[-6.0, -0.1, -14.0]], "ref_logprobs": [[-2.5, -5.0, -1.0]]}
LOGITS = {"logits": [0.4, -0.3, 0.2], "ref_logits": [-0.1, 0.5, -0.6]}
ON_POLICY = LOGITS | {"old_logits": LOGITS["logits"]}
OFF_POLICY = LOGITS | {"old_logits": [-0.2, 0.1, 0.7]}
SOURCE = "Schulman, Approximating KL Divergence (2020); k3 is DeepSeekMath 2402.03300 Eq. 4"
WEIGHTED = "DeepSeek-V3.2 2512.02556: k3 times pi / pi_old, gradient included"


def others_by(wrong):
    """Return the others that use a wrong estimator, from [(says, estimator)]."""
    return [Other(says, options={"estimator": estimator}) for says, estimator in wrong]


def token_case(name, estimator, others, inputs=TOKENS, source=SOURCE, **fields):
    return Case(
        id=name,
        operation=kl_tokens,
        inputs=inputs,
        options={"estimator": estimator},
        source=source,
        others=others_by(others),
        **fields,
    )


def expectation_case(name, estimator, inputs, means, others, **fields):
    return Case(
        id=name,
        operation=kl_expected_gradient,
        inputs=inputs,
        options={"estimator": estimator},
        source=f"derived: {means}",
        others=others_by(others),
        **fields,
    )


REVERSED = "log(pi_ref / pi) instead of log(pi / pi_ref)"
CASES = [
    token_case(
        "kl/k1",
        "k1",
        catches=f"A wrong sign: {REVERSED}.",
        others=[(REVERSED, "k1_of_ref")],
    ),
    token_case(
        "kl/k2",
        "k2",
        catches="A missing factor 1/2.",
        others=[("the factor 1/2 is missing", "k2_without_half")],
    ),
    token_case(
        "kl/k3",
        "k3",
        catches=f"A wrong sign: {REVERSED}.",
        others=[(REVERSED, "k3_of_ref")],
    ),
    token_case(
        "kl/k3-weighted",
        "k3_weighted",
        source=WEIGHTED,
        catches="A missing weight, or one without a gradient.",
        threads=["huggingface/trl/pull/4638", "huggingface/trl/pull/6503"],
        others=[
            ("k3 without the weight", "k3"),
            ("the weight has no gradient", "k3_frozen_weight"),
        ],
    ),
    token_case(
        "kl/k1-far",
        "k1",
        inputs=FAR,
        catches="A KL clamped at 10 far from the reference.",
        threads=["verl-project/verl/issues/2928"],
        others=[("clamped to [-10, 10]", "k1_clamped")],
    ),
    token_case(
        "kl/k3-far",
        "k3",
        inputs=FAR,
        catches="A KL clamped at 10, without a gradient just where the policy has run away.",
        threads=["verl-project/verl/issues/2928"],
        others=[("clamped to [-10, 10], with no gradient beyond", "k3_clamped")],
    ),
    expectation_case(
        "kl/expected-k1",
        "k1",
        ON_POLICY,
        means="on policy, the expected gradient of k1 is 0: pure noise",
        catches="k1 in a loss, mistaken for a penalty.",
        threads=["allenai/open-instruct/pull/535"],
        others=[("the gradient of KL(pi || ref), as of k2", "k2")],
    ),
    expectation_case(
        "kl/expected-k2",
        "k2",
        ON_POLICY,
        means="on policy, the expected gradient of k2 is that of KL(pi || ref)",
        catches="An estimator whose gradient is not that of the KL it estimates.",
        others=[("the gradient of KL(ref || pi), as of k3", "k3")],
    ),
    expectation_case(
        "kl/expected-k3",
        "k3",
        ON_POLICY,
        means="on policy, the expected gradient of k3 is that of KL(ref || pi)",
        catches="k3 in a loss, mistaken for a penalty on KL(pi || ref).",
        threads=["verl-project/verl/pull/2953"],
        others=[("the gradient of KL(pi || ref), as of k2", "k2")],
    ),
    expectation_case(
        "kl/expected-k3-weighted",
        "k3_weighted",
        ON_POLICY,
        means="the expected gradient of the weighted k3 is that of KL(pi || ref)",
        catches="A weight without a gradient, which would change nothing at ratio 1.",
        threads=["huggingface/trl/pull/6503"],
        others=[("the weight has no gradient: that of KL(ref || pi)", "k3_frozen_weight")],
    ),
    expectation_case(
        "kl/expected-k3-weighted-off-policy",
        "k3_weighted",
        OFF_POLICY,
        means="off policy too, the expected gradient of the weighted k3 is that of KL(pi || ref)",
        catches="A missing weight where an older policy sampled the tokens.",
        others=[
            ("k3 without the weight", "k3"),
            ("k2 without the weight", "k2"),
            ("the weight has no gradient", "k3_frozen_weight"),
        ],
    ),
]
check_expected_gradients()

SUBJECT = Subject(
    name="kl",
    about="The KL to the reference: estimates from sampled tokens, and their gradients.",
    cases=CASES,
)
