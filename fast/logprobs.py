"""Log-probs without all logits of a micro-batch: the head runs in chunks, on completion tokens.

The logits of a chunk are recomputed in the backward pass, so the full logits (R, T, V) are never
materialized.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from common.masked import logprobs_and_entropy, positions

CHUNK_ELEMENTS = 2**25  # logits of one chunk of the head: 128 MiB in float32


class TokenStates(NamedTuple):
    """The N completion tokens of a batch, and the hidden states that predict them."""

    rows: torch.Tensor  # (N,), the token's row in the batch
    columns: torch.Tensor  # (N,), its column in the completion
    hidden_states: torch.Tensor  # (N, H), or logits (N, V) if the head cannot run on its own


def logprobs_of_states(lm, batch, states, head_is_last, temperature, entropy_grad=False):
    """Return log-probs and entropies (R, T), float32, 0 outside the mask, from `TokenStates`."""
    rows, columns, hidden_states = states
    tokens = batch["completions"][rows, columns]
    size = max(1, CHUNK_ELEMENTS // lm.get_output_embeddings().weight.shape[0])
    run_head = partial(chunk_logprobs, lm, head_is_last, temperature, entropy_grad)
    if len(tokens) > size:
        run_head = partial(checkpoint, run_head, use_reentrant=False)
    chunks = [
        run_head(*chunk)
        for chunk in zip(hidden_states.split(size), tokens.split(size), strict=True)
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    zeros = torch.zeros(batch["completions"].shape, device=hidden_states.device)
    return zeros.index_put((rows, columns), logprobs), zeros.index_put((rows, columns), entropy)


def chunk_logprobs(lm, head_is_last, temperature, entropy_grad, hidden_states, tokens):
    """Return log-probs and entropies (N,) of `tokens` (N,) from the states before them."""
    logits = lm.get_output_embeddings()(hidden_states) if head_is_last else hidden_states
    return logprobs_and_entropy(logits, tokens, temperature, entropy_grad=entropy_grad)


def token_states(lm, batch, head_is_last=True):
    """Return the `TokenStates` of a batch, by one forward over whole padded rows.

    Without `head_is_last` they hold logits.
    """
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (R, P+T)
    inputs = dict(
        input_ids=torch.cat([batch["prompts"], batch["completions"]], dim=1),
        attention_mask=attention_mask.long(),
        position_ids=positions(attention_mask),
        use_cache=False,
    )
    # Keep the states from the last prompt token to the next-to-last completion token.
    kept = batch["completions"].shape[1] + 1
    if head_is_last:
        hidden_states = lm.base_model(**inputs).last_hidden_state[:, -kept:-1]
    else:
        hidden_states = lm(**inputs, logits_to_keep=kept).logits[:, :-1]
    rows, columns = batch["completion_mask"].nonzero(as_tuple=True)
    return TokenStates(rows, columns, hidden_states[rows, columns])


@torch.no_grad()
def has_last_head(lm):
    """Return whether the logits are the head's output on the last hidden states, unchanged.

    Granite and Cohere scale the output of the head, and Gemma 2 caps it. Multiplying the output by
    1e4 makes a later scale or soft cap visible.
    """
    head = lm.get_output_embeddings()
    ids = torch.arange(8, device=lm.device)[None]
    try:
        with head.register_forward_hook(lambda module, inputs, output: output * 1e4):
            logits = lm(input_ids=ids, use_cache=False).logits
            expected = head(lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return bool((logits - expected).abs().max() <= expected.abs().max() / 1000)
    except (AttributeError, TypeError):  # Llama 4: the base model returns no hidden states of text
        return False


def prompt_indices(batch):
    """Return the index (R,) of each row's prompt: rows with the same prompt have the same index."""
    prompts = torch.where(batch["prompt_mask"], batch["prompts"], -1).tolist()
    found = {}
    return [found.setdefault(tuple(prompt), len(found)) for prompt in prompts]
