"""DAPO's soft penalty on long completions."""

from .arithmetic import clip
from .cases import Case, Other, Subject


def soft_overlong(inputs, options):
    """Return 0 up to max_tokens - cache tokens, then a ramp to -1 at max_tokens, and -1 beyond."""
    free = options["max_tokens"] - options["cache"]
    penalties = []
    for length in inputs["lengths"]:
        ramp = (free - length) / options["cache"]
        penalties.append(min(ramp, 0.0) if options.get("without_floor") else clip(ramp, -1.0, 0.0))
    return {"penalties": penalties}, {}


CASES = [
    Case(
        id="overlong/soft",
        operation=soft_overlong,
        inputs={"lengths": [1, 5, 6, 7, 8, 9, 10, 11, 20]},
        options={"max_tokens": 10, "cache": 4},
        source="DAPO 2503.14476 Eq. 13",
        catches="A ramp on the wrong side of max_tokens, or a penalty below -1.",
        threads=["modelscope/ms-swift/pull/5557"],
        others=[
            Other("there is no floor at -1", options={"without_floor": True}),
            Other("the ramp starts at max_tokens", options={"max_tokens": 14}),
        ],
    ),
]

SUBJECT = Subject(
    name="overlong",
    about="The penalty on the length of a completion, which is added to its reward.",
    cases=CASES,
)
