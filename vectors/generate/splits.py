"""One optimizer step, split into micro-batches and over processes, which changes no number."""

from operator import itemgetter

from . import critic, eight_rows, pairs, steps
from .arithmetic import each, flat
from .cases import CONVENTION, Case, Other, Subject
from .methods import (
    ADJACENT_GROUPS,
    CAP_KEEPS_SLOPE,
    DAPO,
    DAPO_PAPER,
    DCPO,
    DCPO_PAPER,
    DIVIDED_TWICE,
    DR_GRPO,
    DR_GRPO_PAPER,
    GRPO,
    GRPO_PAPER,
    GSPO,
    GSPO_PAPER,
    K3,
    KL_TURNED,
    NO_CAP,
    OF_UNSCORED_ROWS,
    PPO,
    RATIO_BY_WIDTH,
    RATIO_OF_SUM,
    TOKEN_MEAN,
)
from .policy import step_case
from .selections import covariance_step, top_entropy_step


def step_totals(inputs, options):
    """Return the counts that each micro-batch divides by, as [step][process][micro-batch].

    `steps` has the `pieces` of each optimizer step of a rollout.
    """
    mask = steps.mask_of(inputs, inputs["mask"])
    rollout = list(range(len(mask)))
    expected = {"tokens": [], "rows": [], "prompts": []}
    for pieces in inputs["steps"]:
        counts = []
        for process in pieces:
            scopes = [counted_with(rows, process, pieces, rollout, options) for rows in process]
            counts.append([count(scope, mask, inputs, options) for scope in scopes])
        for name, numbers in expected.items():
            numbers.append(each(itemgetter(name), counts))
    groups = inputs["groups"]
    expected["group_tokens"] = []
    for row, group in enumerate(groups):
        members = [other for other in seen_with(row, inputs, options) if groups[other] == group]
        expected["group_tokens"].append(sum(sum(mask[other]) for other in members))
    return expected, {}


def seen_with(row, inputs, options):
    """Return the rows in which the group of `row` is counted: its step, unless by mistake."""
    for pieces in inputs["steps"]:
        micro_batches = flat(pieces)
        scopes = [flat(micro_batches)]
        if options.get("group_tokens") == "micro_batch":
            scopes = micro_batches
        for rows in scopes:
            if row in rows:
                return rows
    raise AssertionError(f"row {row} is in no step")


def counted_with(rows, process, pieces, rollout, options):
    """Return the rows that the micro-batch `rows` counts: its step, unless by mistake."""
    totals = options.get("totals", "step")
    if totals == "micro_batch":
        return rows
    if totals == "process":
        return flat(process)
    if totals == "rollout":
        return rollout
    return flat(flat(pieces))


def count(rows, mask, inputs, options):
    counted = steps.scored_rows(inputs, rows)
    with_prompts = rows if options.get("prompts") == "all" else counted
    return {
        "tokens": sum(sum(mask[row]) for row in rows),
        "rows": len(counted),
        "prompts": len({inputs["groups"][row] for row in with_prompts}),
    }


CUTS = {
    "2": [[[0, 1, 2, 3], [4, 5, 6, 7]]],
    "4": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "uneven": [[[0, 1, 2], [3, 4, 5], [6, 7]]],
    "processes": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    "2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "6 and 2 rows": [[[0, 1, 2, 3, 4, 5]], [[6, 7]]],
    "1 and 2 micro-batches": [[[0, 1]], [[2, 3, 4, 5], [6, 7]]],
}
PAIRED_ROWS = {"groups": eight_rows.GROUPS_OF_TWO}  # A process has whole groups.
SCORED = [1, 1, 0, 1, 0, 0, 0, 0]  # no row of the second prompt has a reward
KEPT = eight_rows.mask_without(1, 3)  # two rows were truncated
LOCAL = ("micro_batch", "micro_batch_summed", "over_micro_batches")
PROCESSES = ("process", "process_all", "over_processes")
LOCAL_2X2 = ("micro_batch", "micro_batch_summed", "micro_batch_all", *PROCESSES)
ADDED_UP = ("micro_batch_summed", "micro_batch_all", "over_processes")
ONE_AND_TWO = "1 and 2 micro-batches"
STEP = "denominators count the whole optimizer step: "
OVERLONG = "DAPO 2503.14476, section 3.4, leaves truncated rows out of the loss"
NO_LONGER_ROWS = f"{OVERLONG}; no paper says whether they still count as rows, here they do not"
STILL_ROWS = f"{OVERLONG}; no paper says whether they still count as rows, here they do"
CATCHES = "A denominator per micro-batch or process, so that the gradient depends on the split."
LAST_PAIRS = "A mean over each micro-batch, though the last one of an epoch has fewer pairs."
LOSS_THREADS = [  # on the mean over tokens
    "huggingface/trl/issues/3021",
    "huggingface/trl/pull/3231",
    "verl-project/verl/pull/906",
    "verl-project/verl/issues/907",
    "verl-project/verl/issues/5625",
    "verl-project/verl/issues/7321",
    "PrimeIntellect-ai/prime-rl/pull/583",
    "modelscope/ms-swift/issues/10117",
]

SAYS = {
    "micro_batch": "the mean over each micro-batch, then averaged",
    "micro_batch_summed": "the mean over each micro-batch, then summed",
    "micro_batch_all": "the mean over each micro-batch, then summed over processes too",
    "process": "the mean over each process, then averaged",
    "process_all": "the mean over each process, then summed",
    "over_micro_batches": "the mean over the step, divided again by the number of micro-batches",
    "over_processes": "the mean over the step, divided again by the number of processes",
}
TOP_ENTROPY = DAPO | {"share": 0.21}  # no threshold is an entropy, in float32 as in float64
TOP_ENTROPY_PAPER = "Beyond the 80/20 Rule 2506.01939"
ENTROPY_SOURCE = (
    f"{TOP_ENTROPY_PAPER}: tokens whose entropy is at least the (1 - share) quantile of the whole "
    "optimizer step have a loss; all tokens are in the denominator"
)
KL_COV = {"objective": "unclipped", "ratio": "token", "mean": "tokens", "penalty_coef": 1.0}
KL_COV_SOURCE = (
    "KL-Cov 2505.22617, with the penalty |log r| of its code: covariances and their highest "
    "max(1, floor(share tokens)) are those of the whole optimizer step"
)
THRESHOLD = "the threshold is that"
COVARIANCES = "the covariances are taken and selected"
KL_COV_THREADS = ["verl-project/verl/issues/7829", "verl-project/verl/pull/7830"]
SELECTED = (
    "A selection within each micro-batch or process, so that the gradient depends on the cut."
)


def within(name, what):
    """Return the other that selects within a part of the step."""
    parts = {
        "micro_batch": "each micro-batch",
        "together": "each micro-batch, of all processes together",
        "process": "each process",
    }
    return Other(f"{what} within {parts[name]}", options={"within": name})


MICRO_BATCH_COUNTS = Other("the counts of the micro-batch", options={"totals": "micro_batch"})
PROCESS_COUNTS = Other("the counts of the process", options={"totals": "process"})
MASKED_TOKENS_COUNT = Other("masked tokens count", inputs={"mask": eight_rows.ALL})
TRUNCATED_ARE_ROWS = Other("truncated rows are counted", options={"empty_rows_count": True})


def mistakes(*names):
    """Return the others with wrong denominators, by their names in `SAYS`."""
    return [Other(SAYS[name], options={"totals": name}) for name in names]


def totals_case(name, inputs, **fields):
    """Return a case of the counts of the eight rows."""
    return Case(id=name, operation=step_totals, inputs=inputs, options={}, **fields)


def split_case(name, cut, options, source, totals, inputs=None, others=(), **fields):
    """Return a case of the eight rows, split as in `CUTS`; `totals` are the mistakes that show."""
    threads = LOSS_THREADS if options["mean"] == "tokens" else []
    others = [*mistakes(*totals), *others]
    if options["mean"] == "rows":
        others.append(TOKEN_MEAN)
    fields = {"catches": CATCHES, "threads": threads} | fields
    return step_case(
        f"splits/{name}",
        options,
        source=STEP + source,
        inputs={"pieces": CUTS[cut]} | (inputs or {}),
        others=others,
        **fields,
    )


def truncated_case(name, cut, options, source, totals=ADDED_UP, inputs=None, **fields):
    """Return a case in which two truncated rows are masked."""
    inputs = {"mask": KEPT} | (inputs or {})
    return split_case(name, cut, options, source, totals, inputs, rests_on=CONVENTION, **fields)


def selection_case(name, cut, options, operation, others, inputs=None, **fields):
    """Return a case whose tokens are selected over the optimizer step."""
    fields = {"catches": SELECTED} | fields
    return step_case(
        f"splits/{name}",
        options,
        operation=operation,
        inputs={"pieces": CUTS[cut]} | (inputs or {}),
        others=others,
        rests_on=CONVENTION,
        **fields,
    )


CASES = [
    totals_case(
        "splits/totals",
        {"mask": eight_rows.ALL, "groups": eight_rows.GROUPS, "steps": [CUTS["2x2"]]},
        source="counts over the whole optimizer step: all micro-batches and processes",
        catches=CATCHES,
        others=[
            MICRO_BATCH_COUNTS,
            PROCESS_COUNTS,
            Other("the group's tokens in the micro-batch", options={"group_tokens": "micro_batch"}),
        ],
    ),
    totals_case(
        "splits/totals-interleaved",
        {
            "mask": eight_rows.PARTLY,
            "groups": [7, 3, 7, 3, 7, 3, 7, 3],
            "steps": [[[[0, 2], [4, 6]], [[1, 3], [5, 7]]]],
        },
        source="counts over the whole optimizer step; `groups` says which rows are a group",
        catches="Groups formed by position: the rows of a prompt are not adjacent here.",
        others=[ADJACENT_GROUPS, MICRO_BATCH_COUNTS, PROCESS_COUNTS, MASKED_TOKENS_COUNT],
    ),
    totals_case(
        "splits/totals-two-steps",
        {
            "mask": eight_rows.ALL,
            "groups": eight_rows.GROUPS,
            "steps": [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]],
        },
        source="each of the two optimizer steps of a rollout has its own counts",
        catches="The tokens of the rollout, or their mean over its steps, instead of the step's.",
        others=[
            MICRO_BATCH_COUNTS,
            Other("the counts of the rollout", options={"totals": "rollout"}),
        ],
    ),
    totals_case(
        "splits/totals-masked",
        {"mask": KEPT, "scored": SCORED, "groups": eight_rows.GROUPS, "steps": [CUTS["2x2"]]},
        source="a row without a reward is not counted; a masked row is",
        catches="Masked tokens in the denominator, or rows without a reward among the rows.",
        rests_on=CONVENTION,
        others=[
            MICRO_BATCH_COUNTS,
            PROCESS_COUNTS,
            Other("rows without a reward count", inputs={"scored": [1] * 8}),
            MASKED_TOKENS_COUNT,
            Other("prompts without a reward count", options={"prompts": "all"}),
        ],
    ),
    split_case("dapo-2", "2", DAPO, DAPO_PAPER, LOCAL),
    split_case("dapo-4", "4", DAPO, DAPO_PAPER, LOCAL),
    split_case("dapo-uneven", "uneven", DAPO, DAPO_PAPER, LOCAL),
    split_case("dapo-processes", "processes", DAPO, DAPO_PAPER, PROCESSES),
    split_case("dapo-pieces-1-2", ONE_AND_TWO, DAPO, DAPO_PAPER, LOCAL_2X2, PAIRED_ROWS),
    split_case("dapo-2x2", "2x2", DAPO, DAPO_PAPER, LOCAL_2X2),
    split_case(
        "dapo-kl-2x2",
        "2x2",
        DAPO | K3,
        DAPO_PAPER + ", with GRPO's KL",
        LOCAL_2X2,
        inputs={"ref_logprobs": eight_rows.REF},
        catches="A KL with its own denominator.",
        threads=[],
        others=[
            Other(
                "for the KL alone, the mean over each micro-batch, then averaged",
                options={"kl_totals": "micro_batch"},
            ),
            KL_TURNED,
        ],
    ),
    split_case(
        "dapo-entropy-2x2",
        "2x2",
        DAPO | {"entropy_coef": 0.01},
        DAPO_PAPER + ", with an entropy bonus",
        LOCAL_2X2,
        inputs={"entropies": eight_rows.ENTROPIES},
        catches="An entropy bonus with its own denominator.",
        threads=["huggingface/trl/pull/6648"],
    ),
    split_case(
        "dapo-group-uneven",
        "uneven",
        DAPO | {"mean": "groups"},
        DAPO_PAPER + " as printed, one denominator for each prompt",
        LOCAL,
        catches="A group split over two micro-batches, with a denominator in each.",
    ),
    split_case(
        "ppo-2x2",
        "2x2",
        PPO | {"dual_clip": 3.0},
        "PPO 1707.06347 Eq. 7",
        LOCAL_2X2,
        inputs={"advantages": eight_rows.OF_TOKENS},
        others=[NO_CAP, CAP_KEEPS_SLOPE],
    ),
    split_case("grpo-4", "4", GRPO, GRPO_PAPER, ("micro_batch_summed",)),
    split_case("grpo-uneven", "uneven", GRPO, GRPO_PAPER, LOCAL),
    split_case("grpo-processes", "processes", GRPO, GRPO_PAPER, PROCESSES[1:]),
    split_case("grpo-rows-6-2", "6 and 2 rows", GRPO, GRPO_PAPER, PROCESSES, PAIRED_ROWS),
    split_case("grpo-pieces-1-2", ONE_AND_TWO, GRPO, GRPO_PAPER, LOCAL_2X2, PAIRED_ROWS),
    split_case("dr-grpo-4", "4", DR_GRPO, DR_GRPO_PAPER, ("micro_batch_summed",)),
    split_case("dr-grpo-uneven", "uneven", DR_GRPO, DR_GRPO_PAPER, LOCAL),
    split_case("dr-grpo-processes", "processes", DR_GRPO, DR_GRPO_PAPER, PROCESSES[1:]),
    split_case("dr-grpo-rows-6-2", "6 and 2 rows", DR_GRPO, DR_GRPO_PAPER, PROCESSES, PAIRED_ROWS),
    split_case(
        "gspo-uneven",
        "uneven",
        GSPO,
        GSPO_PAPER + " Eq. 5-7",
        LOCAL,
        inputs={"logprobs": eight_rows.GSPO_LOGPROBS},
        others=[RATIO_OF_SUM, RATIO_BY_WIDTH, DIVIDED_TWICE],
    ),
    split_case("dcpo-uneven", "uneven", DCPO, DCPO_PAPER + " Eq. 8", LOCAL),
    split_case(
        "truncated-tokens",
        "2x2",
        DAPO,
        f"{OVERLONG}, and thus out of its token count",
        LOCAL_2X2,
        inputs={"mask": KEPT},
        catches="Tokens that are left out of the loss, but not out of the denominator.",
        threads=["huggingface/trl/issues/6369", "huggingface/trl/pull/6439"],
        others=[
            Other("masked tokens count in the total", options={"masked_tokens_count": True}),
            Other("truncated rows are in the loss", inputs={"mask": eight_rows.ALL}),
        ],
    ),
    truncated_case(
        "truncated-rows-counted",
        "2x2",
        DR_GRPO | {"empty_rows_count": True},
        STILL_ROWS,
        catches="The other convention: 6 rows instead of 8.",
        others=[
            Other(
                "truncated rows are not counted, or the constant is the longest row (same here)",
                options={"empty_rows_count": False},
            )
        ],
    ),
    truncated_case(
        "truncated-rows-counted-constant-16",
        "2x2",
        DR_GRPO | {"constant": 16, "empty_rows_count": True},
        STILL_ROWS,
        catches="The other convention: 6 rows instead of 8.",
        others=[
            Other("truncated rows are not counted", options={"empty_rows_count": False}),
            Other("the longest row instead of the constant", options={"constant": 6}),
            Other("the rows are summed, not averaged", options={"constant": 2}),
        ],
    ),
    truncated_case(
        "truncated-rows-left-out",
        "2x2",
        GRPO | {"empty_rows_count": False},
        NO_LONGER_ROWS,
        catches="The other convention: 8 rows instead of 6.",
        others=[
            Other(
                "the mean over each micro-batch or each process, then averaged (the same here)",
                options={"totals": "process"},
            ),
            TRUNCATED_ARE_ROWS,
        ],
    ),
    truncated_case(
        "truncated-rows-left-out-1-2",
        ONE_AND_TWO,
        GRPO | {"empty_rows_count": False},
        NO_LONGER_ROWS,
        LOCAL_2X2,
        inputs=PAIRED_ROWS,
        catches="The other convention, 8 rows instead of 6, or the denominator of a piece.",
        others=[TRUNCATED_ARE_ROWS],
    ),
    split_case(
        "missing-rewards",
        "2x2",
        GRPO,
        "a row without a reward (`scored` 0) is not counted",
        ("micro_batch", "micro_batch_summed", "micro_batch_all"),
        inputs={"scored": SCORED},
        rests_on=CONVENTION,
        catches="A row without a reward that still reduces the weight of the others.",
        others=[
            Other(
                "the mean over each process, then averaged, or the mean over the step, divided "
                "again by the number of processes (the same here)",
                options={"totals": "process"},
            ),
            *OF_UNSCORED_ROWS,
        ],
    ),
    selection_case(
        "top-entropy",
        "2x2",
        TOP_ENTROPY,
        top_entropy_step,
        [within(name, THRESHOLD) for name in ("micro_batch", "together", "process")]
        + [
            Other("tokens without a loss are not counted", options={"counted": "chosen"}),
            Other("there is no selection", options={"share": 1.0}),
        ],
        inputs={"entropies": eight_rows.ENTROPIES},
        source=ENTROPY_SOURCE,
        threads=["radixark/miles/pull/3205"],
    ),
    selection_case(
        "top-entropy-2",
        "2",
        TOP_ENTROPY,
        top_entropy_step,
        [within("micro_batch", THRESHOLD)],
        inputs={"entropies": eight_rows.ENTROPIES},
        source=ENTROPY_SOURCE,
        threads=["radixark/miles/pull/3205"],
    ),
    selection_case(
        "kl-cov",
        "2x2",
        KL_COV | {"share": 0.25},
        covariance_step,
        [within(name, COVARIANCES) for name in ("micro_batch", "process")]
        + [Other("there is no penalty", options={"penalty_coef": 0.0})],
        source=KL_COV_SOURCE,
        threads=KL_COV_THREADS,
    ),
    selection_case(
        "kl-cov-one",
        "4",
        KL_COV | {"share": 0.05},
        covariance_step,
        [within("micro_batch", COVARIANCES)],
        source=KL_COV_SOURCE + ", here one token",
        threads=KL_COV_THREADS,
        catches="At least one token of each micro-batch: four instead of one.",
    ),
    split_case(
        "dr-grpo-entropy-2x2",
        "2x2",
        DR_GRPO | {"entropy_coef": 0.01},
        DR_GRPO_PAPER + ", with an entropy bonus that is divided by the same constant",
        ("micro_batch_summed", "micro_batch_all"),
        inputs={"entropies": eight_rows.ENTROPIES},
        rests_on=CONVENTION,
        catches="An entropy bonus with another denominator than the loss.",
        threads=["verl-project/verl/issues/3741", "verl-project/verl/issues/3986"],
        others=[
            Other(
                "the entropy bonus is one mean over all tokens", options={"entropy_mean": "tokens"}
            ),
            Other(
                "the entropy bonus is the mean over the tokens of each micro-batch, then averaged",
                options={"entropy_mean": "tokens", "entropy_totals": "micro_batch"},
            ),
        ],
    ),
    critic.value_case(
        "splits/value",
        inputs={"pieces": [[[0, 1], [2]]]},
        catches="A critic whose denominator counts the micro-batch.",
        threads=["verl-project/verl/pull/6957", "verl-project/verl/issues/7110"],
        others=mistakes("micro_batch", "micro_batch_summed"),
    ),
    pairs.pair_case(
        "splits/pairs-uneven",
        inputs={"pieces": [[[0, 2], [1]]]},
        catches=LAST_PAIRS,
        threads=["modelscope/ms-swift/pull/10144"],
        others=mistakes("micro_batch", "micro_batch_summed"),
    ),
    pairs.reward_case(
        "splits/reward-pairs-uneven",
        inputs={"pieces": [[[0, 1, 2], [3]]]},
        catches=LAST_PAIRS,
        others=mistakes("micro_batch", "micro_batch_summed"),
    ),
]

SUBJECT = Subject(
    name="splits",
    about="One optimizer step in 1, 2 and 4 micro-batches and on two processes. Expected is what "
    "the optimizer sees: after accumulation, and after the mean over processes.",
    shared_inputs={"eight rows": eight_rows.BATCH},
    cases=CASES,
)
