"""The hidden states of a micro-batch in one pass without padding, each prompt once: to be skipped at a first reading.

On a GPU in bfloat16 this takes the place of `Backbone.plain_states`, with the same result up to rounding. The tokens
lie in one row (1, N): the distinct prompts, then the completions without their last token, which predicts nothing. A
prompt attends to itself, a completion to its prompt and to itself: the keys of each of these sequences are gathered by
an index, through which the gradient flows back, and `varlen_attn` of torch takes the lengths of queries and keys."""

import inspect
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn

from common.batches import to_device
from common.shared_prompts import rows_on_host, token_places

# From torch 2.12 on it takes fewer heads of keys than of queries. To ask in each layer would take longer than a kernel.
TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Layout(NamedTuple):
    """Where the sequences of a packed row are."""

    keys: torch.Tensor  # (M,): of each sequence in turn, where its keys lie in the row
    query_ends: torch.Tensor  # (S + 1,) int32: 0, and where the queries of each sequence end
    key_ends: torch.Tensor  # (S + 1,) int32: the same among the M keys
    longest_query: int  # tokens
    longest_key: int


def packed_states(lm, batch):
    """[(rows, columns, hidden)] as `Backbone.plain_states` returns it; a span is (start, length)."""
    index, lengths = rows_on_host(batch)
    first = {}  # the first row of each distinct prompt
    for row, i in enumerate(index):
        first.setdefault(i, row)
    prompts, completions = [lengths[row][0] for row in first.values()], [n for _, n in lengths]
    ends = [*accumulate([0, *prompts, *(n - 1 for n in completions)])]
    spans = [*zip(ends, [*prompts, *(n - 1 for n in completions)], strict=False)]
    own = spans[len(prompts) :]
    of = dict(zip(first, spans, strict=False))  # the span of a prompt in the packed row
    sequences = [[span] for span in of.values()] + [[of[i], span] for i, span in zip(index, own, strict=True)]
    sequences = [sequence for sequence in sequences if sequence[-1][1]]  # a completion of one token has no query

    P, T = batch["prompts"].shape[1], batch["completions"].shape[1]
    sources = [(row * P + P - n, n) for row, n in zip(first.values(), prompts, strict=True)]
    sources += [(len(index) * P + row * T, n - 1) for row, n in enumerate(completions)]
    positions = [(0, n) for n in prompts] + [(prompt, n - 1) for prompt, n in lengths]
    predicting = [each for i, span in zip(index, own, strict=True) for each in ((sum(of[i]) - 1, 1), span)]
    query_lengths = [sequence[-1][1] for sequence in sequences]
    key_lengths = [sum(n for _, n in sequence) for sequence in sequences]
    parts = [places(sources), places(positions), places(predicting), places([x for each in sequences for x in each])]
    parts += [torch.tensor([0, *accumulate(x)]) for x in (query_lengths, key_lengths)]
    moved = to_device(torch.cat(parts), batch["prompts"].device)  # at once
    sources, positions, predicting, keys, *ends = moved.split([len(part) for part in parts])

    ids = torch.cat([batch["prompts"].reshape(-1), batch["completions"].reshape(-1)])[sources]
    outputs = lm.base_model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=ids.new_ones(1, 1, 1, 1, dtype=torch.bool),  # 4D: taken as it is, and not looked at
        use_cache=False,
        packed=Layout(keys, *(end.int() for end in ends), max(query_lengths), max(key_lengths)),
    )
    return [(*token_places(completions, ids.device), outputs.last_hidden_state[0][predicting])]


def places(spans):
    """All places in spans [(start, length)], one span after the other (N,)."""
    starts, lengths = torch.tensor(spans).unbind(dim=1)
    return torch.arange(lengths.sum()) + (starts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)


def attend(query, key, value, layout, scale=None, window=None):
    """Attention (1, N, H, D) of queries (1, H, N, D) to keys and values (1, K, N, D), causal within each sequence, of
    which the queries are the last tokens. `window`: how many tokens a query sees, itself included."""
    query, heads = query[0].transpose(0, 1), key.shape[1]
    both = torch.cat([key[0], value[0]]).transpose(0, 1)[layout.keys]  # (M, 2 K, D)
    key, value = both.split(heads, dim=1)
    options = dict(scale=scale, window_size=(window - 1 if window else -1, 0))
    if TAKES_GROUPED_HEADS:
        options["enable_gqa"] = True
    else:
        key, value = (x.repeat_interleave(query.shape[1] // heads, dim=1) for x in (key, value))
    device = query.device.type  # in autocast rotary positions leave float32
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = (x.to(dtype).contiguous() for x in (query, key, value))
    return varlen_attn(query, key, value, *layout[1:], **options)[None]


def let_sdpa_take_layouts():
    """Let transformers' attention "sdpa" take a `packed` layout; without one it is what it was. Nothing is switched, so
    that a backward pass which computes again (gradient checkpointing) does the same."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if hasattr(stock, "takes_layouts"):
        return

    def sdpa(module, query, key, value, attention_mask, packed=None, scaling=None, **options):
        if packed is None:
            return stock(module, query, key, value, attention_mask, scaling=scaling, **options)
        return attend(query, key, value, packed, scaling, options.get("sliding_window")), None

    sdpa.takes_layouts = True
    ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)
