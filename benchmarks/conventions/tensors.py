"""Tables of unequal rows as tensors, and several processes in one."""

import dataclasses

import torch


class NotOfferedError(Exception):
    """The library has no way to compute this. The message says why."""


def padded(rows, fill=0.0, dtype=torch.float64):
    """A table of unequal rows as a tensor (R, T)."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def rows_like(tensor, table):
    """The rows of a tensor (R, T) as lists, each as long as that of the table."""
    return [row[: len(other)] for row, other in zip(tensor.tolist(), table, strict=True)]


def on_last_token(scores, table):
    """Each row's score on the last token of the row (R, T)."""
    rows = []
    for score, row in zip(scores, table, strict=True):
        rows.append([0.0] * (len(row) - 1) + [score])
    return padded(rows)


def ones_like(table):
    return [[1] * len(row) for row in table]


@dataclasses.dataclass
class Step:
    """The tensors (R, T) of an optimizer step, and the rows of each micro-batch of each process."""

    logprobs: torch.Tensor  # a leaf
    old: torch.Tensor
    ref: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    processes: list

    @classmethod
    def of(cls, inputs):
        logprobs = inputs["logprobs"]
        mask = inputs.get("mask") or ones_like(logprobs)
        ref = padded(inputs["ref_logprobs"]) if "ref_logprobs" in inputs else None
        advantages = per_token(inputs["advantages"], logprobs)
        return cls(
            padded(logprobs).requires_grad_(),
            padded(inputs["old_logprobs"]),
            ref,
            padded(advantages),
            padded(mask).bool(),
            pieces_of(inputs, len(logprobs)),
        )

    def piece(self, rows):
        """The same for the rows of one micro-batch."""
        ref = None if self.ref is None else self.ref[rows]
        return Step(
            self.logprobs[rows],
            self.old[rows],
            ref,
            self.advantages[rows],
            self.mask[rows],
            [[rows]],
        )


def per_token(advantages, table):
    """Each row's advantage is one number, or one for each of its tokens."""
    rows = []
    for advantage, row in zip(advantages, table, strict=True):
        rows.append(advantage if isinstance(advantage, list) else [advantage] * len(row))
    return rows


class Processes:
    """Several processes, run one after the other.

    Where a library adds up over processes, it is given `all_reduce` or `gather` of this class. They
    must know what the other processes give. So everything runs twice: the first time each process
    writes down what it gives, call by call.
    """

    def __init__(self, count):
        self.count = count
        self.given = [[] for _ in range(count)]
        self.rank = 0
        self.place = 0
        self.all_known = False

    def run(self, function):
        """[function(0), function(1), ...], where `function(rank)` is what one process computes."""
        for rank in range(self.count):
            self.rank = rank
            function(rank)
        self.all_known = True
        results = []
        for rank in range(self.count):
            self.rank, self.place = rank, 0
            results.append(function(rank))
        return results

    def gather(self, tensor):
        """(processes, ...): what each process gives in this call."""
        if not self.all_known:
            self.given[self.rank].append(tensor.detach().clone())
            return torch.stack([tensor] * self.count)
        everyone = torch.stack([calls[self.place] for calls in self.given])
        self.place += 1
        return everyone

    def all_reduce(self, tensor, op=None, group=None):
        """As torch.distributed.all_reduce with a sum: in place."""
        tensor.copy_(self.gather(tensor).sum(dim=0))


def step_answer(inputs, logprobs, losses, entropies=None):
    """Loss and gradient as data parallelism leaves them: the mean over the processes."""
    loss = torch.stack(losses).mean()
    loss.backward()
    answer = {"loss": loss.item(), "gradient": rows_like(logprobs.grad, inputs["logprobs"])}
    if entropies is not None:
        answer["entropy_gradient"] = rows_like(entropies.grad, inputs["logprobs"])
    return answer


def expected_gradient(inputs, estimate):
    """The gradient by the logits of `estimate(logprobs, old, ref)` (1, V), over draws from old."""
    logits = torch.tensor(inputs["logits"], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(dim=0)[None]
    old = torch.tensor(inputs["old_logits"], dtype=torch.float64).log_softmax(dim=0)[None]
    ref = torch.tensor(inputs["ref_logits"], dtype=torch.float64).log_softmax(dim=0)[None]
    (estimate(logprobs, old, ref) * old.exp()).sum().backward()
    return {"gradient": logits.grad.tolist()}


def rows_of(pieces):
    """The rows of one process, whose micro-batches are `pieces`."""
    return [row for rows in pieces for row in rows]


def pieces_of(inputs, rows):
    """The rows of each micro-batch of each process. By default there is one of each."""
    return inputs.get("pieces") or [[list(range(rows))]]
