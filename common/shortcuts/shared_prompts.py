"""The hidden states of rows that share a prompt, with each prompt computed once: an exact shortcut.

Completions attend to the keys and values of one pass over their prompt, through which the gradient flows back. The
result is that of `Backbone.plain_states`, up to rounding (tests/test_shared_prompts.py)."""

import copy

import torch

from common.batches import rows_on_host, to_device, token_places
from common.masked import positions


def shared_states(lm, batch, num_parameters):
    """Rows, columns (N,) and hidden states (N, H) as `Backbone.plain_states` returns them, in another order.

    One pass over the distinct prompts gives their keys and values. The completions attend to these, in runs of similar
    length, so that they need little padding. `num_parameters`: the number of weights of `lm`.
    """
    index, lengths = rows_on_host(batch)
    completion_lengths = [completion for _, completion in lengths]
    distinct = list(dict.fromkeys(index))
    number = {prompt: i for i, prompt in enumerate(distinct)}
    first_rows = [index.index(prompt) for prompt in distinct]
    device = batch["prompts"].device
    cache, last = prompt_pass(lm, batch, to_device(torch.tensor(first_rows), device))
    states = []
    for run in runs_of_similar_length(completion_lengths, most_padding(device, num_parameters)):
        rows_and_prompts = torch.tensor([run, [number[index[row]] for row in run]])
        rows, prompts = to_device(rows_and_prompts, device)
        hidden = last[prompts]
        width = completion_lengths[run[-1]]  # of the longest
        if width > 1:  # the last token predicts nothing and is left out
            after = completion_pass(lm, batch, rows, select_cache(cache, prompts), width - 1)
            hidden = torch.cat([hidden, after], dim=1)
        lines, columns = token_places([completion_lengths[row] for row in run], device)
        states.append((rows[lines], columns, hidden[lines, columns]))
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def prompt_pass(lm, batch, rows):
    """The key-value cache of the prompts of `rows`, and the states (prompts, 1, H) that predict the first tokens."""
    from transformers import DynamicCache

    mask = batch["prompt_mask"][rows]
    cache = DynamicCache(config=lm.config)
    outputs = lm.base_model(
        input_ids=batch["prompts"][rows],
        attention_mask=mask.long(),
        position_ids=positions(mask),
        past_key_values=cache,
        use_cache=True,
    )
    return cache, outputs.last_hidden_state[:, -1:]


def completion_pass(lm, batch, rows, cache, width):
    """The states (rows, width, H) of the first `width` completion tokens of `rows`, whose prompts are in `cache`."""
    mask = torch.cat([batch["prompt_mask"][rows], batch["completion_mask"][rows, :width]], dim=1)
    outputs = lm.base_model(
        input_ids=batch["completions"][rows, :width],
        attention_mask=mask.long(),
        position_ids=positions(mask)[:, -width:],
        past_key_values=cache,
        use_cache=True,
    )
    return outputs.last_hidden_state


def most_padding(device, num_parameters):
    """How many pad tokens may be spent to save one more pass.

    They cost operations; a pass costs reading all weights, and writing a gradient for each (docs/scale.md).
    """
    if device.type == "cpu":
        operations = 2e8
        tokens = 128 if num_parameters > 1e6 else 32
    else:
        operations = 1e13
        tokens = 32
    return max(operations / (6 * num_parameters), tokens)


def select_cache(cache, rows):
    """A key-value cache of the given rows of `cache`, which itself stays as it is."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def runs_of_similar_length(lengths, most_padding):
    """Row numbers, sorted by length, in runs that need at most `most_padding` pad tokens each.

    runs_of_similar_length([5, 1, 4], 2) -> [[1], [2, 0]]: rows 2 and 0 together need one pad token.
    """
    runs = []
    tokens = 0  # of the last run
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[row]
        if not runs or lengths[row] * (len(runs[-1]) + 1) - tokens > most_padding:
            runs.append([])
            tokens = lengths[row]
        runs[-1].append(row)
    return runs
