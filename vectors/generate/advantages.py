"""Advantages of completions from the rewards of their groups."""

import math

from .arithmetic import flat, mean, variance
from .cases import CONVENTION, Case, Other, Subject


def nearly_equal(rewards, ties="both"):
    """Return whether rewards differ by rounding alone, as 0.1 + 0.2 and 0.3 do.

    Rounding grows with the size of a reward. A sum near 0, such as 0.1 + 0.2 - 0.3, has the
    rounding of its parts.
    """
    size = max(abs(reward) for reward in rewards)
    allowed = {
        "both": max(1.0, size),
        "relative": size,
        "absolute": 1.0,
    }  # either one alone is a mistake
    return max(rewards) - min(rewards) <= 1e-9 * allowed[ties]


def given(rewards):
    return [reward for reward in rewards if reward is not None]


def group_advantages(inputs, options):
    """Return (reward - baseline) / std of each row. A row without a reward is in no statistic."""
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
    """Return each reward minus its baseline: 0 if all are equal, None for a missing reward."""
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
    """Return the divisor of the advantages."""
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
    """Return DCPO's advantages at each visit of a prompt, and the moments over all visits."""
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
    """Mix the advantages by the new visit and by all visits; return the mixture closer to 0."""
    near_new = (earlier * by_new + by_total) / (earlier + 1)
    near_total = (by_new + earlier * by_total) / (earlier + 1)
    return near_new if abs(near_new) < abs(near_total) else near_total


def standardized(reward, center, spread):
    return (reward - center) / math.sqrt(spread) if spread else 0.0


TWO_GROUPS = [[1.0, 0.0, 0.0, 1.0], [0.2, 0.9, 0.4, 0.1]]
GRPO = {"baseline": "group_mean", "deviation": "group", "std_ddof": 1, "std_eps": 1e-6}
GRPO_PAPER = "DeepSeekMath 2402.03300, section 4.1.2"
ANY_EPSILON = {  # accepts any epsilon up to 1e-4
    "float64": {"rtol": 5e-4, "atol": 1e-9},
    "float32": {"rtol": 5e-4, "atol": 1e-6},
}
ZERO = {
    "float64": {"rtol": 0.0, "atol": 1e-9},
    "float32": {"rtol": 0.0, "atol": 1e-9},
}
NEARLY_ZERO = {  # residues of 1e-17 over an epsilon of 1e-9 are accepted
    "float64": {"rtol": 0.0, "atol": 1e-6},
    "float32": {"rtol": 0.0, "atol": 1e-6},
}
DCPO_VISITS = [[1.0, 0.0, 0.0, -1.0], [1.0] * 4, [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
DDOF_0 = Other("the std has ddof 0", options={"std_ddof": 0})
BY_GROUP = Other("the std is that of the group", options={"deviation": "group"})
BASELINE_IS_MEAN = Other(
    "the baseline is the mean of the whole group", options={"baseline": "group_mean"}
)


def group_case(name, rewards, **fields):
    """Return a case of the advantages of groups with these rewards; None is a missing reward."""
    return Case(id=name, operation=group_advantages, inputs={"rewards": rewards}, **fields)


CASES = [
    group_case(
        "advantages/grpo",
        TWO_GROUPS,
        options=GRPO,
        source=f"{GRPO_PAPER}; it gives no ddof and no epsilon, here 1 and 1e-6",
        threads=["XU-YIJIE/grpo-flat/issues/2", "thinking-machines-lab/tinker-cookbook/issues/579"],
        catches="Statistics over the batch, or a missing division by the std.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other("the advantage is not divided by a std", options={"deviation": "none"}),
            Other("the std is that of the batch", options={"deviation": "batch_of_rewards"}),
        ],
    ),
    group_case(
        "advantages/ddof-0",
        TWO_GROUPS,
        options=GRPO | {"std_ddof": 0},
        rests_on=CONVENTION,
        source="DCPO 2509.02333 Eq. 30 has ddof 0, TRL and verl have 1; GRPO's paper does not say",
        catches="A hard-coded ddof: with 4 rewards it changes each advantage by 15 %.",
        tolerance=ANY_EPSILON,
        others=[Other("the std has ddof 1", options={"std_ddof": 1})],
    ),
    group_case(
        "advantages/epsilon",
        [[0.6, 0.6002, 0.6, 0.6]],
        options=GRPO,
        rests_on=CONVENTION,
        source="verl's epsilon, 1e-6; TRL has 1e-4, OpenRLHF 1e-9; no paper gives one",
        threads=["verl-project/verl/pull/6348"],
        catches="Another epsilon: it halves these advantages, and hardly changes those of rewards "
        "of 0 and 1.",
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
        catches="A division by the std, which this method leaves out.",
        others=[Other("the advantage is divided by the std", options={"deviation": "group"})],
    ),
    group_case(
        "advantages/rloo",
        TWO_GROUPS,
        options=GRPO | {"baseline": "leave_one_out", "deviation": "none"},
        source="RLOO 2402.14740, section 3.2: the mean of the others",
        catches="A baseline that includes the row's own reward.",
        others=[BASELINE_IS_MEAN],
    ),
    group_case(
        "advantages/rloo-missing-reward",
        [[1.0, None, 0.2, 0.0], [None, None, 0.7, None]],
        options=GRPO | {"baseline": "leave_one_out", "deviation": "none"},
        rests_on=CONVENTION,
        source="a row without a reward (null) is not one of the others; a single remaining reward "
        "has no others, and advantage 0",
        catches="A mean of the others whose divisor counts rows without a reward.",
        others=[
            Other(
                "a row without a reward counts as a row",
                options={"rows_without_reward": "counted"},
            ),
            Other(
                "a missing reward counts as 0",
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
        source="Lite PPO 2508.08221: the mean of the group, the std of the batch's rewards",
        threads=["huggingface/trl/issues/3991"],
        catches="The std of the centred rewards instead of the raw ones.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other(
                "the std is that of the centred rewards",
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
        source="REINFORCE++-baseline 2501.03262: the std of the batch's centred rewards, here over "
        "rows; some implementations weight rows by their tokens",
        catches="The std of the raw rewards instead of the centred ones.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other(
                "the std is that of the raw rewards",
                options={"deviation": "batch_of_rewards"},
            ),
            BY_GROUP,
        ],
    ),
    group_case(
        "advantages/all-equal",
        [[1.0] * 4, [0.0] * 4],
        options=GRPO | {"std_eps": 0.0},
        source=f"{GRPO_PAPER}: no reward differs from the mean, so all advantages are 0",
        catches="0 / 0 with an epsilon of 0.",
        tolerance=ZERO,
    ),
    group_case(
        "advantages/float-residue",
        [[0.3] * 6, [0.1 + 0.2] + [0.3] * 5],
        options=GRPO | {"std_eps": 0.0},
        rests_on=CONVENTION,
        source="rewards within a relative 1e-9 are equal",
        threads=[
            "NVIDIA-NeMo/RL/pull/4161",
            "NousResearch/atropos/pull/465",
            "NousResearch/atropos/pull/481",
        ],
        catches="A rounding error over the std of rounding errors: advantages of 0.03 to 30 for "
        "equal rewards.",
        tolerance=ZERO,
    ),
    group_case(
        "advantages/float-residue-of-large-rewards",
        [[3e8 + 0.125, 3e8, 3e8, 3e8], [-3e8, -3e8 - 0.125, -3e8, -3e8]],
        options=GRPO | {"std_eps": 0.0},
        rests_on=CONVENTION,
        source="rewards within 1e-9 of the largest of them are equal",
        catches="An absolute tolerance of 1e-9: large rewards have larger rounding errors.",
        tolerance=ZERO,
        others=[Other("rewards within an absolute 1e-9 are equal", options={"ties": "absolute"})],
    ),
    group_case(
        "advantages/float-residue-near-zero",
        [[0.1 + 0.2 - 0.3, 0.0, 0.0, 0.0], [0.0, 0.0, -(2.0**-54), 0.0]],
        options=GRPO | {"std_eps": 0.0},
        rests_on=CONVENTION,
        source="rewards within 1e-9 are equal, even if their terms cancel",
        catches="A relative tolerance alone: a sum that cancels, such as 0.1 + 0.2 - 0.3, is "
        "smaller than the rounding error of its terms.",
        tolerance=NEARLY_ZERO,
        others=[Other("rewards within a relative 1e-9 are equal", options={"ties": "relative"})],
    ),
    group_case(
        "advantages/missing-reward",
        [[1.0, None, 0.0, 0.0], [None, None, 1.0, None]],
        options=GRPO,
        rests_on=CONVENTION,
        source="a row without a reward (null) is in no statistic and has advantage 0",
        threads=[
            "huggingface/trl/pull/5773",
            "huggingface/trl/pull/5902",
            "modelscope/ms-swift/issues/8123",
        ],
        catches="A missing reward that turns its group into NaN, or that counts as 0.",
        tolerance=ANY_EPSILON,
        others=[
            DDOF_0,
            Other(
                "a missing reward counts as 0",
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
        catches="Groups formed by position, with statistics over adjacent rows.",
    ),
    group_case(
        "advantages/group-of-one",
        [[0.7], [1.0, 0.0]],
        options=GRPO | {"deviation": "none"},
        rests_on=CONVENTION,
        source="one reward is its own mean, so its advantage is 0",
        catches="A reward that is not centred in a group of one.",
    ),
    Case(
        id="advantages/dcpo-visits",
        operation=smoothed_advantages,
        inputs={"visits": DCPO_VISITS},
        options={"std_ddof": 0, "smooth": True},
        source="DCPO 2509.02333v2, appendix A.7, Eq. 29-30",
        catches="A history that restarts, or a pooled variance without the part between visits.",
        others=[
            Other("the stds have ddof 1", options={"std_ddof": 1}),
            Other("each visit is normalized on its own", options={"smooth": False}),
        ],
    ),
    Case(
        id="advantages/dcpo-visits-ddof-1",
        operation=smoothed_advantages,
        inputs={"visits": DCPO_VISITS},
        options={"std_ddof": 1, "smooth": True},
        rests_on=CONVENTION,
        source="DCPO's released code has ddof 1, the paper 0",
        catches="A hard-coded ddof.",
        others=[Other("the stds have ddof 0", options={"std_ddof": 0})],
    ),
]

SUBJECT = Subject(
    name="advantages",
    about="Advantages of completions from the rewards of their groups; null is a missing reward.",
    cases=CASES,
)
