"""The hidden states of rows that share a prompt, with each prompt computed once: an exact shortcut.

Completions of one prompt attend to the keys and values of one pass over it, through which the gradient flows back. The
result is that of `Policy.plain_states`, up to rounding (tests/test_shared_prompts.py).
"""

import copy

import torch

from common.masked import positions


def shared_states(lm, batch, size):
    """What `Policy.plain_states` returns, from one pass over each distinct prompt and a pass over the completions that
    attends to its keys and values (through which the gradient reaches the prompt).

    The completions go in runs of similar length, so that they need little padding. `size` counts the weights of `lm`.
    """
    from transformers import DynamicCache

    mask, P, device = batch["completion_mask"], batch["prompts"].shape[1], batch["prompts"].device
    index, lengths = rows_on_host(batch)
    distinct = list(dict.fromkeys(index))
    first = torch.tensor([index.index(i) for i in distinct]).to(device, non_blocking=True)
    prompt_mask, cache = batch["prompt_mask"][first], DynamicCache(config=lm.config)
    inputs = dict(input_ids=batch["prompts"][first], attention_mask=prompt_mask.long())
    outputs = lm.base_model(**inputs, position_ids=positions(prompt_mask), past_key_values=cache, use_cache=True)
    last = outputs.last_hidden_state[:, -1:]  # (prompts, 1, H) predicts the first token
    states = []
    # A further pass costs about as much time as this many operations on padding (measured on CPU only).
    operations = 2e8 if device.type == "cpu" else 1e12
    most_padding = operations / (6 * size)
    for run in runs_of_similar_length(lengths, most_padding):
        width = lengths[run[-1]]
        rows = torch.tensor([run, [distinct.index(index[row]) for row in run]])
        rows, owners = rows.to(device, non_blocking=True)
        hidden = last[owners]
        if width > 1:  # the last token predicts nothing and is left out
            attention_mask = torch.cat([batch["prompt_mask"][rows], mask[rows, : width - 1]], dim=1)
            outputs = lm.base_model(
                input_ids=batch["completions"][rows, : width - 1],
                attention_mask=attention_mask.long(),
                position_ids=positions(attention_mask)[:, P:],
                past_key_values=select_cache(cache, owners),
                use_cache=True,
            )
            hidden = torch.cat([hidden, outputs.last_hidden_state], dim=1)
        lines, columns = token_places([lengths[row] for row in run], device)
        states.append((rows[lines], columns, hidden[lines, columns]))
    return states


def rows_on_host(batch):
    """Prompt index and completion tokens of each row, as lists. Where a batch does not bring them, the GPU is asked."""
    if "groups" in batch:
        return batch["groups"], [tokens for _, tokens in batch["lengths"]]
    return torch.stack([batch["prompt_index"][:, 0], batch["completion_mask"].sum(dim=1)]).tolist()


def token_places(lengths, device):
    """Row and column (N,) of each token of rows of so many tokens (a list), row by row; nothing waits for a GPU."""
    lengths = torch.tensor(lengths)
    places = (torch.arange(lengths.max()) < lengths[:, None]).nonzero()
    return places.to(device, non_blocking=True).unbind(dim=1)


def select_cache(cache, rows):
    """A key-value cache that holds the given rows of `cache`; the original stays as it is."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def runs_of_similar_length(lengths, most_padding):
    """Row numbers in runs, sorted by length; padded to its longest row, a run has at most `most_padding` pad tokens."""
    runs, tokens = [], 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[row]
        if not runs or lengths[row] * (len(runs[-1]) + 1) - tokens > most_padding:
            runs.append([])
            tokens = lengths[row]
        runs[-1].append(row)
    return runs


@torch.no_grad()
def has_plain_cache(lm):
    """Whether `lm` keeps keys and values, and nothing else: the rows of such a cache can be repeated and selected.

    Hybrids keep the states of convolutions and of linear attention too, some in subclasses of the plain layers.
    """
    from transformers import DynamicCache

    if not layer_types(lm) <= {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}:
        return False
    cache, ids = DynamicCache(config=lm.config), torch.zeros(1, 1, dtype=torch.long, device=lm.device)
    outputs = lm(input_ids=ids, past_key_values=cache, use_cache=True)
    return getattr(outputs, "past_key_values", None) is cache


def layer_types(lm):
    """The names of the classes of the layers in the cache that `generate` makes for `lm`."""
    from transformers import DynamicCache

    return {type(layer).__name__ for layer in DynamicCache(config=lm.config).layers}


@torch.no_grad()
def sharing_is_exact(policy):
    """Whether `shared_states` gives the log-probs of `plain_states`, on rows of unequal lengths.

    Never for layers that use the keys and values of another one, where nobody has looked at the gradient.
    """
    if "DummyLayer" in layer_types(policy.lm):
        return False
    device, vocabulary = policy.lm.device, policy.lm.get_output_embeddings().weight.shape[0]
    counts = torch.arange(6, device=device)
    batch = {
        "prompts": (torch.arange(24, device=device) * 7 % vocabulary).view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": (torch.arange(12, device=device) >= torch.tensor([[0], [5]], device=device)).repeat_interleave(
            3, 0
        ),
        "completions": (torch.arange(48, device=device) * 5 % vocabulary).view(6, 8),
        "completion_mask": torch.arange(8, device=device) <= counts[:, None],
    }
    shared = batch | {"prompt_index": (counts // 3)[:, None]}
    (plain, _), (other, _) = policy(batch, with_entropy=False), policy(shared, with_entropy=False)
    return torch.allclose(plain, other, atol=1e-4 if policy.lm.dtype == torch.float32 else 0.1)
