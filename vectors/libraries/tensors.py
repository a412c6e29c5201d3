"""Tables of ragged rows as tensors, and optimizer steps over several processes."""

from types import SimpleNamespace

import torch

# --- tables ---


def padded(rows, dtype=torch.float64):
    """Return a table of ragged rows as a tensor (R, T), padded with zeros."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=dtype)


def rows_like(tensor, table):
    """Return the rows of a tensor (R, T) as lists, each as long as its row of the table."""
    return [row[: len(other)] for row, other in zip(tensor.tolist(), table, strict=True)]


def ones_like(table):
    return [[1] * len(row) for row in table]


def on_last_token(scores, mask):
    """Return scores (R, T) that are on the last token of each row, and 0 elsewhere."""
    last = mask.long().sum(dim=1, keepdim=True) - 1
    scores = torch.tensor(scores, dtype=torch.float64)[:, None]
    return torch.zeros(mask.shape, dtype=torch.float64).scatter(1, last, scores)


def per_token(advantages, table):
    """Return one advantage per token, from one per row or per token."""
    rows = []
    for advantage, row in zip(advantages, table, strict=True):
        rows.append(advantage if isinstance(advantage, list) else [advantage] * len(row))
    return rows


def flat(lists):
    return [item for items in lists for item in items]


def group_numbers(groups):
    """Return the group of each row: [0, 0, 1] for [[a, b], [c]]."""
    return flat([number] * len(group) for number, group in enumerate(groups))


def grouped(values, groups):
    """Return the values of all rows as one list per group."""
    rest = iter(values)
    return [[next(rest) for _ in group] for group in groups]


# --- one optimizer step ---


class Rows(SimpleNamespace):
    """Tensors with a row per completion, or None where a case has none."""

    def piece(self, rows):
        """Return the rows of one micro-batch."""
        part = {}
        for name, tensor in vars(self).items():
            part[name] = None if tensor is None else tensor[rows]
        return Rows(**part)


def policy_rows(inputs):
    """Return the tensors (R, T) of a policy's step. `logprobs` and `entropies` are leaves."""
    logprobs = inputs["logprobs"]

    def optional(name):
        return padded(inputs[name]) if name in inputs else None

    entropies = optional("entropies")
    return Rows(
        logprobs=padded(logprobs).requires_grad_(),
        old=padded(inputs["old_logprobs"]),
        ref=optional("ref_logprobs"),
        sampler=optional("sampler_logprobs"),
        entropies=None if entropies is None else entropies.requires_grad_(),
        advantages=padded(per_token(inputs["advantages"], logprobs)),
        mask=padded(inputs.get("mask") or ones_like(logprobs)).bool(),
    )


def pieces_of(inputs, rows):
    """Return the rows of each micro-batch of each process, one of each by default."""
    return inputs.get("pieces") or [[list(range(rows))]]


def has_uneven_pieces(inputs):
    """Return whether the micro-batches of a step differ in size."""
    return len(set(map(len, flat(pieces_of(inputs, 1))))) > 1


class Processes:
    """Processes that run one after the other. `pieces` has their micro-batches.

    A library that communicates gets `all_reduce` or `gather` of this class, which need the tensors
    of the other processes. So everything runs twice: the first run records the tensors of each
    call.
    """

    def __init__(self, pieces):
        self.pieces = pieces
        self.count = len(pieces)
        self.rows = len(flat(flat(pieces)))
        self.given = [[] for _ in pieces]
        self.rank = 0
        self.place = 0
        self.all_known = False

    def run(self, function):
        """Return [function(pieces of one process, self)] for all processes."""
        self.run_once(function)
        self.all_known = True
        return self.run_once(function)

    def run_once(self, function):
        results = []
        for rank, process in enumerate(self.pieces):
            self.rank = rank
            self.place = 0
            results.append(function(process, self))
        return results

    def gather(self, tensor):
        """Return the tensors of all processes (P, ...) in this call."""
        if not self.all_known:
            self.given[self.rank].append(tensor.detach().clone())
            return torch.stack([tensor] * self.count)
        everyone = torch.stack([calls[self.place] for calls in self.given])
        self.place += 1
        return everyone

    def all_reduce(self, tensor, op=None, group=None):
        """Sum over processes in place, as torch.distributed.all_reduce does."""
        tensor.copy_(self.gather(tensor).sum(dim=0))


def step_loss(inputs, table, losses_of):
    """Return the loss of a step, the mean over processes, and leave the gradients in the table.

    `losses_of(parts, processes)` yields what each micro-batch of a process adds to its loss.
    """

    def loss_of(process, processes):
        return sum(losses_of([table.piece(rows) for rows in process], processes))

    pieces = pieces_of(inputs, len(table.mask))
    loss = torch.stack(Processes(pieces).run(loss_of)).mean()
    loss.backward()
    return loss.item()


def policy_answer(inputs, losses_of):
    table = policy_rows(inputs)
    answer = {"loss": step_loss(inputs, table, losses_of)}
    answer["gradient"] = rows_like(table.logprobs.grad, inputs["logprobs"])
    if table.entropies is not None and table.entropies.grad is not None:
        answer["entropy_gradient"] = rows_like(table.entropies.grad, inputs["logprobs"])
    return answer


def totals_answer(inputs, totals_of):
    """Return the counts of tokens and rows that each micro-batch divides by, in each step.

    `totals_of(parts, processes)` yields the totals of each micro-batch of a process.
    """
    table = Rows(mask=padded(inputs["mask"]))
    answer = {"tokens": [], "rows": []}

    def totals_of_process(process, processes):
        return list(totals_of([table.piece(rows) for rows in process], processes))

    for pieces in inputs["steps"]:
        totals = Processes(pieces).run(totals_of_process)
        for name, key in (("tokens", "batch_num_tokens"), ("rows", "global_batch_size")):
            numbers = [[float(counted[key]) for counted in process] for process in totals]
            answer[name].append(numbers)
    return answer


# --- the other operations ---


def coefficients_after(controller_class, inputs, options):
    """Return the coefficients of an adaptive controller after each KL, from the same start."""
    coefficients = []
    for kl in inputs["kl"]:
        controller = controller_class(inputs["kl_coef"], options["target"], options["horizon"])
        controller.update(kl, options["samples"])
        coefficients.append(float(controller.value))
    return {"kl_coef": coefficients}


def score_pairs(inputs):
    """Return the scores (2 B,) of pairs as a leaf, chosen ones first."""
    scores = inputs["chosen"] + inputs["rejected"]
    return torch.tensor(scores, dtype=torch.float64, requires_grad=True)


def pair_answer(loss, leaf, tables=None):
    """Return the answer for a leaf of scores (2 B,) or of log-probs (2 B, T), chosen ones first.

    The gradient by log-probs has the rows of the tables.
    """
    loss.backward()
    gradients = rows_like(leaf.grad, tables) if tables else leaf.grad.tolist()
    pairs = len(gradients) // 2
    return {
        "loss": loss.item(),
        "chosen_gradient": gradients[:pairs],
        "rejected_gradient": gradients[pairs:],
    }
