"""Learning rates against transformers' schedules."""

import pytest
import torch
from transformers import get_scheduler

from harness.args import learning_rate
from testbed import script

LAST = 50


def rates(scheduler, warmup, last=LAST, **more):
    args = script("grpo").Args(learning_rate=2.0, lr_scheduler=scheduler, warmup_steps=warmup, max_steps=LAST)
    return [learning_rate(step, args, **more) for step in range(last)]


def rates_of_transformers(scheduler, warmup, last=LAST):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    name = "constant_with_warmup" if scheduler == "constant" else scheduler
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=last)
    found = []
    for _ in range(last):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, LAST - 1])
@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_after_the_warm_up_the_rates_are_those_of_transformers(scheduler, warmup):
    found, expected = rates(scheduler, warmup), rates_of_transformers(scheduler, warmup)
    assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    # Transformers start at 0, which would waste the first rollout: here the warm-up is one step ahead.
    assert found[:warmup] == pytest.approx(expected[1 : warmup + 1], abs=1e-12)


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_decay_ends_at_the_last_step_of_the_run(scheduler):
    """dpo.py and reward_model.py end with their pairs, whatever --max_steps says."""
    found = rates(scheduler, 2, last=20, last_step=20)
    assert found[:2] == [1.0, 2.0] and 0 < found[-1] < 0.3
    assert found[2:] == pytest.approx(rates_of_transformers(scheduler, 2, 20)[2:], abs=1e-12)
