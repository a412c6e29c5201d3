"""Simulate processes by threads: accelerators whose collectives wait for each other."""

import contextlib
import threading

import torch
from torch import nn


class Processes:
    """Return W accelerators whose collectives wait for each other; a collective that not all join is a deadlock."""

    def __init__(self, number, timeout=300):
        self.number, self.slots, self.local = number, [None] * number, threading.local()
        self.barrier, self.calls = threading.Barrier(number, timeout=timeout), [[] for _ in range(number)]

    def exchange(self, name, value):
        rank = self.local.rank
        self.calls[rank].append(name)
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def gather_object(self, items):
        return [item for items in self.exchange("gather_object", items) for item in items]

    def run(self, function):
        results, errors = [None] * self.number, []

        def target(rank):
            self.local.rank = rank
            try:
                results[rank] = function(FakeAccelerator(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=target, args=[rank]) for rank in range(self.number)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if errors:
            raise errors[0]
        return results


class FakeAccelerator:
    """One of several processes, each a thread. The caller adds up the gradients, as a launcher's DDP would."""

    device = torch.device("cpu")
    autocast = contextlib.nullcontext
    is_fsdp2 = False
    sync_gradients = True

    def __init__(self, processes, rank):
        self.processes, self.process_index, self.num_processes = processes, rank, processes.number

    def reduce(self, tensor, how="sum"):
        return sum(self.processes.exchange("reduce", tensor))

    def gather(self, tensor):
        return torch.cat(self.processes.exchange("gather", tensor))

    def no_sync(self, model):
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, max_norm):
        return nn.utils.clip_grad_norm_(parameters, max_norm)
