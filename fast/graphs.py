"""The forward of one token as a CUDA graph.

On a GPU a decoded token takes as long as Python needs to launch its thousand kernels. A graph
records the launches, and replays them in a fraction of that time at the same addresses. So keys and
values stay in place, and attention gets all columns of the cache, of which the mask hides those to
come. When the cache changes its shape (more columns, fewer rows; up to some ten times in a
rollout), the next token runs as usual and is recorded. Graphs die with their rollout, before an
update makes them stale. On a CPU the same tokens run over the same tensors unrecorded: so the tests
see them.
"""

import contextlib
import functools
import logging
import math
import warnings

import torch
from transformers.cache_utils import DynamicLayer

from harness.errors import one_line

FEWEST = 16  # tokens that may follow: a graph is recorded in the time of some seven without one
ROOM = 256  # columns that are added, at least
FILLER = 100.0  # in columns to come: who sees one by mistake is far off, and found at the start


class OneTokenByGraph:
    """Logits (R, V) of one more token of each row, in R = B * n rows.

    `forward` runs the model. `cache`, `mask` (B, P) and `places` (B, 1), the positions of the next
    token, are those of the prompts; at most `most` tokens follow.
    """

    problem = None  # why a recording of the last rollout failed, if one did

    def __init__(self, forward, cache, mask, places, n, most, dtype):
        OneTokenByGraph.problem = None
        self.forward = forward
        self.cache = cache
        self.left = most  # tokens that may still follow
        self.next = mask.shape[1]  # the column of the next token
        self.end = self.next + most
        self.at = torch.tensor([self.next], device=mask.device)
        columns = self.columns_to_have()
        self.mask = mask.new_ones(len(mask) * n, columns)
        self.mask[:, : self.next] = mask.repeat_interleave(n, dim=0)
        self.places = places.repeat_interleave(n, dim=0)
        self.tokens = torch.zeros_like(self.places)
        self.graph = None
        self.logits = None  # those of the graph
        self.pool = None
        self.layers = []
        for i, layer in enumerate(cache.layers):
            # A layer for images stays empty.
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                cache.layers[i] = FixedLayer(
                    layer, n, self.next, columns, self.at, dtype or layer.keys.dtype
                )
                self.layers.append(cache.layers[i])

    def __call__(self, tokens):
        if self.next == self.mask.shape[1]:
            self.add_columns()
        self.tokens.copy_(tokens)
        if self.logits is not None:
            self.graph.replay()
            logits = self.logits
        elif tokens.is_cuda and self.left >= FEWEST and OneTokenByGraph.problem is None:
            logits = self.run_and_record()
        else:
            logits = self.run()
        self.next += 1
        self.left -= 1
        self.at += 1
        self.places += 1
        return logits

    def run(self):
        return self.forward(
            input_ids=self.tokens, attention_mask=self.mask, position_ids=self.places
        )

    # --- the shape of the cache ---

    def columns_to_have(self):
        """The columns to have once those are full: a multiple of 16, as kernels like it."""
        columns = min(self.end, self.next + max(ROOM, self.next // 2))
        return math.ceil(columns / 16) * 16

    def add_columns(self):
        """Make room for more tokens."""
        columns = self.columns_to_have()
        mask = self.mask.new_ones(len(self.mask), columns)
        mask[:, : self.next] = self.mask
        self.change(mask, lambda x: widen(x, 1, 0, columns))

    def select(self, rows):
        """Go on with these rows alone."""
        self.places = self.places[rows]
        self.tokens = self.tokens[rows]
        self.change(self.mask[rows], lambda x: x[rows])

    def change(self, mask, function):
        """Another mask, other keys and values by `function`: what was recorded no longer fits."""
        self.mask = mask
        self.logits = None
        for layer in self.layers:
            layer.keys = function(layer.keys)
            layer.values = function(layer.values)

    def close(self):
        """Free the cache and the memory of the graphs, which would be kept for graphs alone."""
        self.graph = self.logits = None
        self.pool = None  # after the graphs that use it
        self.layers.clear()
        self.cache.layers.clear()

    # --- recording ---

    def run_and_record(self):
        """The logits of this token, and a graph for the next; raises if the forward waits."""
        stream = recording_stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                with waiting_is_an_error():
                    logits = self.run()
                self.record()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        return logits

    def record(self):
        """Record the forward of a token; if that fails, this rollout goes on without graphs.

        Not by `torch.cuda.graph`, which waits for the GPU and empties the allocator's cache. The
        graph gets a state of the generator of its own: the draws go on outside. Other threads
        (NCCL's) do as they like.
        """
        device = self.at.device.index
        generator = torch.cuda.default_generators[device]
        drawn = generator.graphsafe_get_state()
        if self.pool is None:
            self.pool = torch.cuda.MemPool()
        uses = self.pool.use_count()
        graph = torch.cuda.CUDAGraph()
        generator.graphsafe_set_state(drawn.clone_state())
        try:
            graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
            try:
                self.logits = self.run()
            finally:
                graph.capture_end()
        except Exception as error:  # a model may do anything, and memory may be short
            self.logits = None
            close_pool(self.pool, graph, device, uses)
            OneTokenByGraph.problem = one_line(error.__context__ or error)
            problem = OneTokenByGraph.problem
            logging.getLogger(__name__).warning("a rollout without CUDA graphs: %s", problem)
        else:
            self.graph = graph  # only now: the memory of the one before was used again
        generator.graphsafe_set_state(drawn)


class FixedLayer(DynamicLayer):
    """A layer of the cache that stays in place: a token is written into the column `at` (1,)."""

    # Else transformers leaves out a mask that is all true, and nothing hides the columns to come.
    is_compileable = True

    def __init__(self, layer, n, width, columns, at, dtype):
        self.__dict__.update(layer.__dict__)
        self.at = at
        forgotten = width - layer.keys.shape[2]  # the columns that a sliding window has forgotten
        self.keys = widen(layer.keys.to(dtype), n, forgotten, columns)
        self.values = widen(layer.values.to(dtype), n, forgotten, columns)

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.at, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.at, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self):
        return self.at[0]  # a tensor: the masks are made of it inside the graph

    def get_mask_sizes(self, query_length):
        return self.keys.shape[2], 0


def widen(x, n, start, columns):
    """`x` (B, H, S, D) with each row n times, from column `start` on: (B * n, H, columns, D)."""
    rows, heads, length, size = x.shape
    wide = x.new_full((rows, n, heads, columns, size), FILLER)
    wide[:, :, :, start : start + length] = x[:, None]
    return wide.flatten(0, 1)


@functools.cache
def recording_stream():
    """Where graphs are recorded: always on this stream, as cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def waiting_is_an_error():
    """A context in which torch raises where the program would wait for the GPU.

    What waits cannot be recorded, and a recording that breaks off there leaves torch's allocator in
    disorder.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # it tells everybody that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def close_pool(pool, graph, device, uses):
    """Take the failed recording of `graph` off its `pool`, which had so many `uses` before."""
    if torch.__version__ < "2.13":
        # There `capture_end` raises before it closes the pool. The allocator would never free its
        # cache again, as if a graph were recorded, and would end the process when the pool goes.
        with contextlib.suppress(RuntimeError):  # closed if the recording failed before its end
            torch._C._cuda_endAllocateToPool(device, pool.id)
    graph.reset()
    while pool.use_count() > uses:  # torch up to 2.13.0 gives its use back after a success alone
        torch._C._cuda_releasePool(device, pool.id)
