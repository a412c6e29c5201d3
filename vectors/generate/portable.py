"""Some of the policy's cases as one file of padded tables, for a test in another project."""

from . import policy, splits, variants
from .arithmetic import each
from .cases import VERSION, entry

WIDTH = 6  # the longest row
CHOSEN = (
    "policy/first-step",
    "policy/ppo",
    "policy/dual-clip",
    "policy/grpo",
    "policy/dr-grpo",
    "policy/sums",
    "policy/dapo",
    "policy/gspo",
    "policy/gspo-masked",
    "variants/luspo",
    "variants/off-policy-mask",
    "splits/dapo-2",
    "splits/dapo-4",
    "splits/dapo-uneven",
    "splits/grpo-4",
    "splits/grpo-uneven",
    "splits/dr-grpo-4",
    "splits/dr-grpo-uneven",
    "splits/gspo-uneven",
    "splits/kl-cov-one",
)


def padded(rows):
    return [[*row, *[0] * (WIDTH - len(row))] for row in rows]


def portable_case(subject, case):
    """Return a case with padded tables, one number per token, and the wrong answers by name."""
    content = entry(subject, case)
    inputs = subject.shared_inputs[content["inputs_from"]] | content.get("inputs", {})
    table = inputs["logprobs"]
    process, *others = inputs.get("pieces", [[list(range(len(table)))]])
    assert not others, case.id
    wrong = {}
    for other in content["others"]:
        wrong[other["says"]] = padded_answer(other["expected"])
    return {
        "id": case.id,
        "config": content["options"],
        "logprobs": padded(table),
        "old_logprobs": padded(inputs["old_logprobs"]),
        "advantages": padded(policy.advantages_of(inputs)),
        "mask": padded(inputs.get("mask") or each(lambda _: 1, table)),
        "micro_batches": process,
        **padded_answer(content["expected"]),
        "wrong": wrong,
    }


def padded_answer(answer):
    return {"loss": answer["loss"], "gradient": padded(answer["gradient"])}


def document():
    """Return the content of the file."""
    found = {}
    for module in (policy, splits, variants):
        for case in module.SUBJECT.cases:
            if case.id in CHOSEN:
                found[case.id] = portable_case(module.SUBJECT, case)
    return {"version": VERSION, "cases": [found[name] for name in CHOSEN]}
