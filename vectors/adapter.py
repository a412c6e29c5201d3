"""Answer the cases with an implementation of your own: replace the functions of this file.

    python adapter.py > answers.json
    python check.py answers.json --differing

A function takes the inputs and options of a case, and returns the names under `expected`.
FORMULAS.md defines them all. Refuse what you do not offer, with a reason. The functions here are a
GRPO in a few lines of torch.
"""

import json
import sys

import torch

import check


class NotOfferedError(Exception):
    """The implementation cannot compute a case. The message says why."""


def refuse_unless(condition, reason):
    if not condition:
        raise NotOfferedError(reason)


def policy_step(inputs, options):
    known = {"objective", "ratio", "mean", "clip_low", "clip_high"}
    refuse_unless(options.keys() == known, "no options beyond the clip")
    refuse_unless(
        options["objective"] == "clip" and options["ratio"] == "token", "only the token's ratio"
    )
    refuse_unless(options["mean"] == "rows", f"no mean over {options['mean']}")
    refuse_unless("pieces" not in inputs, "only one micro-batch")
    rows = inputs["logprobs"]
    logprobs = padded(rows).requires_grad_()
    ratio = (logprobs - padded(inputs["old_logprobs"])).exp()
    clipped = ratio.clamp(1 - options["clip_low"], 1 + options["clip_high"])
    advantages = padded([[number] for number in inputs["advantages"]])
    mask = padded(inputs.get("mask") or [[1.0] * len(row) for row in rows])
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = ((losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
    loss.backward()
    return {"loss": loss.item(), "gradient": cut(logprobs.grad, rows)}


OPERATIONS = {"policy_step": policy_step}


def padded(rows):
    """Return rows of different lengths as a tensor (R, T)."""
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def cut(table, rows):
    """Return the rows of a tensor (R, T) as lists, without padding."""
    return [numbers[: len(row)] for numbers, row in zip(table.tolist(), rows, strict=True)]


def answer(case):
    operation = OPERATIONS.get(case["operation"])
    if operation is None:
        return {"not_offered": "no such function"}
    try:
        return operation(case["inputs"], case["options"])
    except NotOfferedError as reason:
        return {"not_offered": str(reason)}


if __name__ == "__main__":
    json.dump({name: answer(case) for name, case in check.load_cases().items()}, sys.stdout)
