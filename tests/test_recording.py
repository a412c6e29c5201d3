"""How fast/graphs.py records a token on a fake GPU: its calls of torch, and what it leaves behind."""

import contextlib
import types
from typing import ClassVar

import pytest
import torch
from torch.torch_version import TorchVersion
from transformers import DynamicCache

import fast.graphs
from fast.graphs import MIN_TOKENS, GraphDecodeStep


class Pool:
    """`torch.cuda.MemPool`: deleting it while torch believes that a recording runs aborts the process."""

    id = (0, 7)

    def __init__(self):
        Card.uses = 1

    def use_count(self):
        return Card.uses

    def __del__(self):
        Card.uses -= 1
        Card.freed = Card.uses == 0 and not Card.recording


class Graph:
    """`torch.cuda.CUDAGraph` of the torch version that is faked."""

    def __init__(self):
        self.ended = self.used = False

    def capture_begin(self, pool, capture_error_mode):
        assert pool == Pool.id and capture_error_mode == "thread_local"
        Card.begun += 1
        Card.recording = self.used = True
        Card.uses += 1

    def capture_end(self):
        if Card.spoilt and torch.__version__ < "2.13":
            raise torch.AcceleratorError("operation failed due to a previous error during capture")
        Card.recording = False
        if Card.spoilt:
            raise torch.AcceleratorError("operation failed due to a previous error during capture")
        self.ended = True

    def replay(self):
        Card.replays += 1

    def reset(self):
        if self.used and (self.ended or torch.__version__ > "2.13.0+cpu"):
            self.used = False
            Card.uses -= 1

    __del__ = reset


class Card:
    """The state of the fake GPU and of torch's allocator."""

    begun, replays, uses, recording, spoilt, freed, mode = 0, 0, 0, False, False, False, 0
    modes: ClassVar = {"default": 0, "warn": 1, "error": 2}

    @classmethod
    def wait(cls):
        """Do what `.item()` does."""
        if cls.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if cls.recording:
            cls.spoilt = True
            raise torch.AcceleratorError("operation not permitted when stream is capturing")

    @classmethod
    def set_mode(cls, mode):
        cls.mode = cls.modes.get(mode, mode)

    @classmethod
    def end(cls, device, pool):
        if not cls.recording:
            raise RuntimeError("not currently recording to mempool_id")
        cls.recording = False

    @classmethod
    def release(cls, device, pool):
        cls.uses -= 1
        assert cls.uses >= 0


@pytest.fixture
def card(monkeypatch):
    for name, value in dict(begun=0, replays=0, uses=0, recording=False, spoilt=False, freed=False, mode=1).items():
        monkeypatch.setattr(Card, name, value)
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    state = types.SimpleNamespace(clone_state=lambda: "a copy")
    drawn = [state]
    generator = types.SimpleNamespace(graphsafe_get_state=lambda: drawn[-1], graphsafe_set_state=drawn.append)
    pretended = dict(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
        default_generators={None: generator},
        get_sync_debug_mode=lambda: Card.mode,
        set_sync_debug_mode=Card.set_mode,
        CUDAGraph=Graph,
        MemPool=Pool,
    )
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", Card.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", Card.release, raising=False)
    monkeypatch.setattr(fast.graphs, "recording_stream", lambda: stream)
    yield Card
    assert Card.mode == 1 and drawn[-1] is state  # as before


def rollout(forward):
    """Return a `GraphDecodeStep` on the fake GPU."""
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    mask, position_ids = torch.ones(2, 3).long(), torch.full((2, 1), 3)
    return GraphDecodeStep(forward, cache, mask, position_ids, 1, 4 * MIN_TOKENS, None)


def sampled(token):
    """Record one more token, replay it if that worked, and free everything."""
    logits = token.run_and_record()
    recorded = token.logits is not None
    if recorded:
        token(torch.zeros(2, 1).long())
    token.close()
    return logits, recorded


def test_a_recorded_token_is_replayed_and_its_memory_goes_with_the_rollout(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("all of the allocator's memory went"))
    assert sampled(rollout(lambda **inputs: "logits")) == ("logits", True)
    assert (card.begun, card.replays) == (1, 1) and card.freed
    assert not GraphDecodeStep.failure


def test_a_forward_that_waits_is_never_recorded(card):
    """A recording that fails there would leave the allocator in a broken state."""
    with pytest.raises(RuntimeError, match="synchronizing"):
        sampled(rollout(lambda **inputs: card.wait()))
    assert card.begun == 0


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.14.0"])
def test_after_a_failed_recording_the_allocator_is_as_before(version, card, monkeypatch, caplog):
    """In torch 2.11 and 2.12 it would believe that a recording never ended, and free nothing anymore."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))

    def fails(**inputs):
        if card.recording:
            card.spoilt = True
            raise torch.AcceleratorError("operation not permitted when stream is capturing")
        return "logits"

    assert sampled(rollout(fails)) == ("logits", False)
    assert card.begun == 1 and not card.recording and card.freed
    assert "not permitted when stream is capturing" in GraphDecodeStep.failure
    assert caplog.text.count("this rollout uses no CUDA graphs") == 1


def test_memory_that_is_short_ends_the_graphs_of_that_rollout_alone(card):
    short = [True, False]

    def forward(**inputs):
        if card.recording and short[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "logits"

    assert not sampled(rollout(forward))[1] and GraphDecodeStep.failure
    short.pop(0)
    assert sampled(rollout(forward))[1] and not GraphDecodeStep.failure
