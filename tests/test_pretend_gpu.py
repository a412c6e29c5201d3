"""Whole steps of every script on the pretend GPU (tools/pretend_gpu.py): no mix of devices, few waits."""

import json

import pytest

from processes import run_processes
from testbed import ALL

pytestmark = pytest.mark.beside("tools")
# Phases of a step, named by the function that `main` calls, in which completions are sampled, scored, or evaluated.
# All others are the update and its metrics.
SAMPLING = {"rollout", "dynamic_batch", "completion_texts", "compute_rewards", "make_pairs", "with_reference"}
SAMPLING |= {"evaluate", "evaluate_both", "evaluate_pairs"}
RECORDING = "record_tokens"


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What pretend_worker.py counts, in a process of its own: the switches of the device are process-wide."""
    file = tmp_path_factory.mktemp("pretended") / "counted.json"
    result = run_processes("tests/helpers/pretend_worker.py", file)
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_device_refuses_mixes_and_counts_each_wait(counted):
    kinds = counted["kinds"]
    assert kinds["waits"] == dict.fromkeys(kinds["waits"], 1) and "boolean index" in kinds["waits"]
    assert kinds["no waits"] == dict.fromkeys(kinds["no waits"], 0)
    assert all("gpu:0" in str(error) for error in kinds["mixes"].values()), kinds["mixes"]


@pytest.mark.parametrize("name", [*ALL, "packed"])
def test_a_step_mixes_no_devices_and_its_update_rarely_waits(name, counted):
    steps = counted["steps"][name]
    assert not isinstance(steps, str), steps
    waits = [[wait for wait in step if wait[0] not in SAMPLING | {RECORDING}] for step in steps]
    one, four = (sum(number for *_, number in step) for step in waits)
    assert 0 < one <= 20, waits[0]
    assert four <= one + 3 * 3 + 2, waits[1]  # two: whether the first of the two steps was to be the last one
    for step in steps:  # both are recorded; most steps of a run are not
        assert sum(number for phase, *_, number in step if phase == RECORDING) <= 16


@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_a_decoded_token_waits_once_in_eight_and_takes_no_more_kernels_than_stock(name, counted):
    tokens = counted["tokens"][name]
    assert not isinstance(tokens, str), tokens
    assert tokens["same"]  # as on CPU, where transformers makes the masks by itself
    assert tokens["ours"]["waits"] == 1, "in eight tokens"
    assert tokens["stock"]["waits"] >= 8  # so that the count sees what it is there for
    assert tokens["ours"]["kernels"] <= tokens["stock"]["kernels"]
    assert tokens["around a graph"]["waits"] == 1, "in eight tokens"
    assert tokens["around a graph"]["kernels"] < 25  # sampling, and what the graph reads
