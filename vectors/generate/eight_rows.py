"""Eight rows of two prompts, which most cases start from, and other inputs of the same shape."""

from .arithmetic import mean, moved_by

OLD = [
    [-0.42, -1.35, -0.27],
    [-1.9, -0.15, -0.66, -1.42, -0.38],
    [-0.85, -2.8],
    [-0.07, -0.55, -1.05, -0.23],
    [-1.6],
    [-0.33, -0.91],
    [-2.2, -0.48, -0.12, -1.77, -0.6, -0.29],
    [-0.75],
]
CHANGE = [
    [0.34, -0.11, -0.06],
    [-0.52, -0.035, 0.27, 0.045, -0.41],
    [0.58, 1.45],
    [0.02, -0.28, 0.13, -0.02],
    [0.21],
    [-0.31, 0.09],
    [0.26, -0.17, 0.05, 1.25, -0.08, 0.21],
    [-0.19],
]
REF = [
    [-0.6, -1.2, -0.3],
    [-1.7, -0.25, -0.7, -1.3, -0.5],
    [-1.0, -2.4],
    [-0.1, -0.5, -1.2, -0.2],
    [-1.1],
    [-0.4, -0.8],
    [-1.5, -0.6, -0.1, -1.2, -0.7, -0.3],
    [-0.5],
]
OF_TOKENS = [  # advantages
    [-1.3, -0.3, 0.7],
    [0.1, 1.1, -0.5, 0.5, -1.1],
    [1.5, -0.1],
    [0.3, 1.3, -0.3, 0.7],
    [-0.9],
    [0.5, -1.1],
    [-0.7, 0.3, 1.3, -0.3, 0.9, -1.2],
    [0.7],
]
ENTROPIES = [
    [0.9, 1.4, 0.5],
    [1.7, 0.4, 1.1, 1.3, 0.8],
    [1.0, 2.1],
    [0.2, 0.9, 1.2, 0.6],
    [1.5],
    [0.7, 1.1],
    [1.8, 0.8, 0.3, 1.6, 1.0, 0.6],
    [1.2],
]
SAMPLER = [
    [-0.45, -1.2, -0.25],
    [-2.1, -0.15, -0.6, -2.5, -0.4],
    [-0.8, -4.1],
    [-0.08, -0.5, -1.3, -0.2],
    [-1.5],
    [-0.3, -1.0],
    [-2.0, -0.5, -0.1, -1.7, -0.7, -0.3],
    [-0.7],
]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]  # the prompt of each row
BATCH = {
    "logprobs": moved_by(OLD, CHANGE),
    "old_logprobs": OLD,
    "advantages": [0.9, -1.1, -0.7, 0.9, -0.4, 1.3, -0.8, 0.6],
    "groups": GROUPS,
}
PARTLY = [  # a mask with holes (tokens of a tool) and shortened rows
    [1, 1, 0],
    [1, 0, 1, 1, 1],
    [1, 1],
    [1, 0, 0, 1],
    [1],
    [1, 1],
    [1, 1, 0, 1, 1, 0],
    [1],
]


def mask_without(*rows):
    """Return a mask that is 0 in these rows and 1 in all others."""
    return [[int(row not in rows)] * len(cells) for row, cells in enumerate(OLD)]


ALL = mask_without()
EMPTY = mask_without(1, 4, 5, 6, 7)
INTERLEAVED = [7, 3, 7, 3, 3, 7, 3, 7]  # prompts whose rows are not adjacent
GROUPS_OF_TWO = [0, 0, 1, 1, 2, 2, 3, 3]  # four prompts of two rows
WITHOUT_REWARD = [1, 0, 1, 1, 0, 1, 1, 1]  # `scored`
ZERO_WITHOUT_REWARD = [0.9, 0.0, -0.7, 0.9, 0.0, 1.3, -0.8, 0.6]  # advantages of rows
ROW_ADVANTAGES = [mean(row) for row in OF_TOKENS]
GSPO_LOGPROBS = moved_by(OLD, CHANGE, 0.01)  # its clip range is a thousandth of the others'


def with_two_cells(table, number):
    """Return the table with `number` at two tokens, one with A > 0 and one with A < 0."""
    result = [list(row) for row in table]
    result[0][1] = number
    result[6][0] = number
    return result


RARE = {  # two tokens have become 13 times as likely
    "logprobs": with_two_cells(BATCH["logprobs"], -4.4),
    "old_logprobs": with_two_cells(OLD, -7.0),
}
FAR = {  # the reference finds two tokens likely, one with A > 0 and one with A < 0
    "logprobs": with_two_cells(BATCH["logprobs"], -14.0),
    "old_logprobs": with_two_cells(OLD, -14.1),
    "ref_logprobs": with_two_cells(REF, -1.0),
}
