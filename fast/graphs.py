"""The forward of one sampled token as a CUDA graph.

On a GPU, a token takes as long as Python needs to launch its thousand kernels. A graph records the
launches once, and replays them in a fraction of the time, at the same memory addresses. So keys and
values must stay in place: attention reads all columns of a cache of fixed capacity, and the mask
hides the unwritten ones. When the cache changes its shape (more columns, fewer rows; up to about
ten times per rollout), the next token runs eagerly and is recorded again. Graphs are freed at the
end of their rollout, since an update makes them stale. On a CPU, the same code runs without
recording, which lets the tests check it.
"""

import contextlib
import functools
import logging
import math
import warnings

import torch
from transformers.cache_utils import DynamicLayer

from common.run import one_line

MIN_TOKENS = 16  # do not record for fewer: recording costs about seven eager tokens
MIN_GROWTH = 256  # add at least this many columns to a full cache
FILLER = 100.0  # fills unwritten columns, so that a model that attends to one fails the check


class GraphDecodeStep:
    """Run the model on one more token of each of the R = B * n rows, by replaying a CUDA graph.

    `forward` returns the logits (R, V). `cache` and `mask` (B, P) belong to the prompts,
    `position_ids` (B, 1) to the first new tokens.
    """

    failure = None  # why recording failed in the last rollout, if it did

    def __init__(self, forward, cache, mask, position_ids, n, max_new_tokens, dtype):
        GraphDecodeStep.failure = None
        self.forward = forward
        self.cache = cache
        self.tokens_left = max_new_tokens
        self.column = mask.shape[1]  # where the next token goes in the cache
        self.column_index = torch.tensor([self.column], device=mask.device)  # its copy on the GPU
        self.end = self.column + max_new_tokens
        capacity = self.next_capacity()
        self.mask = mask.new_ones(len(mask) * n, capacity)
        self.mask[:, : self.column] = mask.repeat_interleave(n, dim=0)
        self.position_ids = position_ids.repeat_interleave(n, dim=0)
        self.tokens = torch.zeros_like(self.position_ids)
        self.graph = None
        self.logits = None  # output of the graph; None if there is no graph for this cache
        self.pool = None
        self.layers = []
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer) and layer.is_initialized:  # vision layers stay empty
                cache.layers[i] = StaticCacheLayer(
                    layer, n, self.column_index, self.column, capacity, dtype or layer.keys.dtype
                )
                self.layers.append(cache.layers[i])

    def __call__(self, tokens):
        """Return the logits (R, V) after `tokens` (R, 1)."""
        if self.column == self.mask.shape[1]:
            self.grow()
        self.tokens.copy_(tokens)
        if self.logits is not None:
            self.graph.replay()
            logits = self.logits
        elif tokens.is_cuda and self.tokens_left >= MIN_TOKENS and GraphDecodeStep.failure is None:
            logits = self.run_and_record()
        else:
            logits = self.run()
        self.column += 1
        self.tokens_left -= 1
        self.column_index += 1
        self.position_ids += 1
        return logits

    def run(self):
        return self.forward(
            input_ids=self.tokens, attention_mask=self.mask, position_ids=self.position_ids
        )

    # --- the shape of the cache ---

    def next_capacity(self):
        """Return the next capacity of the cache: half as many columns more, a multiple of 16."""
        capacity = min(self.end, self.column + max(MIN_GROWTH, self.column // 2))
        return math.ceil(capacity / 16) * 16  # kernels prefer multiples of 16

    def grow(self):
        """Add columns to a full cache."""
        capacity = self.next_capacity()
        mask = self.mask.new_ones(len(self.mask), capacity)
        mask[:, : self.column] = self.mask
        self.replace(mask, lambda x: repeat_and_pad(x, 1, 0, capacity))

    def select(self, rows):
        """Keep only the given rows."""
        self.position_ids = self.position_ids[rows]
        self.tokens = self.tokens[rows]
        self.replace(self.mask[rows], lambda x: x[rows])

    def replace(self, mask, function):
        """Replace the mask, apply `function` to keys and values, and drop the graph."""
        self.mask = mask
        self.logits = None
        for layer in self.layers:
            layer.keys = function(layer.keys)
            layer.values = function(layer.values)

    def close(self):
        """Free the cache and the graphs' memory pool, which nothing else can use."""
        self.graph = self.logits = None
        self.pool = None  # after the graphs that use it
        self.layers.clear()
        self.cache.layers.clear()

    # --- recording ---

    def run_and_record(self):
        """Return the logits of this token, and record a graph for the next ones.

        The model first runs eagerly, and torch raises a RuntimeError if it syncs with the GPU.
        """
        stream = recording_stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                with synchronizing_is_an_error():
                    logits = self.run()
                self.record()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        return logits

    def record(self):
        """Record the forward of a token; if that fails, finish this rollout without graphs.

        `torch.cuda.graph` would sync and empty the allocator's cache. The graph gets its own copy
        of the generator's state, so that sampling outside is not affected. Other threads (NCCL's)
        are not restricted.
        """
        device = self.column_index.device.index
        generator = torch.cuda.default_generators[device]
        state = generator.graphsafe_get_state()
        if self.pool is None:
            self.pool = torch.cuda.MemPool()
        uses = self.pool.use_count()
        graph = torch.cuda.CUDAGraph()
        generator.graphsafe_set_state(state.clone_state())
        try:
            graph.capture_begin(pool=self.pool.id, capture_error_mode="thread_local")
            try:
                self.logits = self.run()
            finally:
                graph.capture_end()
        except Exception as error:  # a model may raise anything, and memory may run out
            self.logits = None
            abandon_recording(graph, self.pool, device, uses)
            GraphDecodeStep.failure = one_line(error.__context__ or error)
            log = logging.getLogger(__name__)
            log.warning("this rollout uses no CUDA graphs: %s", GraphDecodeStep.failure)
        else:
            self.graph = graph  # assigned last: the new graph reuses the old one's memory
        generator.graphsafe_set_state(state)


class StaticCacheLayer(DynamicLayer):
    """A cache layer of fixed capacity: `update` writes a token to the column `column_index` (1,).

    The first `width` columns hold the prompts.
    """

    # Otherwise transformers drops an all-true mask, and nothing hides the unwritten columns.
    is_compileable = True

    def __init__(self, layer, n, column_index, width, capacity, dtype):
        self.__dict__.update(layer.__dict__)
        self.column_index = column_index
        start = width - layer.keys.shape[2]  # a sliding window has dropped earlier columns
        self.keys = repeat_and_pad(layer.keys.to(dtype), n, start, capacity)
        self.values = repeat_and_pad(layer.values.to(dtype), n, start, capacity)

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys.index_copy_(2, self.column_index, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column_index, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_seq_length(self):
        return self.column_index[0]  # a tensor, so that each replay recomputes the masks

    def get_mask_sizes(self, query_length):
        return self.keys.shape[2], 0


def repeat_and_pad(x, n, start, capacity):
    """Repeat each row of `x` (B, H, S, D) n times: (B * n, H, capacity, D), from column `start`."""
    rows, heads, length, size = x.shape
    padded = x.new_full((rows, n, heads, capacity, size), FILLER)
    padded[:, :, :, start : start + length] = x[:, None]
    return padded.flatten(0, 1)


@functools.cache
def recording_stream():
    """Return the stream that records all graphs: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def synchronizing_is_an_error():
    """Make torch raise an error where the program would sync with the GPU.

    A forward that syncs cannot be recorded, and a recording that fails there leaves the allocator
    in a broken state.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def abandon_recording(graph, pool, device, uses):
    """Detach a failed recording of `graph` from `pool`, whose use count before it was `uses`."""
    if torch.__version__ < "2.13":
        # `capture_end` raises before it closes the pool. The allocator would then never free cached
        # memory again, as if a graph were being recorded, and would abort when the pool is deleted.
        with contextlib.suppress(RuntimeError):  # already closed if the recording failed early
            torch._C._cuda_endAllocateToPool(device, pool.id)
    graph.reset()
    while pool.use_count() > uses:  # up to torch 2.13.0 `reset` releases it only after a success
        torch._C._cuda_releasePool(device, pool.id)
