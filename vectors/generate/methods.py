"""The options and sources of the methods, and the mistakes that several cases share."""

from . import eight_rows
from .cases import Other

CLIP = {"objective": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2}
PPO = CLIP | {"mean": "tokens"}
GRPO = CLIP | {"mean": "rows"}
DR_GRPO = CLIP | {"mean": "constant", "constant": 8}
DAPO = CLIP | {"clip_high": 0.28, "mean": "tokens"}
GSPO = GRPO | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
DCPO = CLIP | {"clip_low": 0.16, "clip_high": 0.2, "max_ratio": 10.0, "mean": "prompts"}
GRPO_PAPER = "DeepSeekMath 2402.03300 Eq. 3"
DR_GRPO_PAPER = "Dr. GRPO 2503.20783, Listing 1"
DAPO_PAPER = "DAPO 2503.14476 Eq. 8"
GSPO_PAPER = "GSPO 2507.18071"
DCPO_PAPER = "DCPO 2509.02333v2"


def with_kl(estimator, coef=0.04):
    return {"kl": {"estimator": estimator, "coef": coef}}


K3 = with_kl("k3")

ROW_MEANS = Other("the mean over rows of each row's token mean", options={"mean": "rows"})
TOKEN_MEAN = Other("one mean over all tokens", options={"mean": "tokens"})
NO_MINIMUM = Other(
    "the clipped ratio is used without the minimum",
    options={"objective": "clip_without_minimum"},
)
MAXIMUM = Other(
    "the maximum of the two terms instead of the minimum",
    options={"objective": "maximum"},
)
MAXIMUM_BELOW_ZERO = Other(
    "the maximum of the two terms where A < 0",
    options={"objective": "maximum_below_zero"},
)
TURNED = Other("the loss has the wrong sign", options={"objective": "turned"})
CLIP_KEEPS_SLOPE = Other(
    "the gradient flows through a clipped ratio",
    options={"objective": "clip_keeps_slope"},
)
CAP_KEEPS_SLOPE = Other(
    "the gradient flows through a ratio beyond the cap",
    options={"objective": "cap_keeps_slope"},
)
NO_CAP = Other("there is no cap", options={"dual_clip": 1e9})
GROUPS_ADDED = Other(
    "the means of the prompts are summed, not averaged", options={"mean": "groups_added"}
)
ADJACENT_GROUPS = Other(
    "every four adjacent rows are a group", inputs={"groups": eight_rows.GROUPS}
)
KL_OF_TOKENS = Other("the KL is one mean over all tokens", options={"kl_mean": "tokens"})
KL_TURNED = Other("log(pi / pi_ref) instead of log(pi_ref / pi)", options=with_kl("k3_of_ref"))
KL_UNWEIGHTED = Other("k3 without the weight", options=K3)
ENTROPY_OF_TOKENS = Other(
    "the entropy bonus is one mean over all tokens",
    options={"entropy_mean": "tokens"},
)
KL_UNMASKED = Other("the KL is not masked", options={"kl_mask": "none"})
MASKED_COUNT = Other("masked tokens are in the denominator", options={"masked_tokens_count": True})
NOTHING_MASKED = Other("masked tokens count like all others", inputs={"mask": eight_rows.ALL})
LOSS_UNMASKED = Other(
    "loss and KL are not masked, but the denominator is",
    options={"loss_mask": "none", "kl_mask": "none"},
)
RATIO_OF_SUM = Other(
    "the log-ratios are summed, not divided by the length",
    options={"ratio_divisor": "one"},
)
RATIO_BY_WIDTH = Other(
    "the log-ratios are divided by the padded width",
    options={"ratio_divisor": "width"},
)
DIVIDED_TWICE = Other(
    "the gradient is divided by the length twice",
    options={"ratio_gradient": "divided_twice"},
)
OF_UNSCORED_ROWS = [
    Other(
        "rows without a reward are in the loss, but not counted",
        options={"loss_unscored": "weighed", "kl_unscored": "weighed"},
    ),
    Other(
        "rows without a reward are counted, but not in the loss",
        options={"loss_unscored": "counted", "kl_unscored": "counted"},
    ),
    Other("rows without a reward count like all others", inputs={"scored": [1] * 8}),
]
