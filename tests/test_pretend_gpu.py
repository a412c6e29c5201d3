"""Whole steps of every script on the pretend GPU (tools/pretend_gpu.py): no mix of devices, few waits."""

import json

import pytest

from processes import run_processes
from testbed import ALL

pytestmark = pytest.mark.beside("tools")
# Phases of a step, named by the function that `main` calls, in which completions are sampled, scored, or evaluated.
# All others are the update and its metrics.
SAMPLING = {"sample_and_score", "dynamic_sampling", "make_pairs", "with_reference", "evaluate", "evaluate_pairs"}


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


@pytest.mark.parametrize("name", ALL)
def test_a_step_mixes_no_devices_and_its_update_waits_for_no_token(name, counted):
    """A loop over tokens that fetches numbers would show: a micro-batch has 8 rows of 6 tokens."""
    steps = counted["steps"][name]
    assert not isinstance(steps, str), steps
    waits = [[wait for wait in step if wait[0] not in SAMPLING] for step in steps]
    one, four = (sum(number for *_, number in step) for step in waits)
    assert 0 < one <= 100, waits[0]
    assert four <= one + 3 * 40, waits[1]
