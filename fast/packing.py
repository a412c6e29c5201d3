"""Hidden states of a micro-batch from one forward without padding, each prompt computed once.

On a GPU in bfloat16 this replaces `token_states`, with the same result up to rounding. All tokens
are stored in one row (1, N): first the distinct prompts, then the completions without their last
tokens, which predict nothing. A prompt attends to itself, a completion to its prompt and to itself.
The keys and values of each sequence are gathered by an index, through which gradients flow back,
and torch's `varlen_attn` takes the lengths of the sequences.
"""

import inspect
from typing import NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fast.logprobs import TokenStates, prompt_indices

# From torch 2.12 on, keys may have fewer heads than queries. Checked once, not in every layer.
TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class PackedLayout(NamedTuple):
    """The S sequences of a packed row."""

    keys: torch.Tensor  # (M,): indices of the keys in the row, sequence by sequence
    query_ends: torch.Tensor  # (S + 1,) int32: 0, then where the queries of each sequence end
    key_ends: torch.Tensor  # (S + 1,) int32: the same for the M keys
    longest_query: int  # tokens
    longest_key: int


def packed_token_states(lm, batch):
    """Return the `TokenStates` of the completion tokens, by one forward without padding.

    Rows with the same prompt share it.
    """
    host = packed_indices(batch)
    device = batch["prompts"].device
    flat = torch.cat([*host.values()]).to(device)  # one copy to the device
    indices = dict(zip(host, flat.split([len(x) for x in host.values()]), strict=True))
    layout = PackedLayout(
        keys=indices["keys"],
        query_ends=indices["query_ends"].int(),
        key_ends=indices["key_ends"].int(),
        longest_query=int(host["query_ends"].diff().max()),
        longest_key=int(host["key_ends"].diff().max()),
    )
    tokens = torch.cat([batch["prompts"].reshape(-1), batch["completions"].reshape(-1)])
    tokens = tokens[indices["sources"]]
    outputs = lm.base_model(
        input_ids=tokens[None],
        position_ids=indices["position_ids"][None],
        # Transformers passes on a mask of four dimensions, and `packed_attention` ignores it.
        attention_mask=tokens.new_ones(1, 1, 1, 1, dtype=torch.bool),
        use_cache=False,
        packed=layout,
    )
    hidden_states = outputs.last_hidden_state[0][indices["predicting"]]
    return TokenStates(indices["rows"], indices["columns"], hidden_states)


def packed_indices(batch):
    """Return where the tokens of the packed row come from and go to: {name: indices on the CPU}.

    sources        (N,) index of each token in the flat `prompts` (R, P), then `completions` (R, T)
    position_ids   (N,)
    rows, columns  row and column of each completion token in (R, T), row by row
    predicting     index in the packed row of the token that predicts it
    keys, query_ends, key_ends    as in `PackedLayout`
    """
    rows, prompt_width = batch["prompts"].shape
    prompt_index = prompt_indices(batch)
    prompt_lengths = batch["prompt_mask"].sum(dim=1)
    completion_lengths = batch["completion_mask"].sum(dim=1)
    prompt_lengths, completion_lengths = torch.stack([prompt_lengths, completion_lengths]).tolist()
    completion_width = batch["completions"].shape[1]
    parts = {name: [] for name in ("sources", "position_ids", "predicting", "keys")}
    query_lengths, key_lengths = [0], [0]
    end = 0  # length of the packed row so far
    prompts = {}  # {prompt index: its indices in the packed row}
    for row, index in enumerate(prompt_index):
        if index in prompts:
            continue
        length = prompt_lengths[row]
        prompts[index] = torch.arange(end, end + length)
        end += length
        source_end = (row + 1) * prompt_width  # prompts are padded on the left
        parts["sources"].append(torch.arange(source_end - length, source_end))
        parts["position_ids"].append(torch.arange(length))
        parts["keys"].append(prompts[index])
        query_lengths.append(length)
        key_lengths.append(length)
    for row, index in enumerate(prompt_index):
        before = prompt_lengths[row]
        length = completion_lengths[row] - 1  # without the last token
        completion = torch.arange(end, end + length)
        end += length
        source = rows * prompt_width + row * completion_width
        parts["sources"].append(torch.arange(source, source + length))
        parts["position_ids"].append(torch.arange(before, before + length))
        parts["predicting"] += [prompts[index][-1:], completion]
        if length:
            parts["keys"] += [prompts[index], completion]
            query_lengths.append(length)
            key_lengths.append(before + length)
    indices = {name: torch.cat(tensors) for name, tensors in parts.items()}
    indices["rows"] = torch.repeat_interleave(torch.tensor(completion_lengths))
    indices["columns"] = torch.cat([torch.arange(length) for length in completion_lengths])
    indices["query_ends"] = torch.tensor(query_lengths).cumsum(dim=0)
    indices["key_ends"] = torch.tensor(key_lengths).cumsum(dim=0)
    return indices


def packed_attention(query, key, value, layout, scale=None, window=None):
    """Return causal attention (1, N, H, D) within each sequence of a packed row.

    Queries are (1, H, N, D), keys and values (1, K, N, D). The queries of a sequence are its last
    tokens. A query sees `window` tokens including itself (None: all).
    """
    query = query[0].transpose(0, 1)
    heads = key.shape[1]
    key_value = torch.cat([key[0], value[0]]).transpose(0, 1)[layout.keys]  # (M, 2 K, D)
    key, value = key_value.split(heads, dim=1)
    kwargs = dict(scale=scale, window_size=(window - 1 if window else -1, 0))
    if TAKES_GROUPED_HEADS:
        kwargs["enable_gqa"] = True
    else:
        repeats = query.shape[1] // heads
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):  # rotary embeddings return float32
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype).contiguous() for x in (query, key, value))
    lengths = (layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key)
    return varlen_attn(query, key, value, *lengths, **kwargs)[None]


def register_packed_sdpa():
    """Let transformers' attention "sdpa" take the keyword `packed`, a `PackedLayout`.

    Without the keyword nothing changes. Unlike a global switch, a keyword is passed again when
    gradient checkpointing recomputes the forward.
    """
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if hasattr(stock, "takes_packed"):
        return

    def sdpa(module, query, key, value, attention_mask, packed=None, scaling=None, **kwargs):
        if packed is None:
            return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        window = kwargs.get("sliding_window")
        return packed_attention(query, key, value, packed, scaling, window), None

    sdpa.takes_packed = True
    ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)
