"""common/batches.py: rows of a batch, and the micro-batches of single forwards."""

import types

import pytest
import torch
from accelerate import Accelerator

from common.batches import micro_batches, split_rollout, take_rows
from small_models import random_batch


def test_take_rows_cuts_shared_padding_and_keeps_every_token():
    batch = random_batch(rows=8)
    part = take_rows(batch | {"advantages": torch.arange(8.0)[:, None]}, [5, 2])
    assert part["advantages"][:, 0].tolist() == [5.0, 2.0]
    for i, row in enumerate([5, 2]):
        for ids, mask in (("prompts", "prompt_mask"), ("completions", "completion_mask")):
            assert part[ids][i][part[mask][i]].tolist() == batch[ids][row][batch[mask][row]].tolist()
    assert part["prompt_mask"][:, 0].any() and part["completion_mask"][:, -1].any()
    assert part["loss_mask"].shape == part["completion_mask"].shape


@pytest.mark.parametrize("size, tokens", [(3, 0), (100, 0), (1, 0), (64, 20), (64, 1), (64, 10_000)])
def test_micro_batches_hold_every_row_once_within_their_budget(size, tokens):
    generator = torch.Generator().manual_seed(size + tokens)
    lengths = torch.randint(1, 12, (23, 2), generator=generator).tolist()
    parts = micro_batches(list(range(len(lengths))), lengths, size, tokens)
    assert sorted(row for part in parts for row in part) == list(range(23))
    for part in parts:
        padded = len(part) * (max(lengths[r][0] for r in part) + max(lengths[r][1] for r in part))
        assert len(part) == 1 or (padded <= tokens if tokens else len(part) <= size)


def test_the_totals_count_rows_and_tokens_by_the_loss_mask():
    # docs/dapo.md: what the overlong filter takes out of the loss leaves the rows, the prompts and their groups alone.
    batch = random_batch(rows=12)
    in_loss = torch.tensor([1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    kept = batch["loss_mask"] = batch["completion_mask"] & in_loss[:, None]
    args = types.SimpleNamespace(group_size=2, num_minibatches=2, micro_batch_size=8, micro_batch_tokens=0)
    tokens = kept.sum(dim=1).tolist()
    minibatches = split_rollout(Accelerator(cpu=True), batch, args)
    for start, (micro,) in zip((0, 6), minibatches, strict=True):
        totals = micro["totals"]
        groups = [sum(tokens[i : i + 2]) for i in range(start, start + 6, 2)]
        assert (totals["tokens"], totals["rows"], totals["prompts"]) == (sum(groups), 6, 3)
        assert sorted(totals["group_tokens"][:, 0].tolist()) == sorted(2 * groups)
