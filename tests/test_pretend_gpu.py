"""Whole steps of every script on a pretend GPU (helpers/pretend_gpu.py): no mixed devices, few waits."""

import json

import pytest

from processes import run_processes
from testbed import ALL, ONLY


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Return the counts of pretend_worker.py, a subprocess because the device's switches are process-wide."""
    file = tmp_path_factory.mktemp("pretended") / "counted.json"
    result = run_processes("tests/helpers/pretend_worker.py", file)
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text(encoding="utf-8"))


def test_pretend_device_counts_waits(counted):
    kinds = counted["kinds"]
    assert kinds["waits"] == dict.fromkeys(kinds["waits"], 1) and "boolean index" in kinds["waits"]
    assert kinds["no waits"] == dict.fromkeys(kinds["no waits"], 0)
    assert all("gpu:0" in str(error) for error in kinds["mixes"].values()), kinds["mixes"]


@pytest.mark.parametrize("name", ALL)
def test_update_does_not_wait_for_tokens(name, counted):
    """A loop over tokens that fetches numbers would show: a micro-batch has 8 rows of 6 tokens."""
    updates = counted["updates"][name]
    assert not isinstance(updates, str), updates
    one, four = (sum(number for *_, number in waits) for waits in updates)
    limit, of_micro_batch = (89, 50) if ONLY else (64, 36)  # a fork may have more forwards
    assert 0 < one <= limit, f"an update waits {one} times for the device, at most {limit} expected: {updates[0]}"
    more = (four - one) / 3
    assert more <= of_micro_batch, (
        f"{more:g} waits for each further micro-batch, at most {of_micro_batch}: {updates[1]}"
    )
