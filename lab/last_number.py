"""A lenient grade of GSM8K completions, to be logged beside `accuracy` with weight 0."""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(completions, gold, truncated, **columns):
    """Return 1.0 where the last number is the gold answer, marked or not."""
    values = []
    for messages, answer, cut in zip(completions, gold, truncated, strict=True):
        *_, number = ["", *NUMBER.findall(messages[-1]["content"])]
        values.append(float(not cut and number.replace(",", "") == answer.replace(",", "")))
    return values
