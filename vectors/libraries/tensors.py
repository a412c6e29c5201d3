"""What the adapters share: tables of unequal rows as tensors, and steps over several processes."""

from types import SimpleNamespace

import torch


class NotOfferedError(Exception):
    """The library has no way to compute this. The message says why."""


def refuse_if(condition, reason):
    if condition:
        raise NotOfferedError(reason)


# --- tables ---


def padded(rows, dtype=torch.float64):
    """A table of unequal rows as a tensor (R, T)."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=dtype)


def rows_like(tensor, table):
    """The rows of a tensor (R, T) as lists, each as long as that of the table."""
    return [row[: len(other)] for row, other in zip(tensor.tolist(), table, strict=True)]


def ones_like(table):
    return [[1] * len(row) for row in table]


def on_last_token(scores, table):
    """Each row's score on the last token of the row (R, T)."""
    rows = []
    for score, row in zip(scores, table, strict=True):
        rows.append([0.0] * (len(row) - 1) + [score])
    return padded(rows)


def per_token(advantages, table):
    """Each row's advantage is one number, or one for each of its tokens."""
    rows = []
    for advantage, row in zip(advantages, table, strict=True):
        rows.append(advantage if isinstance(advantage, list) else [advantage] * len(row))
    return rows


def flat(lists):
    return [item for items in lists for item in items]


def group_numbers(groups):
    """[[a, b], [c]] -> [0, 0, 1]"""
    return flat([number] * len(group) for number, group in enumerate(groups))


def grouped(values, groups):
    """The values of all rows, as lists of the groups' lengths."""
    rest = iter(values)
    return [[next(rest) for _ in group] for group in groups]


# --- one optimizer step ---


class Rows(SimpleNamespace):
    """Tensors with a row for each completion. One that the case does not have is None."""

    def piece(self, rows):
        """The same for the rows of one micro-batch."""
        part = {}
        for name, tensor in vars(self).items():
            part[name] = None if tensor is None else tensor[rows]
        return Rows(**part)


def policy_rows(inputs):
    """The tensors (R, T) of a policy's step. `logprobs` and `entropies` are leaves."""
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


def value_rows(inputs):
    """The tensors (R, T) of a critic's step. `values` is a leaf."""
    return Rows(
        values=padded(inputs["values"]).requires_grad_(),
        old=padded(inputs["old_values"]),
        returns=padded(inputs["returns"]),
        mask=padded(ones_like(inputs["values"])).bool(),
    )


def pieces_of(inputs, rows):
    """The rows of each micro-batch of each process. By default there is one of each."""
    return inputs.get("pieces") or [[list(range(rows))]]


def has_moved(inputs):
    """Whether the policy is another than the old one, after an earlier update of the same rollout."""
    return inputs["logprobs"] != inputs["old_logprobs"]


class Processes:
    """Several processes, run one after the other. `pieces` has their micro-batches.

    Where a library adds up over processes, it is given `all_reduce` or `gather` of this class. They
    must know what the other processes give. So everything runs twice: the first time each process
    writes down what it gives, call by call.
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
        """A list of `function(pieces of one process, self)`, which computes what it does."""
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


def step_loss(inputs, table, losses_of):
    """The loss of a step as data parallelism leaves it, the mean over processes; with gradients.

    `losses_of(parts, processes)` gives what each micro-batch of one process adds to its loss.
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
    if table.entropies is not None:
        answer["entropy_gradient"] = rows_like(table.entropies.grad, inputs["logprobs"])
    return answer


def value_answer(inputs, losses_of):
    table = value_rows(inputs)
    loss = step_loss(inputs, table, losses_of)
    return {"loss": loss, "gradient": rows_like(table.values.grad, inputs["values"])}


def totals_answer(inputs, totals_of):
    """The tokens and rows that each micro-batch is divided by, in each step of a rollout.

    `totals_of(parts, processes)` gives for each micro-batch of one process what it is told.
    """
    refuse_if("scored" in inputs, "a row must have a reward")
    table = Rows(mask=padded(inputs["mask"]))
    answer = {"tokens": [], "rows": []}

    def told(process, processes):
        return list(totals_of([table.piece(rows) for rows in process], processes))

    for pieces in inputs["steps"]:
        totals = Processes(pieces).run(told)
        for name, key in (("tokens", "batch_num_tokens"), ("rows", "global_batch_size")):
            numbers = [[float(counted[key]) for counted in process] for process in totals]
            answer[name].append(numbers)
    return answer


# --- the other operations ---


def kl_answer(inputs, options, kl):
    """Value and gradient of `kl(logprobs, old, ref, estimator)` (R, T)."""
    table = inputs["logprobs"]
    logprobs = padded(table).requires_grad_()
    old = padded(inputs.get("old_logprobs", table))
    value = kl(logprobs, old, padded(inputs["ref_logprobs"]), options["estimator"])
    value.sum().backward()
    return {"value": rows_like(value, table), "gradient": rows_like(logprobs.grad, table)}


def expected_kl_answer(inputs, options, kl):
    """The gradient by the logits of `kl(logprobs, old, ref, estimator)` (1, V), over draws from old."""
    logits = torch.tensor(inputs["logits"], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(dim=0)[None]
    old = torch.tensor(inputs["old_logits"], dtype=torch.float64).log_softmax(dim=0)[None]
    ref = torch.tensor(inputs["ref_logits"], dtype=torch.float64).log_softmax(dim=0)[None]
    (kl(logprobs, old, ref, options["estimator"]) * old.exp()).sum().backward()
    return {"gradient": logits.grad.tolist()}


def coefficients_after(controller_class, inputs, options):
    """What an adaptive controller makes of the same coefficient after each of several KLs."""
    coefficients = []
    for kl in inputs["kl"]:
        controller = controller_class(inputs["kl_coef"], options["target"], options["horizon"])
        controller.update(kl, options["samples"])
        coefficients.append(float(controller.value))
    return {"kl_coef": coefficients}


def score_pairs(inputs):
    """The scores (2 B,) of pairs, the chosen ones first; a leaf."""
    scores = inputs["chosen"] + inputs["rejected"]
    return torch.tensor(scores, dtype=torch.float64, requires_grad=True)


def score_answer(loss, scores):
    loss.backward()
    chosen, rejected = scores.grad.chunk(2)
    return {
        "loss": loss.item(),
        "chosen_gradient": chosen.tolist(),
        "rejected_gradient": rejected.tolist(),
    }


def preference_answer(loss, logprobs, inputs):
    """The chosen rows of `logprobs` (2 B, T), a leaf, come first."""
    loss.backward()
    chosen, rejected = logprobs.grad.chunk(2)
    return {
        "loss": loss.item(),
        "chosen_gradient": rows_like(chosen, inputs["chosen_logprobs"]),
        "rejected_gradient": rows_like(rejected, inputs["rejected_logprobs"]),
    }
