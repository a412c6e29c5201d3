"""One optimizer step, cut into micro-batches and over processes: its numbers do not change."""

from vectors.generate import critic, pairs, policy, steps
from vectors.generate.cases import CONVENTION, FORMULA, Case, Other, Subject


def step_totals(inputs, options):
    """What each micro-batch counts, as [optimizer step][process][micro-batch].

    `steps` is a list of `pieces`, one for each optimizer step of a rollout.
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
            numbers.append([[piece[name] for piece in process] for process in counts])
    groups = inputs["groups"]
    expected["group_tokens"] = []
    for row, group in enumerate(groups):
        members = [other for other in seen_with(row, inputs, options) if groups[other] == group]
        expected["group_tokens"].append(sum(sum(mask[other]) for other in members))
    return expected, {}


def seen_with(row, inputs, options):
    """The rows among which the group of `row` is counted: those of its step, unless by mistake."""
    for pieces in inputs["steps"]:
        micro_batches = [rows for process in pieces for rows in process]
        step = [other for rows in micro_batches for other in rows]
        scopes = micro_batches if options.get("group_tokens") == "micro_batch" else [step]
        for rows in scopes:
            if row in rows:
                return rows
    raise AssertionError(f"row {row} is in no step")


def counted_with(rows, process, pieces, rollout, options):
    """The rows whose counts the micro-batch `rows` has: those of the step, unless by mistake."""
    totals = options.get("totals", "step")
    if totals == "micro_batch":
        return rows
    if totals == "process":
        return [row for part in process for row in part]
    if totals == "rollout":
        return rollout
    return [row for own in pieces for part in own for row in part]


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
PAIRS = {"groups": [0, 0, 1, 1, 2, 2, 3, 3]}  # A process has whole groups.
SAYS = {
    "micro_batch": "this is the mean over the micro-batch, averaged",
    "micro_batch_summed": "this is the mean over the micro-batch, added up",
    "micro_batch_all": "this is the mean over the micro-batch, added up over processes too",
    "process": "this is the mean over the process, averaged",
    "process_all": "this is the mean over the process, added up",
    "over_micro_batches": "the step's mean, divided once more by the number of micro-batches",
    "over_processes": "the step's mean, divided once more by the number of processes",
}
CATCHES = "The denominator of a micro-batch or of a process: the gradient depends on the cut."
STEP = "the denominators are those of the whole optimizer step: "


LOSS_THREADS = [  # of the mean over tokens
    "huggingface/trl/issues/3021",
    "huggingface/trl/pull/3231",
    "verl-project/verl/pull/906",
    "verl-project/verl/issues/5625",
    "verl-project/verl/issues/7321",
    "PrimeIntellect-ai/prime-rl/pull/583",
    "modelscope/ms-swift/issues/10117",
]


def mistakes(*names):
    return [Other(says=SAYS[name], options={"totals": name}) for name in names]


def split_case(name, cut, options, source, totals, inputs=None, others=(), **fields):
    threads = LOSS_THREADS if options["mean"] == "tokens" else []
    fields = {"rests_on": FORMULA, "catches": CATCHES, "threads": threads} | fields
    return Case(
        id=f"splits/{name}",
        operation=policy.policy_step,
        inputs_from="eight rows",
        inputs={"pieces": CUTS[cut]} | (inputs or {}),
        options=options,
        source=STEP + source,
        others=[*mistakes(*totals), *others],
        **fields,
    )


LEFT_OUT = (1, 3)  # rows that were truncated
KEPT = [[int(row not in LEFT_OUT)] * len(cells) for row, cells in enumerate(policy.OLD)]
SCORED = [1, 1, 0, 1, 0, 0, 0, 0]  # no row of the second prompt has a reward
LOCAL = ("micro_batch", "micro_batch_summed", "over_micro_batches")
PROCESSES = ("process", "process_all", "over_processes")
LOCAL_2X2 = (
    "micro_batch",
    "micro_batch_summed",
    "micro_batch_all",
    "process",
    "process_all",
    "over_processes",
)
ONE_AND_TWO = "1 and 2 micro-batches"
KL_TURNED = policy.with_kl("k3_of_ref")
DR_GRPO_PAPER = "Dr. GRPO 2503.20783, Listing 1"
OVERLONG = "DAPO 2503.14476, section 3.4, leaves truncated rows out of the loss"

CASES = [
    Case(
        id="splits/totals",
        operation=step_totals,
        inputs={"mask": policy.ALL, "groups": policy.EIGHT_ROWS["groups"], "steps": [CUTS["2x2"]]},
        options={},
        rests_on=FORMULA,
        source="the counts of the whole optimizer step, over all micro-batches and processes",
        catches=CATCHES,
        others=[
            Other(says="the counts of the micro-batch", options={"totals": "micro_batch"}),
            Other(says="the counts of the process", options={"totals": "process"}),
            Other(
                says="the group's tokens in the micro-batch",
                options={"group_tokens": "micro_batch"},
            ),
        ],
    ),
    Case(
        id="splits/totals-interleaved",
        operation=step_totals,
        inputs={
            "mask": policy.PARTLY,
            "groups": [7, 3, 7, 3, 7, 3, 7, 3],
            "steps": [[[[0, 2], [4, 6]], [[1, 3], [5, 7]]]],
        },
        options={},
        rests_on=FORMULA,
        source="the counts of the whole optimizer step; `groups` says which rows are a group",
        catches="Groups that are cut by position: the rows of a prompt are not adjacent here.",
        others=[
            Other(
                says="groups are four adjacent rows",
                inputs={"groups": policy.EIGHT_ROWS["groups"]},
            ),
            Other(says="the counts of the micro-batch", options={"totals": "micro_batch"}),
            Other(says="the counts of the process", options={"totals": "process"}),
            Other(says="masked tokens count", inputs={"mask": policy.ALL}),
        ],
    ),
    Case(
        id="splits/totals-two-steps",
        operation=step_totals,
        inputs={
            "mask": policy.ALL,
            "groups": policy.EIGHT_ROWS["groups"],
            "steps": [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]],
        },
        options={},
        rests_on=FORMULA,
        source="two optimizer steps of one rollout: each has its own counts",
        catches="The tokens of the rollout, or their mean over its steps, for those of the step.",
        others=[
            Other(says="the counts of the micro-batch", options={"totals": "micro_batch"}),
            Other(says="the counts of the rollout", options={"totals": "rollout"}),
        ],
    ),
    Case(
        id="splits/totals-masked",
        operation=step_totals,
        inputs={
            "mask": KEPT,
            "scored": SCORED,
            "groups": policy.EIGHT_ROWS["groups"],
            "steps": [CUTS["2x2"]],
        },
        options={},
        rests_on=CONVENTION,
        source="a row without a reward is in no count; a masked row still counts as a row",
        catches="Masked tokens in the denominator, or rows without a reward among the rows.",
        others=[
            Other(says="the counts of the micro-batch", options={"totals": "micro_batch"}),
            Other(says="the counts of the process", options={"totals": "process"}),
            Other(says="rows without a reward count", inputs={"scored": [1] * 8}),
            Other(says="masked tokens count", inputs={"mask": policy.ALL}),
            Other(says="prompts without a reward count", options={"prompts": "all"}),
        ],
    ),
    split_case("dapo-2", "2", policy.DAPO, policy.DAPO_PAPER, LOCAL),
    split_case("dapo-4", "4", policy.DAPO, policy.DAPO_PAPER, LOCAL),
    split_case("dapo-uneven", "uneven", policy.DAPO, policy.DAPO_PAPER, LOCAL),
    split_case("dapo-processes", "processes", policy.DAPO, policy.DAPO_PAPER, PROCESSES),
    split_case("dapo-pieces-1-2", ONE_AND_TWO, policy.DAPO, policy.DAPO_PAPER, LOCAL_2X2, PAIRS),
    split_case("dapo-2x2", "2x2", policy.DAPO, policy.DAPO_PAPER, LOCAL_2X2),
    split_case(
        "dapo-kl-2x2",
        "2x2",
        policy.DAPO | policy.K3,
        policy.DAPO_PAPER + ", with GRPO's KL",
        LOCAL_2X2,
        inputs={"ref_logprobs": policy.REF},
        catches="A KL with a denominator of its own.",
        threads=[],
        others=[
            Other(
                says="the KL alone is the mean over the micro-batch, averaged",
                options={"kl_totals": "micro_batch"},
            ),
            Other(says="log(pi / pi_ref) for log(pi_ref / pi)", options=KL_TURNED),
        ],
    ),
    split_case(
        "dapo-entropy-2x2",
        "2x2",
        policy.DAPO | {"entropy_coef": 0.01},
        policy.DAPO_PAPER + ", with an entropy bonus",
        LOCAL_2X2,
        inputs={"entropies": policy.ENTROPIES},
        catches="An entropy bonus with a denominator of its own.",
        threads=["huggingface/trl/pull/6648"],
    ),
    split_case(
        "dapo-group-uneven",
        "uneven",
        policy.DAPO | {"mean": "groups"},
        policy.DAPO_PAPER + " as printed, one denominator for each prompt",
        LOCAL,
        catches="A group whose rows are in two micro-batches, with a denominator in each.",
    ),
    split_case(
        "ppo-2x2",
        "2x2",
        policy.PPO | {"dual_clip": 3.0},
        "PPO 1707.06347 Eq. 7",
        LOCAL_2X2,
        inputs={"advantages": policy.OF_TOKENS},
        others=[policy.NO_CAP, policy.CAP_KEEPS_SLOPE],
    ),
    split_case("grpo-4", "4", policy.GRPO, policy.GRPO_PAPER, ("micro_batch_summed",)),
    split_case("grpo-uneven", "uneven", policy.GRPO, policy.GRPO_PAPER, LOCAL),
    split_case("grpo-processes", "processes", policy.GRPO, policy.GRPO_PAPER, PROCESSES[1:]),
    split_case("grpo-rows-6-2", "6 and 2 rows", policy.GRPO, policy.GRPO_PAPER, PROCESSES, PAIRS),
    split_case("grpo-pieces-1-2", ONE_AND_TWO, policy.GRPO, policy.GRPO_PAPER, LOCAL_2X2, PAIRS),
    split_case("dr-grpo-4", "4", policy.DR_GRPO, DR_GRPO_PAPER, ("micro_batch_summed",)),
    split_case("dr-grpo-uneven", "uneven", policy.DR_GRPO, DR_GRPO_PAPER, LOCAL),
    split_case("dr-grpo-processes", "processes", policy.DR_GRPO, DR_GRPO_PAPER, PROCESSES[1:]),
    split_case("dr-grpo-rows-6-2", "6 and 2 rows", policy.DR_GRPO, DR_GRPO_PAPER, PROCESSES, PAIRS),
    split_case(
        "gspo-uneven",
        "uneven",
        policy.GSPO,
        policy.GSPO_PAPER + " Eq. 5-7",
        LOCAL,
        inputs={"logprobs": policy.GSPO_LOGPROBS},
    ),
    split_case("dcpo-uneven", "uneven", policy.DCPO, "DCPO 2509.02333v2 Eq. 8", LOCAL),
    split_case(
        "truncated-tokens",
        "2x2",
        policy.DAPO,
        f"{OVERLONG}, and so out of its token count",
        LOCAL_2X2,
        inputs={"mask": KEPT},
        catches="Tokens that are left out of the loss and stay in the denominator.",
        threads=["huggingface/trl/issues/6369", "huggingface/trl/pull/6439"],
        others=[
            Other(says="masked tokens are in the total", options={"masked_tokens_count": True}),
            Other(says="truncated rows are in the loss", inputs={"mask": policy.ALL}),
        ],
    ),
    split_case(
        "truncated-rows-counted",
        "2x2",
        policy.DR_GRPO | {"empty_rows_count": True},
        f"{OVERLONG}; no paper says whether they are still rows, here they are",
        ("micro_batch_summed", "micro_batch_all", "over_processes"),
        inputs={"mask": KEPT},
        rests_on=CONVENTION,
        catches="The other convention: 8 rows or 6.",
        others=[
            Other(
                says="truncated rows are no rows, or the longest row is the constant, which is the same here",
                options={"empty_rows_count": False},
            )
        ],
    ),
    split_case(
        "truncated-rows-counted-constant-16",
        "2x2",
        policy.DR_GRPO | {"constant": 16, "empty_rows_count": True},
        f"{OVERLONG}; no paper says whether they are still rows, here they are",
        ("micro_batch_summed", "micro_batch_all", "over_processes"),
        inputs={"mask": KEPT},
        rests_on=CONVENTION,
        catches="The other convention: 8 rows or 6.",
        others=[
            Other(says="truncated rows are no rows", options={"empty_rows_count": False}),
            Other(says="the longest row for the constant", options={"constant": 6}),
            Other(says="the rows are added up", options={"constant": 2}),
        ],
    ),
    split_case(
        "truncated-rows-left-out",
        "2x2",
        policy.GRPO | {"empty_rows_count": False},
        f"{OVERLONG}; no paper says whether they are still rows, here they are not",
        ("micro_batch_summed", "micro_batch_all", "over_processes"),
        inputs={"mask": KEPT},
        rests_on=CONVENTION,
        catches="The other convention: 6 rows or 8.",
        others=[
            Other(
                says="this is the mean over the micro-batch or over the process, averaged, which are the same here",
                options={"totals": "process"},
            ),
            Other(says="truncated rows are rows", options={"empty_rows_count": True}),
        ],
    ),
    split_case(
        "truncated-rows-left-out-1-2",
        ONE_AND_TWO,
        policy.GRPO | {"empty_rows_count": False},
        f"{OVERLONG}; no paper says whether they are still rows, here they are not",
        LOCAL_2X2,
        inputs={"mask": KEPT, **PAIRS},
        rests_on=CONVENTION,
        catches="The other convention, 6 rows or 8, or a denominator of a piece of the step.",
        others=[Other(says="truncated rows are rows", options={"empty_rows_count": True})],
    ),
    split_case(
        "missing-rewards",
        "2x2",
        policy.GRPO,
        "a row without a reward (`scored` 0) is in no count",
        ("micro_batch", "micro_batch_summed", "micro_batch_all"),
        inputs={"scored": SCORED},
        rests_on=CONVENTION,
        catches="A row without a reward that still makes the others smaller.",
        others=[
            Other(
                says="this is the mean over the process, or the step's once more divided by the "
                "number of processes, which are the same here",
                options={"totals": "process"},
            ),
            *policy.OF_UNSCORED_ROWS,
        ],
    ),
    critic.value_case(
        "splits/value",
        inputs={"pieces": [[[0, 1], [2]]]},
        catches="A critic with the denominator of the micro-batch.",
        threads=["verl-project/verl/pull/6957", "verl-project/verl/issues/7110"],
        others=mistakes("micro_batch", "micro_batch_summed"),
    ),
    pairs.pair_case(
        "splits/pairs-uneven",
        inputs={"pieces": [[[0, 2], [1]]]},
        catches="The mean over the pairs of the micro-batch: the last one of an epoch is smaller.",
        threads=["modelscope/ms-swift/pull/10144"],
        others=mistakes("micro_batch", "micro_batch_summed"),
    ),
    pairs.reward_case(
        "splits/reward-pairs-uneven",
        inputs={"pieces": [[[0, 1, 2], [3]]]},
        catches="The mean over the pairs of the micro-batch: the last one of an epoch is smaller.",
        others=mistakes("micro_batch", "micro_batch_summed"),
    ),
]

SUBJECT = Subject(
    name="splits",
    about="One optimizer step in 1, 2 and 4 micro-batches and on two processes. Expected is what "
    "the optimizer sees: after accumulation, and after the mean over processes.",
    shared_inputs={"eight rows": policy.EIGHT_ROWS},
    cases=CASES,
)
