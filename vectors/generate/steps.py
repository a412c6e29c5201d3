"""The weights of the tokens of one optimizer step, however it is split.

`pieces` splits a step: a list of processes, each a list of micro-batches, each a list of rows. The
loss of the step has one denominator, so no weight depends on the split. `totals` says what a
denominator counts, and builds in common mistakes:

    step                  the whole step (right)
    micro_batch           the micro-batch; losses are averaged
    micro_batch_summed    the micro-batch; losses are summed, processes averaged
    micro_batch_all       the micro-batch; losses are summed, over processes too
    process               the process; processes are averaged
    process_all           the process; processes are summed
    over_processes        the step, then divided by the number of processes
    over_micro_batches    the step, then divided by the number of micro-batches
"""

from .arithmetic import each, flat


def mask_of(inputs, table):
    """Return the given mask, or ones for `table`; 0 in rows without a reward."""
    mask = inputs.get("mask") or [[1] * len(row) for row in table]
    scored = inputs.get("scored") or [1] * len(table)
    result = []
    for row, counts in zip(mask, scored, strict=True):
        result.append([cell * counts for cell in row])
    return result


def scored_rows(inputs, rows):
    """Return those of `rows` that have a reward."""
    scored = inputs.get("scored")
    return [row for row in rows if scored is None or scored[row]]


def groups_of(inputs, rows):
    return inputs.get("groups") or [0] * rows


def pieces_of(inputs, rows):
    return inputs.get("pieces") or [[list(range(rows))]]


def step_weights(inputs, table, options):
    """Return the weight of each token of `table` in the loss of the optimizer step."""
    mask = mask_of(inputs, table)
    weights = [[0.0] * len(row) for row in table]
    for rows, share in scopes(pieces_of(inputs, len(table)), options.get("totals", "step")):
        for row, numbers in weights_within(rows, mask, inputs, options).items():
            weights[row] = [share * number for number in numbers]
    return weights


def scopes(pieces, totals):
    """Return [(rows that are counted together, factor of their loss)] for `totals`."""
    processes = [flat(process) for process in pieces]
    everything = flat(processes)
    if totals == "step":
        return [(everything, 1.0)]
    if totals == "over_processes":
        return [(everything, 1 / len(pieces))]
    if totals == "over_micro_batches":
        return [(everything, 1 / len(pieces[0]))]
    if totals == "process":
        return [(rows, 1 / len(pieces)) for rows in processes]
    if totals == "process_all":
        return [(rows, 1.0) for rows in processes]
    result = []
    for process in pieces:
        shares = {
            "micro_batch": 1 / len(process) / len(pieces),
            "micro_batch_summed": 1 / len(pieces),
            "micro_batch_all": 1.0,
        }
        result += [(rows, shares[totals]) for rows in process]
    return result


def weights_within(rows, mask, inputs, options):
    """Return {row: weights of its tokens} as if these rows were the whole optimizer step."""
    groups = groups_of(inputs, len(mask))
    lengths = {row: sum(mask[row]) for row in rows}
    if options.get("masked_tokens_count"):  # a mistake
        lengths = {row: len(mask[row]) for row in rows}
    counted = scored_rows(inputs, rows)
    if not options.get("empty_rows_count", True):
        counted = [row for row in counted if lengths[row]]
    result = {}
    for row in rows:
        weight = 0.0
        if lengths[row]:
            weight = token_weight(row, lengths, groups, counted, options)
        result[row] = [weight * cell for cell in mask[row]]
    return result


def token_weight(row, lengths, groups, counted, options):
    """Return the weight of each token of a row, from {row: tokens} and the counted rows."""
    mean = options["mean"]
    if mean == "tokens":
        return 1 / sum(lengths.values())
    if mean == "rows":
        return 1 / lengths[row] / len(counted)
    if mean == "sums":
        return 1 / len(counted)
    if mean == "constant":
        return 1 / options["constant"] / len(counted)
    prompts = len({groups[other] for other in counted})
    if mean == "prompts":
        return 1 / lengths[row] / prompts
    own_group = [other for other in lengths if groups[other] == groups[row]]
    share = 1 / sum(lengths[other] for other in own_group)
    if mean == "groups_added":  # a mistake
        return share
    assert mean == "groups", mean
    return share / prompts


# --- mistakes ---


def without_mask(weights):
    """Give masked tokens the weight of the others of their row."""
    return [[max(row)] * len(row) for row in weights]


def with_unscored_rows(inputs, table, options):
    """In a mean over rows, weight rows without a reward like the others."""
    scored = inputs["scored"]
    weights = step_weights(inputs | {"scored": [1] * len(scored)}, table, options)
    factor = len(scored) / sum(scored)
    return each(lambda weight: factor * weight, weights)


def with_unscored_count(inputs, table, options):
    """In a mean over rows, count rows without a reward, but leave them out of the loss."""
    scored = inputs["scored"]
    factor = sum(scored) / len(scored)
    weights = step_weights(inputs, table, options)
    return each(lambda weight: factor * weight, weights)
