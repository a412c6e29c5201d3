"""common/batches.py: rows of a batch, and the micro-batches of single forwards."""

import math
import types

import pytest
import torch
from accelerate import Accelerator

from common.batches import micro_batches, raw_lines, split_rollout, take_rows, to_device
from small_models import random_batch
from testbed import embedded


def test_take_rows_cuts_shared_padding_and_keeps_every_token():
    batch = random_batch(rows=8)
    masks = batch["prompt_mask"], batch["completion_mask"]
    batch["lengths"] = torch.stack([mask.sum(dim=1) for mask in masks], dim=1).tolist()
    part = take_rows(batch | {"advantages": torch.arange(8.0)[:, None]}, [5, 2])
    assert part["advantages"][:, 0].tolist() == [5.0, 2.0]
    assert part["lengths"] == [batch["lengths"][5], batch["lengths"][2]]
    for i, row in enumerate([5, 2]):
        for ids, mask in (("prompts", "prompt_mask"), ("completions", "completion_mask")):
            assert part[ids][i][part[mask][i]].tolist() == batch[ids][row][batch[mask][row]].tolist()
    assert part["prompt_mask"][:, 0].any() and part["completion_mask"][:, -1].any()
    assert part["loss_mask"].shape == part["completion_mask"].shape


def test_raw_lines_show_special_tokens_and_leave_out_the_middle_of_a_long_text():
    tokenizer = embedded()[2]
    stop = tokenizer.eos_token_id
    prompt, completion = raw_lines(tokenizer, [stop, *tokenizer("1+1?\n").input_ids], [*tokenizer("2").input_ids, stop])
    assert prompt.endswith(": '<eos>1+1?\\n'") and completion.endswith(": '2<eos>'")
    long, exact = (tokenizer("1" * (n // 2 - 1) + "23" + "4" * (n - n // 2 - 1)).input_ids for n in (2001, 2000))
    prompt, completion = raw_lines(tokenizer, long, exact)
    assert prompt.endswith(f": '{'1' * 999}2 [...] {'4' * 1000}'") and completion.endswith(f"{'1' * 999}23{'4' * 999}'")


@pytest.mark.parametrize("size, tokens", [(3, 0), (100, 0), (1, 0), (64, 20), (64, 1), (64, 10_000)])
def test_micro_batches_hold_every_row_once_within_their_budget(size, tokens):
    generator = torch.Generator().manual_seed(size + tokens)
    lengths = torch.randint(1, 12, (23, 2), generator=generator).tolist()
    parts = micro_batches(
        range(len(lengths)), lengths, types.SimpleNamespace(micro_batch_size=size, micro_batch_tokens=tokens)
    )
    assert sorted(row for part in parts for row in part) == list(range(23))
    for part in parts:
        padded = len(part) * (max(lengths[r][0] for r in part) + max(lengths[r][1] for r in part))
        assert len(part) == 1 or (padded <= tokens if tokens else len(part) <= size)


def test_the_totals_count_rows_by_their_reward_and_tokens_by_the_loss_mask():
    # docs/dapo.md: what the overlong filter takes out of the loss leaves the rows, the prompts and their groups alone.
    batch, nan = random_batch(rows=12), math.nan  # a row without a reward is none
    batch["rewards"] = torch.tensor([1, 0, nan, 0, nan, nan, 1, 0, 0, nan, 1, 1])
    in_loss = torch.tensor([1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    kept = batch["loss_mask"] = batch["completion_mask"] & in_loss[:, None]
    args = types.SimpleNamespace(group_size=2, num_minibatches=2, micro_batch_size=8, micro_batch_tokens=0)
    tokens = (kept.sum(dim=1) * ~batch["rewards"].isnan()).tolist()
    minibatches = split_rollout(Accelerator(cpu=True), batch, args)
    for start, ((micro,), totals), rows, prompts in zip((0, 6), minibatches, (3, 5), (2, 3), strict=True):
        groups = [sum(tokens[i : i + 2]) for i in range(start, start + 6, 2)]
        assert (totals["tokens"], totals["rows"], totals["prompts"]) == (sum(groups), rows, prompts)
        assert sorted(micro["group_tokens"][:, 0].tolist()) == sorted(2 * groups)


@pytest.mark.parametrize("kind, pinned", [("cpu", False), ("cuda", True)])
def test_a_copy_to_a_gpu_comes_from_pinned_memory(kind, pinned):
    """From other memory it waits, whatever `non_blocking` says, for what was asked of the GPU before."""
    calls = []

    class Host:
        def pin_memory(self):
            calls.append("pinned")
            return self

        def to(self, device, non_blocking):
            calls.append((device.type, non_blocking))
            return self

    to_device(Host(), torch.device(kind))
    assert calls == ["pinned"] * pinned + [(kind, True)]
