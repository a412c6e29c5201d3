"""Micro-batches: `trim_rows` of common/masked.py and `split` of the scripts, which is grpo.py's in all of them."""

import pytest
import torch

import grpo
from common.masked import trim_rows
from small_models import random_batch
from small_run import samples_of
from threads import Processes


def test_trim_rows_keeps_every_token():
    batch = random_batch(rows=8)
    part = trim_rows(batch | {"advantages": torch.arange(8.0)[:, None], "truncated": torch.arange(8)}, [5, 2])
    assert part["advantages"][:, 0].tolist() == part["truncated"].tolist() == [5, 2]
    for i, row in enumerate([5, 2]):
        for ids, mask in (("prompts", "prompt_mask"), ("completions", "completion_mask")):
            assert part[ids][i][part[mask][i]].tolist() == batch[ids][row][batch[mask][row]].tolist()
    assert part["prompt_mask"][:, 0].any() and part["completion_mask"][:, -1].any()
    assert part["loss_mask"].shape == part["completion_mask"].shape


def split(batch, rows=None, processes=1, **sizes):
    """Return (micro-batches, totals) of each process; rank r of W has the r-th slice of rows."""
    args = grpo.Args(**{"group_size": 2, "micro_batch_size": 8} | sizes)
    share = len(batch["loss_mask"]) // processes

    def one_process(accelerator):
        start = accelerator.process_index * share
        own = {name: column[start : start + share] for name, column in batch.items()}
        return grpo.split(accelerator, own, list(range(share)) if rows is None else rows, args)

    return Processes(processes).run(one_process)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_micro_batches_cover_all_rows_once(size, fast):
    """They are sorted by length; fast/ packs, and keeps the rows of a prompt together."""
    batch, rows = random_batch(rows=24), list(range(2, 24))
    batch["row"] = torch.arange(24)[:, None]
    ((micro_batches, _),) = split(batch, rows, micro_batch_size=size, fast=fast)
    assert all(len(micro["row"]) <= size for micro in micro_batches)
    found = [row for micro in micro_batches for row in micro["row"][:, 0].tolist()]
    lengths = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)).tolist()
    assert found == (rows if fast else sorted(rows, key=lambda row: lengths[row]))


@pytest.mark.parametrize("processes", [1, 2])
def test_totals_count_the_whole_step(processes):
    """docs/dapo.md: the overlong filter removes tokens from the loss, but no rows or prompts."""
    batch = random_batch(rows=12)
    batch["loss_mask"] = batch["completion_mask"] & (torch.arange(12) % 5 > 0)[:, None]
    for micro_batches, totals in split(batch, processes=processes, micro_batch_size=4):
        assert totals == {"tokens": int(batch["loss_mask"].sum()), "rows": 12, "prompts": 6}
        assert len(micro_batches) == {1: 3, 2: 2}[processes]


def test_empty_loss_mask_divides_by_1():
    batch = random_batch(rows=4)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    ((_, totals),) = split(batch)
    assert totals["tokens"] == 1


def test_scored_rows_have_a_term():
    nan = float("nan")
    samples = samples_of([0.5] * 4, a=[1, nan, nan, 0], b=[nan, 2, nan, 0])
    assert samples.is_scored.tolist() == [True, True, False, True]
    assert samples.loss_mask.any(dim=1).tolist() == [True, True, False, True]
