"""The hidden states of rows that share a prompt, with each prompt computed once: an exact shortcut.

Completions attend to the keys and values of one pass over their prompt, through which the gradient flows back. The
result is that of `Backbone.plain_states`, up to rounding (tests/test_shared_prompts.py).
"""

import copy

import torch

from common.masked import positions


def shared_states(lm, batch, num_parameters):
    """[(rows, columns, hidden)] as `Backbone.plain_states` returns it, a tuple for each run of completions.

    One pass over the distinct prompts gives their keys and values; the completions attend to these, in runs of similar
    length, so that they need little padding. `num_parameters`: the number of weights of `lm`.
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
    most_padding = operations / (6 * num_parameters)
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
    """Prompt index and completion tokens of each row, as lists; fetched from the GPU if the batch has no such lists."""
    if "groups" in batch:
        return batch["groups"], [tokens for _, tokens in batch["lengths"]]
    return torch.stack([batch["prompt_index"][:, 0], batch["completion_mask"].sum(dim=1)]).tolist()


def token_places(lengths, device):
    """Row and column (N,) of each token, row by row, in rows of these lengths (a list); nothing waits for a GPU."""
    lengths = torch.tensor(lengths)
    places = (torch.arange(lengths.max()) < lengths[:, None]).nonzero()
    return places.to(device, non_blocking=True).unbind(dim=1)


def select_cache(cache, rows):
    """A key-value cache of the given rows of `cache`, which itself stays as it is."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def runs_of_similar_length(lengths, most_padding):
    """Row numbers, sorted by length, in runs that need at most `most_padding` pad tokens each."""
    runs, tokens = [], 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[row]
        if not runs or lengths[row] * (len(runs[-1]) + 1) - tokens > most_padding:
            runs.append([])
            tokens = lengths[row]
        runs[-1].append(row)
    return runs
