import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch):
    """Accelerate keeps its state in singletons; each test starts without. One thread: the models here are tiny."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
