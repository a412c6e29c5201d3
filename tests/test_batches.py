"""common/batches.py: rows and groups of a batch, minibatches and micro-batches."""

import types

import pytest
import torch

from common.batches import Completion, Samples, join_groups, split_rollout, take_group, take_rows
from harness.data import Prompt
from small_models import random_batch
from small_run import samples_of
from threads import Processes


def test_take_rows_cuts_shared_padding_and_keeps_every_token():
    batch = random_batch(rows=8)
    part = take_rows(batch | {"advantages": torch.arange(8.0)[:, None]}, [5, 2])
    assert part["advantages"][:, 0].tolist() == [5.0, 2.0]
    for i, row in enumerate([5, 2]):
        for ids, mask in (("prompts", "prompt_mask"), ("completions", "completion_mask")):
            assert part[ids][i][part[mask][i]].tolist() == batch[ids][row][batch[mask][row]].tolist()
    assert part["prompt_mask"][:, 0].any() and part["completion_mask"][:, -1].any()
    assert part["loss_mask"].shape == part["completion_mask"].shape


def split(batch, processes=1, **sizes):
    """Return the minibatches of each process, of which rank r of W has the r-th run of rows."""
    args = types.SimpleNamespace(**{"group_size": 2, "num_minibatches": 1, "micro_batch_size": 8} | sizes)
    rows = len(batch["loss_mask"]) // processes

    def one_process(accelerator):
        share = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)
        own = {name: column[share] for name, column in batch.items()}
        return split_rollout(accelerator, own, args)

    return Processes(processes).run(one_process)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_micro_batches_hold_every_row_once(size, shared):
    batch = random_batch(rows=24) | {"row": torch.arange(24)[:, None]}
    if shared:
        batch["prompt_index"] = batch["row"] // 2
    ((minibatch,),) = split(batch, micro_batch_size=size)
    assert all(len(micro["row"]) <= size for micro in minibatch)
    rows = [row for micro in minibatch for row in micro["row"][:, 0].tolist()]
    assert sorted(rows) == list(range(24))
    lengths = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)).tolist()
    # Rows of one prompt stay adjacent, others are sorted by length.
    assert rows == (list(range(24)) if shared else sorted(range(24), key=lambda row: lengths[row]))


def test_minibatches_are_equal_runs_of_rows_in_the_order_of_the_draw():
    batch = random_batch(rows=24) | {"row": torch.arange(24)[:, None]}
    (minibatches,) = split(batch, num_minibatches=3, micro_batch_size=3)
    rows = [sorted(row for micro in minibatch for row in micro["row"][:, 0].tolist()) for minibatch in minibatches]
    assert rows == [list(range(8)), list(range(8, 16)), list(range(16, 24))]


def test_the_totals_count_rows_and_tokens_by_the_loss_mask():
    # docs/dapo.md: what the overlong filter takes out of the loss leaves the rows and the prompts alone.
    batch = random_batch(rows=12)
    in_loss = torch.tensor([1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    batch["loss_mask"] = batch["completion_mask"] & in_loss[:, None]
    tokens = batch["loss_mask"].sum(dim=1).tolist()
    (minibatches,) = split(batch, num_minibatches=2)
    for start, (micro,) in zip((0, 6), minibatches, strict=True):
        assert micro["totals"] == {"tokens": sum(tokens[start : start + 6]), "rows": 6, "prompts": 3}


def test_all_processes_get_equally_many_micro_batches_and_the_totals_of_all():
    """Of two processes with 4 and 2 rows in the loss. FSDP2 waits for the forward that one of them does not make."""
    batch, accelerators = random_batch(rows=6), Processes(2)
    args = types.SimpleNamespace(group_size=2, num_minibatches=1, micro_batch_size=1)

    def one_process(accelerator):
        rows = slice(0, 4) if accelerator.process_index == 0 else slice(4, 6)
        return split_rollout(accelerator, {name: column[rows] for name, column in batch.items()}, args)

    (long,), (short,) = accelerators.run(one_process)
    assert len(long) == len(short) == 4
    assert [bool(micro["loss_mask"].any()) for micro in short] == [True, True, False, False]
    totals = {"tokens": int(batch["loss_mask"].sum()), "rows": 6, "prompts": 3}
    assert all(micro["totals"] == totals for micro in long + short)


def test_a_step_without_a_token_in_the_loss_divides_by_1():
    batch = random_batch(rows=4)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    (((micro,),),) = split(batch)
    assert micro["totals"]["tokens"] == 1


# --- groups ---


def three_groups():
    """Return `Samples` of three prompts of 1, 2 and 3 tokens, with two completions of 1 to 6 tokens each."""
    lengths = torch.tensor([[1], [2], [3], [4], [5], [6]])
    prompt_lengths = torch.tensor([[1], [1], [2], [2], [3], [3]])
    batch = {
        "prompts": torch.arange(18).view(6, 3),
        "prompt_mask": torch.arange(3) >= 3 - prompt_lengths,
        "completions": 100 + torch.arange(36).view(6, 6),
        "completion_mask": torch.arange(6) < lengths,
        "truncated": torch.tensor([True, False, False, True, False, True]),
        "rollout_logprobs": -torch.arange(36.0).view(6, 6),
        "prompt_index": torch.arange(3).repeat_interleave(2)[:, None],
    }
    return Samples(
        batch,
        [Prompt([i], f"prompt {i}", "1") for i in range(3)],
        [Completion(f"text {i}", [i], False) for i in range(6)],
        torch.arange(6.0),
        {"accuracy": torch.arange(6.0), "own": -torch.arange(6.0)},
    )


def valid(samples, name, mask):
    """Return the values of each row where the mask is true."""
    return [row[keep].tolist() for row, keep in zip(samples.batch[name], samples.batch[mask], strict=True)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_groups_that_are_taken_and_joined_keep_their_rows_and_no_padding(order):
    """Groups of other widths, as those of several rounds of dapo.py, in any order."""
    samples = three_groups()
    joined = join_groups([take_group(samples, i) for i in order])
    rows = [row for i in order for row in (2 * i, 2 * i + 1)]
    assert joined.batch.keys() == samples.batch.keys()
    for name in ("prompts", "completions", "rollout_logprobs"):
        mask = "prompt_mask" if name == "prompts" else "completion_mask"
        before = valid(samples, name, mask)
        assert valid(joined, name, mask) == [before[row] for row in rows]
    assert joined.batch["prompts"].shape == (len(rows), max(order) + 1)
    assert joined.batch["completions"].shape == (len(rows), max(rows) + 1)
    assert joined.batch["completion_mask"].sum(dim=1).tolist() == [row + 1 for row in rows]
    assert joined.batch["prompt_mask"][:, -1].all() and joined.batch["completion_mask"][:, 0].all()  # the sides
    assert joined.batch["truncated"].tolist() == samples.batch["truncated"][rows].tolist()
    assert joined.batch["prompt_index"][:, 0].tolist() == [i // 2 for i in range(len(rows))]
    assert joined.rewards.tolist() == joined.reward_terms["accuracy"].tolist() == rows
    assert joined.reward_terms["own"].tolist() == [-row for row in rows]
    assert [prompt.prompt for prompt in joined.prompts] == [f"prompt {i}" for i in order]
    assert [completion.text for completion in joined.completions] == [f"text {row}" for row in rows]


# --- rewards ---


def test_a_row_is_scored_if_some_term_applies_to_it():
    nan = float("nan")
    samples = samples_of([0.5] * 4, a=[1, nan, nan, 0], b=[nan, 2, nan, 0])
    assert samples.is_scored.tolist() == [True, True, False, True]
