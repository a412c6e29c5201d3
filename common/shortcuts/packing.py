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

from common.batches import rows_on_host, to_device, token_places

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
    """Rows, columns (N,) and hidden states (N, H) as `Backbone.plain_states` returns them."""
    index, lengths = rows_on_host(batch)
    prompts, completions = lay_out(index, lengths)
    sequences = [[prompt] for prompt in prompts.values()]
    for i, completion in zip(index, completions, strict=True):
        if completion[1]:  # one of a single token has no query
            sequences.append([prompts[i], completion])
    query_lengths = [sequence[-1][1] for sequence in sequences]
    key_lengths = [sum(length for _, length in sequence) for sequence in sequences]
    parts = [
        places(token_sources(index, lengths, batch)),
        places(token_positions(index, lengths)),
        places(predicting_spans(index, prompts, completions)),
        places([span for sequence in sequences for span in sequence]),
        torch.tensor([0, *accumulate(query_lengths)]),
        torch.tensor([0, *accumulate(key_lengths)]),
    ]
    moved = to_device(torch.cat(parts), batch["prompts"].device)  # in one copy
    sources, position_ids, predicting, keys, query_ends, key_ends = moved.split([len(part) for part in parts])
    tokens = torch.cat([batch["prompts"].reshape(-1), batch["completions"].reshape(-1)])[sources]
    outputs = lm.base_model(
        input_ids=tokens[None],
        position_ids=position_ids[None],
        attention_mask=tokens.new_ones(1, 1, 1, 1, dtype=torch.bool),  # 4D: taken as it is, and not looked at
        use_cache=False,
        packed=Layout(keys, query_ends.int(), key_ends.int(), max(query_lengths), max(key_lengths)),
    )
    rows, columns = token_places([completion for _, completion in lengths], tokens.device)
    return rows, columns, outputs.last_hidden_state[0][predicting]


def lay_out(index, lengths):
    """The spans (start, length) in the packed row: {prompt: span}, and the span of each row's completion.

    With one prompt of 3 tokens and completions of 5 and 2, each without its last token:

        lay_out([0, 0], [(3, 5), (3, 2)]) -> {0: (0, 3)}, [(3, 4), (7, 1)]
    """
    prompts = {}
    completions = []
    end = 0
    for prompt, (tokens, _) in zip(index, lengths, strict=True):
        if prompt not in prompts:
            prompts[prompt] = (end, tokens)
            end += tokens
    for _, tokens in lengths:
        completions.append((end, tokens - 1))
        end += tokens - 1
    return prompts, completions


def token_sources(index, lengths, batch):
    """The spans of the packed tokens among all of `prompts`, row after row, and then all of `completions`."""
    prompt_width = batch["prompts"].shape[1]
    completion_width = batch["completions"].shape[1]
    spans = []
    for row, (tokens, _) in enumerate(lengths):
        if index.index(index[row]) == row:  # the first row of its prompt
            spans.append(((row + 1) * prompt_width - tokens, tokens))
    for row, (_, tokens) in enumerate(lengths):
        spans.append((len(lengths) * prompt_width + row * completion_width, tokens - 1))
    return spans


def token_positions(index, lengths):
    """The spans of the positions of the packed tokens: a completion goes on where its prompt ends."""
    prompts = {}
    for prompt, (tokens, _) in zip(index, lengths, strict=True):
        prompts[prompt] = (0, tokens)
    return [*prompts.values(), *((prompt, completion - 1) for prompt, completion in lengths)]


def predicting_spans(index, prompts, completions):
    """The spans of the tokens that predict each row's completion: the last of its prompt, then its own."""
    spans = []
    for prompt, completion in zip(index, completions, strict=True):
        start, length = prompts[prompt]
        spans += [(start + length - 1, 1), completion]
    return spans


def places(spans):
    """All places in spans [(start, length)], one span after the other (N,)."""
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


def attend(query, key, value, layout, scale=None, window=None):
    """Attention (1, N, H, D) of queries (1, H, N, D) to keys and values (1, K, N, D), causal within each sequence, of
    which the queries are the last tokens. `window`: how many tokens a query sees, itself included."""
    query = query[0].transpose(0, 1)
    heads = key.shape[1]
    both = torch.cat([key[0], value[0]]).transpose(0, 1)[layout.keys]  # (M, 2 K, D)
    key, value = both.split(heads, dim=1)
    options = dict(scale=scale, window_size=(window - 1 if window else -1, 0))
    if TAKES_GROUPED_HEADS:
        options["enable_gqa"] = True
    else:
        repeats = query.shape[1] // heads
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    device = query.device.type
    dtype = query.dtype
    if torch.is_autocast_enabled(device):  # rotary positions leave float32
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype).contiguous() for x in (query, key, value))
    ends = (layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key)
    return varlen_attn(query, key, value, *ends, **options)[None]


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
