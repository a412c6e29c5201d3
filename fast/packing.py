"""The hidden states of a micro-batch in one pass without padding, each prompt once.

On a GPU in bfloat16 this takes the place of `token_states`, with the same result up to rounding.
The tokens lie in one row (1, N): the distinct prompts, then the completions without their last
token, which predicts nothing. A prompt attends to itself, a completion to its prompt and to itself:
the keys of each of these sequences are gathered by an index, through which the gradient flows back,
and `varlen_attn` of torch takes the lengths of queries and keys.
"""

import inspect
from typing import NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Keys may have fewer heads than queries from torch 2.12 on. To ask in each layer takes too long.
TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Layout(NamedTuple):
    """Where the sequences of a packed row are."""

    keys: torch.Tensor  # (M,): of each sequence in turn, where its keys lie in the row
    query_ends: torch.Tensor  # (S + 1,) int32: 0, and where the queries of each sequence end
    key_ends: torch.Tensor  # (S + 1,) int32: the same among the M keys
    longest_query: int  # tokens
    longest_key: int


def packed_states(lm, batch):
    """Rows, columns (N,) of the completion tokens, and the states (N, H) that predict them."""
    host = lay_out(batch)
    moved = torch.cat([*host.values()]).to(batch["prompts"].device)  # in one copy
    places = dict(zip(host, moved.split([len(part) for part in host.values()]), strict=True))
    layout = Layout(
        keys=places["keys"],
        query_ends=places["query_ends"].int(),
        key_ends=places["key_ends"].int(),
        longest_query=int(host["query_ends"].diff().max()),
        longest_key=int(host["key_ends"].diff().max()),
    )
    tokens = torch.cat([batch["prompts"].reshape(-1), batch["completions"].reshape(-1)])
    tokens = tokens[places["sources"]]
    outputs = lm.base_model(
        input_ids=tokens[None],
        position_ids=places["positions"][None],
        # A mask of four dimensions is taken as it is, and not looked at.
        attention_mask=tokens.new_ones(1, 1, 1, 1, dtype=torch.bool),
        use_cache=False,
        packed=layout,
    )
    return places["rows"], places["columns"], outputs.last_hidden_state[0][places["predicting"]]


def lay_out(batch):
    """Where all tokens of a packed row come from and go to, on the host: {name: places}.

    `sources`: their places in all of `prompts` (R, P) and then all of `completions` (R, T); their
    `positions`. For each completion token, row by row: its `rows` and `columns` in (R, T), and the
    place in the packed row that predicts it. For each sequence: the places of its `keys`; where its
    queries and its keys end.
    """
    rows, prompt_width = batch["prompts"].shape
    index = torch.arange(rows, device=batch["prompts"].device)
    if "prompt_index" in batch:
        index = batch["prompt_index"][:, 0]
    facts = torch.stack(
        [batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1), index]
    )
    prompt_lengths, completion_lengths, index = facts.tolist()  # the only wait for the GPU
    completion_width = batch["completions"].shape[1]
    parts = {name: [] for name in ("sources", "positions", "predicting", "keys")}
    query_lengths, key_lengths = [0], [0]
    end = 0
    prompts = {}  # the places of each prompt in the packed row
    for row, prompt in enumerate(index):
        if prompt in prompts:
            continue
        length = prompt_lengths[row]
        prompts[prompt] = torch.arange(end, end + length)
        end += length
        last = (row + 1) * prompt_width
        parts["sources"].append(torch.arange(last - length, last))
        parts["positions"].append(torch.arange(length))
        parts["keys"].append(prompts[prompt])
        query_lengths.append(length)
        key_lengths.append(length)
    for row, prompt in enumerate(index):
        before = prompt_lengths[row]
        queries = completion_lengths[row] - 1  # the last token predicts nothing
        own = torch.arange(end, end + queries)
        end += queries
        first = rows * prompt_width + row * completion_width
        parts["sources"].append(torch.arange(first, first + queries))
        parts["positions"].append(torch.arange(before, before + queries))
        parts["predicting"] += [prompts[prompt][-1:], own]
        if queries:
            parts["keys"] += [prompts[prompt], own]
            query_lengths.append(queries)
            key_lengths.append(before + queries)
    places = {name: torch.cat(pieces) for name, pieces in parts.items()}
    places["rows"] = torch.repeat_interleave(torch.tensor(completion_lengths))
    places["columns"] = torch.cat([torch.arange(length) for length in completion_lengths])
    places["query_ends"] = torch.tensor(query_lengths).cumsum(dim=0)
    places["key_ends"] = torch.tensor(key_lengths).cumsum(dim=0)
    return places


def attend(query, key, value, layout, scale=None, window=None):
    """Attention (1, N, H, D) of queries (1, H, N, D) to keys and values (1, K, N, D).

    It is causal within each sequence, whose queries are its last tokens. `window`: how many tokens
    a query sees, itself included.
    """
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
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):  # rotary positions leave float32
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype).contiguous() for x in (query, key, value))
    ends = (layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key)
    return varlen_attn(query, key, value, *ends, **options)[None]


def let_sdpa_take_layouts():
    """Let transformers' attention "sdpa" take a `packed` layout; without one it is what it was.

    Nothing is switched, so that a backward pass which computes again (gradient checkpointing) does
    the same.
    """
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if hasattr(stock, "takes_layouts"):
        return

    def sdpa(module, query, key, value, attention_mask, packed=None, scaling=None, **options):
        if packed is None:
            return stock(module, query, key, value, attention_mask, scaling=scaling, **options)
        return attend(query, key, value, packed, scaling, options.get("sliding_window")), None

    sdpa.takes_layouts = True
    ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)
