"""torch's `varlen_attn` as a loop over the sequences, since it has no CPU kernel."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def pack(policy):
    """Let `policy` pack its forwards."""
    policy.pack()


def varlen_attn(
    query, key, value, query_ends, key_ends, longest_query, longest_key, *, scale, window_size, enable_gqa=True
):
    """Return attention (N, H, D), causal within each sequence, whose queries are its last tokens."""
    results, ends = [], [x.cpu().diff().tolist() for x in (query_ends, key_ends)]
    assert [max(x) for x in ends] == [longest_query, longest_key] and window_size[1] == 0
    for x, tokens in ((query_ends, query), (key_ends, key)):
        assert x.dtype == torch.int32 and x[0] == 0 and x[-1] == len(tokens)
    assert query.dtype == key.dtype == value.dtype and all(x.is_contiguous() for x in (query, key, value))
    for each in zip(query.split(ends[0]), key.split(ends[1]), value.split(ends[1]), strict=True):
        q, k, v = (x.transpose(0, 1) for x in each)
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        before = k.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(before)
        mask = mask.triu(before - window_size[0]) if window_size[0] >= 0 else mask
        results.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1))
    return torch.cat(results)
