"""Losses of preference pairs: DPO and its variants, and the reward model."""

from . import steps
from .arithmetic import central_difference, log_sigmoid, sigmoid
from .cases import CONVENTION, Case, Other, Subject


def pair_weights(inputs, pairs, options):
    """Return the weight of each pair: the loss is the mean over the pairs of the step."""
    one_each = [[1.0]] * pairs
    table = steps.step_weights(inputs, one_each, options | {"mean": "rows"})
    return [row[0] for row in table]


def sigmoid_loss(h, beta, smoothing):
    return -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)


def sigmoid_slope(h, beta, smoothing):
    return beta * (-(1 - smoothing) * sigmoid(-beta * h) + smoothing * sigmoid(beta * h))


def robust_loss(h, beta, smoothing):
    loss = -(1 - smoothing) * log_sigmoid(beta * h) + smoothing * log_sigmoid(-beta * h)
    return loss / (1 - 2 * smoothing)


def robust_slope(h, beta, smoothing):
    slope = -(1 - smoothing) * sigmoid(-beta * h) - smoothing * sigmoid(beta * h)
    return beta * slope / (1 - 2 * smoothing)


def ipo_loss(h, beta, smoothing):
    return (h - 1 / (2 * beta)) ** 2


def ipo_slope(h, beta, smoothing):
    return 2 * (h - 1 / (2 * beta))


def robust_loss_unscaled(h, beta, smoothing):
    return robust_loss(h, beta, smoothing) * (1 - 2 * smoothing)


def robust_slope_unscaled(h, beta, smoothing):
    return robust_slope(h, beta, smoothing) * (1 - 2 * smoothing)


LOSSES = {  # as functions of h, the difference of the log-ratios, with the derivative by h
    "sigmoid": (sigmoid_loss, sigmoid_slope),
    "robust": (robust_loss, robust_slope),
    "ipo": (ipo_loss, ipo_slope),
    "robust_unscaled": (robust_loss_unscaled, robust_slope_unscaled),  # a mistake
}


def preference_loss(inputs, options):
    """Return the loss of a step of pairs, and its gradients by the token log-probs."""
    loss, slope = LOSSES[options["loss"]]
    beta = options["beta"]
    smoothing = options["label_smoothing"]
    weights = pair_weights(inputs, len(inputs["chosen_logprobs"]), options)
    expected = {"loss": 0.0, "chosen_gradient": [], "rejected_gradient": []}
    worked = {"margins": [], "pair_losses": []}
    for pair, weight in enumerate(weights):
        chosen = inputs["chosen_logprobs"][pair]
        rejected = inputs["rejected_logprobs"][pair]
        h = log_ratio(chosen, inputs["ref_chosen_logprobs"][pair], options)
        h -= log_ratio(rejected, inputs["ref_rejected_logprobs"][pair], options)
        by_h = slope(h, beta, smoothing)
        difference = central_difference(lambda x: loss(x, beta, smoothing), h)
        assert abs(difference - by_h) < 1e-7 * max(1.0, abs(by_h))
        nll = options["nll_coef"] / len(chosen)
        pair_loss = loss(h, beta, smoothing) - nll * sum(chosen)
        by_chosen = by_h / divisor(chosen, options) - nll
        by_rejected = -by_h / divisor(rejected, options)
        expected["loss"] += weight * pair_loss
        expected["chosen_gradient"].append([weight * by_chosen] * len(chosen))
        expected["rejected_gradient"].append([weight * by_rejected] * len(rejected))
        worked["margins"].append(h)
        worked["pair_losses"].append(pair_loss)
    return expected, worked


def log_ratio(logprobs, ref_logprobs, options):
    """Return log(pi / pi_ref) of a completion from its token log-probs."""
    reference = 0.0 if options["reference_free"] else sum(ref_logprobs)
    return (sum(logprobs) - reference) / divisor(logprobs, options)


def divisor(logprobs, options):
    """Return the divisor of a completion's log-ratio."""
    return len(logprobs) if options["per_token"] else 1


def reward_model_loss(inputs, options):
    """Return the Bradley-Terry loss of a step of score pairs, and its gradients by the scores."""
    chosen = inputs["chosen"]
    rejected = inputs["rejected"]
    center = options["center_coef"]
    weights = pair_weights(inputs, len(chosen), options)

    def pair_loss(better, worse):
        return -log_sigmoid(better - worse) + center * (better + worse) ** 2

    loss = 0.0
    up = []
    down = []
    for better, worse, weight in zip(chosen, rejected, weights, strict=True):
        loss += weight * pair_loss(better, worse)
        by_margin = -sigmoid(worse - better)
        by_sum = 2 * center * (better + worse)
        up.append(weight * (by_margin + by_sum))
        down.append(weight * (-by_margin + by_sum))
        by_better = central_difference(lambda x, worse=worse: pair_loss(x, worse), better)
        by_worse = central_difference(lambda x, better=better: pair_loss(better, x), worse)
        assert abs(weight * by_better - up[-1]) < 1e-8
        assert abs(weight * by_worse - down[-1]) < 1e-8
    return {"loss": loss, "chosen_gradient": up, "rejected_gradient": down}, {}


PAIRS = {
    "chosen_logprobs": [[-1.2, -0.7, -2.1], [-0.4, -3.1, -0.9, -1.6], [-0.8, -0.5]],
    "rejected_logprobs": [[-2.2, -0.8], [-1.1, -0.6, -0.3, -2.9, -1.4], [-0.2, -1.9, -0.7]],
    "ref_chosen_logprobs": [[-1.4, -0.9, -2.0], [-0.5, -2.9, -1.2, -1.5], [-1.3, -0.6]],
    "ref_rejected_logprobs": [[-2.0, -0.6], [-1.3, -0.8, -0.2, -2.7, -1.9], [-0.4, -1.1, -0.9]],
}
SCORES = {"chosen": [1.3, -0.2, 3.5, 0.4], "rejected": [0.6, 0.5, -1.5, 0.4]}
DPO = {
    "loss": "sigmoid",
    "beta": 0.1,
    "label_smoothing": 0.0,
    "per_token": False,
    "reference_free": False,
    "nll_coef": 0.0,
}
DPO_PAPER = "DPO 2305.18290 Eq. 7, mean over pairs"
PER_TOKEN = Other(
    "each log-ratio is divided by the completion's length", options={"per_token": True}
)


def pair_case(name, options=None, inputs=None, source=DPO_PAPER, **fields):
    """Return a case of a step of three pairs; `options` and `inputs` override DPO's."""
    return Case(
        id=name,
        operation=preference_loss,
        inputs=PAIRS | (inputs or {}),
        options=DPO | (options or {}),
        source=source,
        **fields,
    )


def reward_case(name, center=0.0, inputs=None, **fields):
    """Return a case of a step of four pairs of scores."""
    source = "InstructGPT 2203.02155 Eq. 1, mean over pairs"
    if center:
        source += "; centring: 2312.09244 Eq. 2"
    return Case(
        id=name,
        operation=reward_model_loss,
        inputs=SCORES | (inputs or {}),
        options={"center_coef": center},
        source=source,
        **fields,
    )


CASES = [
    pair_case(
        "preference/dpo",
        catches="Means of log-probs instead of sums, or a missing reference.",
        others=[
            PER_TOKEN,
            Other("there is no reference", options={"reference_free": True}),
        ],
    ),
    pair_case(
        "preference/dpo-beta",
        options={"beta": 0.5},
        catches="A beta that is ignored, or that is outside the sigmoid.",
        others=[Other("beta is 0.1", options={"beta": 0.1})],
    ),
    pair_case(
        "preference/cdpo",
        options={"label_smoothing": 0.1},
        source="cDPO (Mitchell 2023) Eq. 3",
        catches="Label smoothing that is ignored, or on the wrong side.",
        others=[
            Other("label smoothing is ignored", options={"label_smoothing": 0.0}),
            Other("label smoothing is on the wrong side", options={"label_smoothing": 0.9}),
            Other("this is robust DPO", options={"loss": "robust"}),
        ],
    ),
    pair_case(
        "preference/robust",
        options={"loss": "robust", "label_smoothing": 0.1},
        source="robust DPO 2403.00409",
        catches="A plus instead of the minus, or no division by 1 - 2 smoothing.",
        others=[
            Other(
                "the factor 1 / (1 - 2 smoothing) is missing", options={"loss": "robust_unscaled"}
            ),
            Other("this is cDPO", options={"loss": "sigmoid"}),
        ],
    ),
    pair_case(
        "preference/ipo",
        options={"loss": "ipo"},
        source="IPO 2310.12036 Eq. 17, with sums over tokens",
        catches="Log-ratios divided by the completion's length.",
        threads=["huggingface/trl/pull/1265", "huggingface/trl/issues/1677"],
        others=[PER_TOKEN],
    ),
    pair_case(
        "preference/ipo-per-token",
        options={"loss": "ipo", "per_token": True},
        source="TRL's form of IPO 2310.12036 Eq. 17, with means over tokens",
        rests_on=CONVENTION,
        catches="A length that counts prompt tokens or padding.",
        threads=["huggingface/trl/issues/6879", "modelscope/ms-swift/pull/9925"],
        others=[Other("sums over tokens, as in the paper", options={"per_token": False})],
    ),
    pair_case(
        "preference/reference-free",
        options={"reference_free": True},
        source="DPO 2305.18290 Eq. 7 with a uniform reference",
        rests_on=CONVENTION,
        catches="A reference that is still used.",
        others=[Other("the reference is used", options={"reference_free": False})],
    ),
    pair_case(
        "preference/nll",
        options={"nll_coef": 0.3},
        source="Iterative RPO 2404.19733 Eq. 1-2: the mean over the chosen completion's tokens",
        catches="An NLL term that sums over tokens, or that includes the rejected completion.",
        others=[Other("the NLL term is left out", options={"nll_coef": 0.0})],
    ),
    reward_case(
        "preference/reward-model",
        catches="A sum instead of the mean over pairs, or a wrong sign.",
    ),
    reward_case(
        "preference/reward-model-centred",
        center=0.01,
        catches="Missing centring.",
        others=[Other("the centring is left out", options={"center_coef": 0.0})],
    ),
]

SUBJECT = Subject(
    name="preference",
    about="Losses of preference pairs and of pairs of scores.",
    cases=CASES,
)
