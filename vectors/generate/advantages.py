"""Advantages of completions from the rewards of their groups."""

import math

from .arithmetic import flat, mean, variance
from .cases import CONVENTION, Case, Other, Subject


def nearly_equal(rewards, ties="both"):
    """Whether rewards differ by no more than the rounding of their sums, such as 0.1 + 0.2.

    The rounding goes with their size, and a sum near 0, as 0.1 + 0.2 - 0.3, has that of its parts.
    """
    size = max(abs(reward) for reward in rewards)
    allowed = {"both": max(1.0, size), "relative": size, "absolute": 1.0}  # one alone is a mistake
    return max(rewards) - min(rewards) <= 1e-9 * allowed[ties]


def given(rewards):
    return [reward for reward in rewards if reward is not None]


def group_advantages(inputs, options):
    """A row's reward less its baseline, over a deviation. A row without a reward counts nowhere."""
    groups = inputs["rewards"]
    centred = [centre(rewards, options) for rewards in groups]
    advantages = []
    for rewards, differences in zip(groups, centred, strict=True):
        divisor = deviation(rewards, groups, centred, options)
        row = []
        for difference in differences:
            row.append(0.0 if difference is None else difference / divisor)
        advantages.append(row)
    return {"advantages": advantages}, {}


def centre(rewards, options):
    """Each reward less its baseline: 0 in a group of equal rewards, None without a reward."""
    scored = given(rewards)
    if not scored or nearly_equal(scored, options.get("ties", "both")):
        return [None if reward is None else 0.0 for reward in rewards]
    rows = len(rewards) if options.get("rows_without_reward") == "counted" else len(scored)
    result = []
    for reward in rewards:
        if reward is None:
            result.append(None)
        elif options["baseline"] == "group_mean":
            result.append(reward - mean(scored))
        else:  # "leave_one_out": the mean of the others
            result.append(reward - (sum(scored) - reward) / (rows - 1))
    return result


def deviation(rewards, groups, centred, options):
    """What an advantage is divided by."""
    if options["deviation"] == "none":
        return 1.0
    if options["deviation"] == "group":
        numbers = given(rewards)
        if not numbers or nearly_equal(numbers, options.get("ties", "both")):
            return 1.0
    elif options["deviation"] == "batch_of_rewards":
        numbers = flat([given(group) for group in groups])
    else:  # "batch_of_centred"
        numbers = flat([given(group) for group in centred])
    spread = variance(numbers, options["std_ddof"])
    if options.get("epsilon_under_root"):
        return math.sqrt(spread + options["std_eps"])
    return math.sqrt(spread) + options["std_eps"]


def smoothed_advantages(inputs, options):
    """DCPO's advantages of one prompt at each of its visits, and the moments over all visits."""
    ddof = options["std_ddof"]
    result = {"advantages": [], "means": [], "variances": []}
    total_mean = 0.0
    total_variance = 0.0
    for earlier, rewards in enumerate(inputs["visits"]):
        visits = earlier + 1
        new_mean = mean(rewards)
        new_variance = variance(rewards, ddof)
        between = earlier / visits * (new_mean - total_mean) ** 2
        total_variance = (earlier * total_variance + new_variance + between) / visits
        total_mean = (earlier * total_mean + new_mean) / visits
        if ddof == 0:
            assert abs(total_variance - variance(flat(inputs["visits"][:visits]), 0)) < 1e-12
        row = []
        for reward in rewards:
            advantage = standardized(reward, new_mean, new_variance)
            if options["smooth"]:
                by_total = standardized(reward, total_mean, total_variance)
                advantage = smaller_mixture(advantage, by_total, earlier)
            row.append(advantage)
        result["advantages"].append(row)
        result["means"].append(total_mean)
        result["variances"].append(total_variance)
    return result, {}


def smaller_mixture(by_new, by_total, earlier):
    """Of an advantage by the new visit and one by all visits: the mixture that is nearer to 0."""
    near_new = (earlier * by_new + by_total) / (earlier + 1)
    near_total = (by_new + earlier * by_total) / (earlier + 1)
    return near_new if abs(near_new) < abs(near_total) else near_total


def standardized(reward, center, spread):
    return (reward - center) / math.sqrt(spread) if spread else 0.0


TWO_GROUPS = [[1.0, 0.0, 0.0, 1.0], [0.2, 0.9, 0.4, 0.1]]
GRPO = {"baseline": "group_mean", "deviation": "group", "std_ddof": 1, "std_eps": 1e-6}
GRPO_PAPER = "DeepSeekMath 2402.03300, section 4.1.2"
ANY_EPSILON = {  # The advantages of common rewards, whichever epsilon up to 1e-4 is in use.
    "float64": {"rtol": 5e-4, "atol": 1e-9},
    "float32": {"rtol": 5e-4, "atol": 1e-6},
}
ZERO = {
    "float64": {"rtol": 0.0, "atol": 1e-9},
    "float32": {"rtol": 0.0, "atol": 1e-9},
}
NEARLY_ZERO = {  # An epsilon of 1e-9 also leaves nothing of residues of 1e-17.
    "float64": {"rtol": 0.0, "atol": 1e-6},
    "float32": {"rtol": 0.0, "atol": 1e-6},
}
DCPO_VISITS = [[1.0, 0.0, 0.0, -1.0], [1.0] * 4, [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
DDOF_0 = Other("the deviation has ddof 0", options={"std_ddof": 0})
BY_GROUP = Other("the deviation is that of the group", options={"deviation": "group"})
BASELINE_IS_MEAN = Other("the baseline is the group's mean", options={"baseline": "group_mean"})


def group_case(name, rewards, **fields):
    """The advantages of the rows of groups with these rewards; None is no reward."""
    return Case(id=name, operation=group_advantages, inputs={"rewards": rewards}, **fields)


CASES = [
    group_case(
        "advantages/grpo",
        TWO_GROUPS,
        options=GRPO,
        source=f"{GRPO_PAPER}; it gives no ddof and no epsilon, here 1 and 1e-6",
        threads=["XU-YIJIE/grpo-flat/issues/2", "thinking-machines-lab/tinker-cookbook/issues/579"],
        catches="Statistics over the batch, or an advantage that is not divided.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other("the advantage is not divided", options={"deviation": "none"}),
            Other("the deviation is that of the batch", options={"deviation": "batch_of_rewards"}),
        ],
    ),
    group_case(
        "advantages/ddof-0",
        TWO_GROUPS,
        options=GRPO | {"std_ddof": 0},
        rests_on=CONVENTION,
        source="DCPO 2509.02333 Eq. 30 has ddof 0; TRL and verl have 1; GRPO's paper is silent",
        catches="A ddof that cannot be chosen: with 4 rewards it changes each advantage by 15 %.",
        tolerance=ANY_EPSILON,
        others=[Other("the deviation has ddof 1", options={"std_ddof": 1})],
    ),
    group_case(
        "advantages/epsilon",
        [[0.6, 0.6002, 0.6, 0.6]],
        options=GRPO,
        rests_on=CONVENTION,
        source="verl's epsilon 1e-6; TRL has 1e-4, OpenRLHF 1e-9; no paper gives one",
        threads=["verl-project/verl/pull/6348"],
        catches="An epsilon of another size, which halves these advantages and hardly changes "
        "those of rewards 0 and 1.",
        tolerance={
            "float64": {"rtol": 1e-9, "atol": 1e-12},
            "float32": {"rtol": 2e-3, "atol": 1e-6},
        },
        others=[
            Other("epsilon is 1e-4", options={"std_eps": 1e-4}),
            Other("epsilon is 1e-8 or less", options={"std_eps": 1e-9}),
            DDOF_0,
            Other("epsilon is under the root", options={"epsilon_under_root": True}),
        ],
    ),
    group_case(
        "advantages/dr-grpo",
        TWO_GROUPS,
        options=GRPO | {"deviation": "none"},
        source="Dr. GRPO 2503.20783, section 3.2",
        catches="A division by the deviation, which this method leaves out.",
        others=[Other("the advantage is divided", options={"deviation": "group"})],
    ),
    group_case(
        "advantages/rloo",
        TWO_GROUPS,
        options=GRPO | {"baseline": "leave_one_out", "deviation": "none"},
        source="RLOO 2402.14740, section 3.2: the mean of the others",
        catches="A baseline that counts the row's own reward.",
        others=[BASELINE_IS_MEAN],
    ),
    group_case(
        "advantages/rloo-missing-reward",
        [[1.0, None, 0.2, 0.0], [None, None, 0.7, None]],
        options=GRPO | {"baseline": "leave_one_out", "deviation": "none"},
        rests_on=CONVENTION,
        source="a row without a reward (null) is none of the others; one reward that is left has "
        "no others, and advantage 0",
        catches="A row without a reward among those that the mean of the others is divided by.",
        others=[
            Other(
                "a row without a reward counts as a row",
                options={"rows_without_reward": "counted"},
            ),
            Other(
                "a row without a reward has reward 0",
                inputs={"rewards": [[1.0, 0.0, 0.2, 0.0], [0.0, 0.0, 0.7, 0.0]]},
            ),
            BASELINE_IS_MEAN,
        ],
    ),
    group_case(
        "advantages/batch-deviation",
        [*TWO_GROUPS, [1.0] * 4],
        options=GRPO | {"deviation": "batch_of_rewards"},
        rests_on=CONVENTION,
        source="Lite PPO 2508.08221: the mean of the group, the deviation of the batch's rewards",
        threads=["huggingface/trl/issues/3991"],
        catches="The deviation of the centred rewards for that of the rewards.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other(
                "the deviation is that of the centred rewards",
                options={"deviation": "batch_of_centred"},
            ),
            BY_GROUP,
        ],
    ),
    group_case(
        "advantages/batch-deviation-centred",
        [*TWO_GROUPS, [1.0] * 4],
        options=GRPO | {"deviation": "batch_of_centred"},
        rests_on=CONVENTION,
        source="REINFORCE++-baseline 2501.03262: the batch's deviation of the centred rewards, "
        "here over rows; with rows of unequal lengths some code counts tokens",
        catches="The deviation of the rewards before the group's mean was subtracted.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other(
                "the deviation is that of the raw rewards",
                options={"deviation": "batch_of_rewards"},
            ),
            BY_GROUP,
        ],
    ),
    group_case(
        "advantages/all-equal",
        [[1.0] * 4, [0.0] * 4],
        options=GRPO | {"std_eps": 0.0},
        source=f"{GRPO_PAPER}: no reward differs from the mean, so an advantage is 0",
        catches="0 / 0 where epsilon is 0.",
        tolerance=ZERO,
    ),
    group_case(
        "advantages/float-residue",
        [[0.3] * 6, [0.1 + 0.2] + [0.3] * 5],
        options=GRPO | {"std_eps": 0.0},
        rests_on=CONVENTION,
        source="rewards that are equal up to 1e-9 of their size are equal",
        threads=[
            "NVIDIA-NeMo/RL/pull/4161",
            "NousResearch/atropos/pull/465",
            "NousResearch/atropos/pull/481",
        ],
        catches="A rounding error over the deviation of rounding errors: advantages of 0.03 to 30 "
        "for rewards that are equal.",
        tolerance=ZERO,
    ),
    group_case(
        "advantages/float-residue-of-large-rewards",
        [[3e8 + 0.125, 3e8, 3e8, 3e8], [-3e8, -3e8 - 0.125, -3e8, -3e8]],
        options=GRPO | {"std_eps": 0.0},
        rests_on=CONVENTION,
        source="rewards that are equal up to 1e-9 of the largest size among them are equal",
        catches="Equality up to 1e-9 whatever the size: the rounding of large rewards is larger.",
        tolerance=ZERO,
        others=[Other("rewards are equal up to an absolute 1e-9", options={"ties": "absolute"})],
    ),
    group_case(
        "advantages/float-residue-near-zero",
        [[0.1 + 0.2 - 0.3, 0.0, 0.0, 0.0], [0.0, 0.0, -(2.0**-54), 0.0]],
        options=GRPO | {"std_eps": 0.0},
        rests_on=CONVENTION,
        source="rewards that differ by no more than 1e-9 are equal, also where their parts cancel",
        catches="Equality up to a share of the size alone: a sum that cancels, as 0.1 + 0.2 - 0.3, "
        "is smaller than the rounding of its parts.",
        tolerance=NEARLY_ZERO,
        others=[Other("rewards are equal up to 1e-9 of their size", options={"ties": "relative"})],
    ),
    group_case(
        "advantages/missing-reward",
        [[1.0, None, 0.0, 0.0], [None, None, 1.0, None]],
        options=GRPO,
        rests_on=CONVENTION,
        source="a row without a reward (null) counts in no statistic and has advantage 0",
        threads=[
            "huggingface/trl/pull/5773",
            "huggingface/trl/pull/5902",
            "modelscope/ms-swift/issues/8123",
        ],
        catches="A row without a reward that makes its group NaN, or that counts as 0.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other(
                "a row without a reward has reward 0",
                inputs={"rewards": [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]},
            ),
        ],
    ),
    group_case(
        "advantages/unequal-groups",
        [[1.0, 0.0], [0.0, 1.0, 1.0], [0.5, 0.0, 1.0, 0.25, 0.0]],
        options=GRPO | {"deviation": "none"},
        source=GRPO_PAPER,
        threads=["radixark/miles/pull/1325", "allenai/open-instruct/pull/1794"],
        catches="Groups that are cut by position, with statistics over adjacent rows.",
    ),
    group_case(
        "advantages/group-of-one",
        [[0.7], [1.0, 0.0]],
        options=GRPO | {"deviation": "none"},
        rests_on=CONVENTION,
        source="one reward is its own mean, so its advantage is 0",
        catches="A reward that is not centred where a group has one row left.",
    ),
    Case(
        id="advantages/dcpo-visits",
        operation=smoothed_advantages,
        inputs={"visits": DCPO_VISITS},
        options={"std_ddof": 0, "smooth": True},
        source="DCPO 2509.02333v2, appendix A.7, Eq. 29-30",
        catches="A history that starts anew, or pooled moments without the part between visits.",
        others=[
            Other("the deviations have ddof 1", options={"std_ddof": 1}),
            Other("each visit stands alone", options={"smooth": False}),
        ],
    ),
    Case(
        id="advantages/dcpo-visits-ddof-1",
        operation=smoothed_advantages,
        inputs={"visits": DCPO_VISITS},
        options={"std_ddof": 1, "smooth": True},
        rests_on=CONVENTION,
        source="the released code of DCPO, which has ddof 1 where the paper has 0",
        catches="A ddof that cannot be chosen.",
        others=[Other("the deviations have ddof 0", options={"std_ddof": 0})],
    ),
]

SUBJECT = Subject(
    name="advantages",
    about="Advantages of completions from the rewards of their groups. null: no reward.",
    cases=CASES,
)
