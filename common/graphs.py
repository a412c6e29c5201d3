"""The forward of one token as a CUDA graph: to be skipped at a first reading.

On a GPU a decoded token takes as long as Python needs to launch its thousand kernels. A graph records the launches, and
replays them in a fraction of that time at the same addresses. So keys and values stay in place, and attention gets all
columns of the cache, of which the mask hides those to come. When the cache changes its shape (more columns, fewer rows;
up to some ten times in a rollout), the next token runs as usual and is recorded. Graphs die with their rollout, before
an update makes them stale. On a CPU the same tokens run over the same tensors unrecorded: so the tests see them."""

import contextlib
import functools

import torch
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from common.errors import in_short

FEWEST = 16  # tokens that may follow: to record a graph takes as long as some seven tokens without one
ROOM = 256  # columns that are added, at least
FILLER = 100.0  # in columns to come: who sees one by mistake is far off, which the probe at the start finds
MOST_FAILURES = 3  # recordings that may fail one after the other; memory may be short once, and not the next time


class FixedLayer(DynamicLayer):
    """A layer of the key-value cache that stays in place: a token is written into the column `at` (1,)."""

    is_compileable = True  # else transformers leaves out a mask that is all true, and nothing hides the columns to come

    def __init__(self, layer, n, width, columns, at, dtype):
        self.__dict__.update(layer.__dict__)
        self.at, missing = at, width - layer.keys.shape[2]  # which a sliding window has forgotten
        self.keys, self.values = (widen(x.to(dtype), n, missing, columns) for x in (layer.keys, layer.values))

    def update(self, key_states, value_states, *args, **kwargs):
        for x, states in ((self.keys, key_states), (self.values, value_states)):
            x.index_copy_(2, self.at, states.to(x.dtype))
        return self.keys, self.values

    def get_seq_length(self):
        return self.at[0]  # a tensor: the masks are made of it inside the graph

    def get_mask_sizes(self, query_length):
        return self.keys.shape[2], 0


def widen(x, n, start, columns):
    """`x` (B, H, S, D) with each row n times, from column `start` of `columns`: (B * n, H, columns, D)."""
    rows, heads, length, size = x.shape
    wide = x.new_full((rows, n, heads, columns, size), FILLER)
    wide[:, :, :, start : start + length] = x[:, None]
    return wide.flatten(0, 1)


@functools.cache
def recording_stream():
    """Graphs are not recorded on the default stream; always on this one, as cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def waiting_is_an_error():
    """A context in which torch raises where the program would wait for the GPU. What waits cannot be recorded, and a
    recording that breaks off there leaves torch's allocator in disorder."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def close_pool(pool, graph, device, uses):
    """Take the failed recording of `graph` off its memory `pool`, which had so many `uses` before."""
    if torch.__version__ < "2.13":
        # There `capture_end` raises before it closes the pool. The allocator would think for ever that a graph is being
        # recorded: it would never free its cache again, and would end the process when the pool goes.
        with contextlib.suppress(RuntimeError):  # closed it is if the recording failed before its end
            torch._C._cuda_endAllocateToPool(device, pool.id)
    graph.reset()
    while pool.use_count() > uses:  # torch up to 2.13.0 gives its use back after a success alone
        torch._C._cuda_releasePool(device, pool.id)


class OneTokenByGraph:
    """Logits (R, V) of one more token of each row, in R = B * n rows. `forward(inputs)` runs the model; `cache`, `mask`
    (B, P) and `positions` (B, 1), of the next token, are those of the prompts. At most `most` tokens follow."""

    # Of the process:
    failures = 0  # recordings that failed one after the other; at MOST_FAILURES none is tried any more
    problem = None  # why the last of them failed
    replayed = False  # whether a graph was replayed in the last call of `decode` that might

    def __init__(self, forward, cache, mask, positions, n, most, dtype=None):
        self.forward, self.cache, self.left = forward, cache, most
        self.next, self.end = mask.shape[1], mask.shape[1] + most
        self.at = torch.tensor([self.next], device=mask.device)
        self.mask = mask.new_ones(len(mask) * n, self.wider())
        self.mask[:, : self.next] = mask.repeat_interleave(n, dim=0)
        self.positions = positions.repeat_interleave(n, dim=0)
        self.tokens = torch.zeros_like(self.positions)
        self.graph = self.logits = self.pool = None
        self.may_record = OneTokenByGraph.failures < MOST_FAILURES
        OneTokenByGraph.replayed = False
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer) and layer.is_initialized:  # one for images stays empty
                shape = n, self.next, self.mask.shape[1], self.at
                cache.layers[i] = FixedLayer(layer, *shape, dtype or layer.keys.dtype)
        self.layers = [layer for layer in cache.layers if isinstance(layer, FixedLayer)]

    def wider(self):
        """The columns to have once all up to the next one are full: a multiple of 16, as kernels like it."""
        return -(-min(self.end, self.next + max(ROOM, self.next // 2)) // 16) * 16

    def __call__(self, tokens):
        if self.next == self.mask.shape[1]:
            columns = self.wider()
            mask = self.mask.new_ones(len(self.mask), columns)
            mask[:, : self.next] = self.mask
            self.change(mask, lambda x: widen(x, 1, 0, columns))
        self.tokens.copy_(tokens)
        if self.logits is not None:
            self.graph.replay()
            OneTokenByGraph.replayed = True
            logits = self.logits
        else:
            record = tokens.is_cuda and self.may_record and self.left >= FEWEST
            logits = self.run_and_record() if record else self.run()
        self.next, self.left = self.next + 1, self.left - 1
        self.at += 1
        self.positions += 1
        return logits

    def run(self):
        inputs = dict(input_ids=self.tokens, attention_mask=self.mask, position_ids=self.positions)
        return self.forward(inputs | {"past_key_values": self.cache})

    def run_and_record(self):
        """The logits of this token, and a graph for the next ones, if their forward can be recorded."""
        stream = recording_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            logits = self.run_without_waiting()
            if logits is None:
                logits = self.run()
            else:
                self.record()
        torch.cuda.current_stream().wait_stream(stream)
        return logits

    def run_without_waiting(self):
        """The logits of this token, or None if the forward waits for the GPU; then no graph is recorded any more."""
        try:
            with waiting_is_an_error():
                return self.run()
        except Exception as error:  # whatever else is wrong, the next `run` raises again
            OneTokenByGraph.failures = MOST_FAILURES
            self.go_on_without(error)

    def record(self):
        """Record the forward of a token. If that fails, this rollout goes on without graphs."""
        device = self.at.device.index
        generator = torch.cuda.default_generators[device]
        # Not by `torch.cuda.graph`, which waits for the GPU and empties the allocator's cache. The graph gets a
        # state of the generator of its own: the draws go on outside. Other threads (NCCL's) do as they like.
        drawn, graph = generator.graphsafe_get_state(), torch.cuda.CUDAGraph()
        generator.graphsafe_set_state(drawn.clone_state())
        uses = None
        try:
            if self.pool is None:
                self.pool = torch.cuda.MemPool()
            uses = self.pool.use_count()
            graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
            try:
                self.logits = self.run()
            finally:
                graph.capture_end()
            self.graph = graph  # only now: the memory of the one before was used again
            OneTokenByGraph.failures, OneTokenByGraph.problem = 0, None
        except Exception as error:  # a model may raise anything, and memory may be short
            self.logits = None
            if uses is not None:
                close_pool(self.pool, graph, device, uses)
            OneTokenByGraph.failures += 1
            self.go_on_without(error.__context__ or error)
        generator.graphsafe_set_state(drawn)

    def go_on_without(self, error):
        """Record no graph in this rollout any more, and say why."""
        self.may_record = False
        OneTokenByGraph.problem = in_short(error)
        which = "this rollout goes" if OneTokenByGraph.failures < MOST_FAILURES else "sampling goes"
        why = f"the forward of a token cannot be recorded as a CUDA graph, {which} on without"
        logging.get_logger(__name__).warning(f"{why}: {OneTokenByGraph.problem}")

    def select(self, rows):
        """Go on with these rows alone."""
        self.positions, self.tokens = self.positions[rows], self.tokens[rows]
        self.change(self.mask[rows], lambda x: x[rows])

    def change(self, mask, function):
        """Another mask, and keys and values changed by `function`: what was recorded no longer fits."""
        self.mask, self.logits = mask, None
        for layer in self.layers:
            layer.keys, layer.values = function(layer.keys), function(layer.values)

    def close(self):
        """Free the cache, and the memory of the graphs, which the allocator would keep for graphs alone."""
        self.graph = self.logits = None
        self.pool = None  # after the graphs that use it: with it goes its memory, and none of the allocator's cache
        self.layers.clear()
        self.cache.layers.clear()
