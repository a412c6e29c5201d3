"""Does a policy loss compute what its paper says? Its loss and gradient against worked numbers.

Copy this file and policy_losses.json into a folder of tests, and put your function below, or into
adapter.py beside this file. FORMULAS.md of the test vectors explains each config.
"""

import json
import pathlib

import pytest

FILE = pathlib.Path(__file__).with_name("policy_losses.json")
CASES = json.loads(FILE.read_text(encoding="utf-8"))["cases"]
INPUTS = ("logprobs", "old_logprobs", "advantages", "mask", "micro_batches", "config")


def loss_and_gradient(logprobs, old_logprobs, advantages, mask, micro_batches, config):
    """Return the loss of an optimizer step and its gradient by `logprobs`, accumulated.

    The first four are lists of rows of one length, 0 in the padding, whose `mask` is 0 as well.
    `micro_batches` has the row numbers of each. The gradient is such a table too, or None if you
    have none. Return None for a config that you do not offer.
    """
    adapter = pytest.importorskip("adapter", reason="no adapter.py yet")
    return adapter.loss_and_gradient(
        logprobs, old_logprobs, advantages, mask, micro_batches, config
    )


def is_near(loss, gradient, expected):
    """Compare in the tolerance of float32."""
    numbers, wanted = [loss], [expected["loss"]]
    if gradient is not None:
        numbers += [number for row in gradient for number in row]
        wanted += [number for row in expected["gradient"] for number in row]
    return numbers == pytest.approx(wanted, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_loss_and_gradient(case):
    answer = loss_and_gradient(*(case[name] for name in INPUTS))
    if answer is None:
        pytest.skip("not offered")
    if is_near(*answer, case):
        return
    follows = [says for says, wrong in case["wrong"].items() if is_near(*answer, wrong)]
    reason = f"loss {answer[0]:.6g} instead of {case['loss']:.6g}"
    pytest.fail("; it follows: ".join([reason, *follows]), pytrace=False)
