"""Arithmetic on numbers and on tables. A table is a list of rows of different lengths."""

import math


def mean(numbers):
    return sum(numbers) / len(numbers)


def variance(numbers, ddof):
    center = mean(numbers)
    squares = [(number - center) ** 2 for number in numbers]
    return sum(squares) / (len(numbers) - ddof)


def clip(number, low, high):
    return min(max(number, low), high)


def log_sigmoid(x):
    if x > 0:
        return -math.log1p(math.exp(-x))
    return x - math.log1p(math.exp(x))


def sigmoid(x):
    return math.exp(log_sigmoid(x))


def softmax(logits):
    exponentials = [math.exp(logit) for logit in logits]
    return [exponential / sum(exponentials) for exponential in exponentials]


def each(function, *tables):
    """Apply `function` to the cells of tables of one shape."""
    result = []
    for rows in zip(*tables, strict=True):
        result.append([function(*cells) for cells in zip(*rows, strict=True)])
    return result


def filled(table, number):
    """Return a table shaped like `table`, with `number` in each cell."""
    return each(lambda _: number, table)


def flat(table):
    """Return the cells of a table as one list."""
    cells = []
    for row in table:
        cells += row
    return cells


def weighted_sum(weights, table):
    return sum(map(sum, each(lambda weight, number: weight * number, weights, table)))


def add(left, right):
    return each(lambda x, y: x + y, left, right)


def moved_by(table, change, scale=1.0):
    """Return a table plus a scaled change, rounded to be readable."""
    return each(lambda x, y: round(x + scale * y, 12), table, change)


def central_difference(function, place, step=1e-6):
    return (function(place + step) - function(place - step)) / (2 * step)


def check_gradient(function, table, gradient):
    """Check `gradient` of `function` (table -> number) against central differences."""
    for i, row in enumerate(table):
        for t, cell in enumerate(row):

            def moved(value, i=i, t=t):
                other = [list(cells) for cells in table]
                other[i][t] = value
                return function(other)

            slope = central_difference(moved, cell)
            allowed = 2e-8 * max(1.0, abs(function(table))) + 1e-7 * abs(slope)
            assert abs(slope - gradient[i][t]) < allowed, (i, t, slope, gradient[i][t])
