"""The cases: how an operation gives a case its expected numbers and those of its `others`."""

import json
import math
from dataclasses import dataclass, field

FORMAT = 1
VERSION = "1.4.0"
SMALLEST = 1e-15  # smaller numbers are zeros with a rounding error
DIGITS = 15  # the last digits of a float64 may differ between machines
TOLERANCE = {
    "float64": {"rtol": 1e-9, "atol": 1e-12},
    "float32": {"rtol": 2e-5, "atol": 2e-6},
}
FORMULA = "formula"
CONVENTION = "convention"


@dataclass
class Other:
    """Another convention or a common mistake: the operation with other inputs or options.

    Some options, such as {"totals": "micro_batch"}, exist only to build in a mistake. They are
    never written to a file.
    """

    says: str
    options: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)


@dataclass(kw_only=True)
class Case:
    """A case. `operation` is a function (inputs, options) -> (expected, worked)."""

    id: str
    operation: object
    inputs_from: str | None = None  # a name in the subject's `shared_inputs`
    inputs: dict = field(default_factory=dict)
    options: dict
    rests_on: str = FORMULA
    source: str
    catches: str
    threads: list = field(default_factory=list)  # on GitHub, such as "huggingface/trl/issues/3021"
    others: list = field(default_factory=list)
    tolerance: dict | None = None


@dataclass(kw_only=True)
class Subject:
    """A file of cases. Several of its cases start from one of its `shared_inputs`."""

    name: str
    about: str
    shared_inputs: dict = field(default_factory=dict)
    cases: list


def document(subject):
    """Return the content of a subject's file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "subject": subject.name,
        "about": subject.about,
        "tolerance": TOLERANCE,
        "shared_inputs": subject.shared_inputs,
        "cases": [entry(subject, case) for case in subject.cases],
    }


def entry(subject, case):
    """Return a case as its file has it, with the expected numbers."""
    inputs = dict(case.inputs)
    if case.inputs_from:
        inputs = subject.shared_inputs[case.inputs_from] | inputs
    expected, worked = case.operation(inputs, case.options)
    others = answers_of_others(case, inputs, expected)
    result = {"id": case.id, "operation": case.operation.__name__}
    if case.inputs_from:
        result["inputs_from"] = case.inputs_from
    if case.inputs:
        result["inputs"] = case.inputs
    result["options"] = case.options
    result["expected"] = rounded(expected)
    if worked:
        result["worked"] = rounded(worked)
    if others:
        result["others"] = others
    if case.tolerance:
        result["tolerance"] = case.tolerance
    result["rests_on"] = case.rests_on
    result["source"] = case.source
    result["catches"] = case.catches
    if case.threads:
        result["threads"] = [f"https://github.com/{thread}" for thread in case.threads]
    return result


def answers_of_others(case, inputs, expected):
    """Return [{"says", "expected"}], after checking that all differ, also from what is expected."""
    tolerance = (case.tolerance or TOLERANCE)["float32"]
    result = []
    known = [expected]
    for other in case.others:
        answer, _ = case.operation(inputs | other.inputs, case.options | other.options)
        for earlier in known:
            assert differs(earlier, answer, tolerance), (case.id, other.says)
        known.append(answer)
        result.append({"says": other.says, "expected": rounded(answer)})
    return result


def differs(expected, answer, tolerance):
    """Return whether two answers of one shape differ by more than twice the tolerance."""
    if isinstance(expected, dict):
        return any(differs(expected[name], answer[name], tolerance) for name in expected)
    if isinstance(expected, list):
        pairs = zip(expected, answer, strict=True)
        return any(differs(left, right, tolerance) for left, right in pairs)
    allowed = tolerance["atol"] + tolerance["rtol"] * abs(expected)
    return abs(expected - answer) > 2 * allowed


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        assert math.isfinite(value)
        if abs(value) < SMALLEST:
            return 0.0
        return float(f"{value:.{DIGITS}g}")
    return value


def text_of(document):
    """Return the JSON text of a file, with one case per line."""
    *head, last = document
    assert last == "cases", last
    parts = [f"{json.dumps(name)}:{compact(document[name])}" for name in head]
    cases = ",\n".join(compact(case) for case in document["cases"])
    return "{" + ",\n".join(parts) + f',\n"cases":[\n{cases}\n]}}\n'


def compact(value):
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
