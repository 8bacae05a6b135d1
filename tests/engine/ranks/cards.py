"""Ranks on cards without cards: NCCL's calls are carried by Gloo between threads, tensors stay on
the CPU, and a rank's memory that all others read is a list.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from engine.ranks.collectives.cards import OnCard, on_card
from engine.ranks.collectives.gloo import Gloo
from engine.ranks.collectives.nccl import Nccl
from engine.ranks.group import Ranks

CPU = torch.device("cpu")
PATIENCE = 20.0


def together(size, work):
    """work(rank, store) of every rank at once: the results in the order of ranks."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(work, rank, store) for rank in range(size)]
        return [done.result(PATIENCE) for done in running]


class Noted:
    """A process group's calls, noted and made."""

    def __init__(self, group):
        self.group, self.calls = group, []

    def allreduce(self, tensors, options):
        self.calls.append(("add", tensors[0].shape, tensors[0].data_ptr(), options))
        return self.group.allreduce(tensors, options)

    def _allgather_base(self, out, x, options):
        self.calls.append(("list", tuple(x.shape), x.data_ptr(), options))
        return self.group._allgather_base(out, x, options)


def nccl(rank, size, store):
    """Nccl over a Gloo group."""
    group = dist.ProcessGroupGloo(dist.PrefixStore("cards", store), rank, size)
    return Nccl(Noted(group), CPU, size)


class Memory:
    """What every thread reads of all others. left: of each rank; turn: rank -> what it does wrong:
    "stale" (a rank reads what another left before), "short" (the last numbers are not added),
    "apart" (a rank has other last bits), "raises", "none" (there is no such memory).
    """

    def __init__(self, rank, left, barrier, wrong=""):
        self.rank, self.left, self.barrier, self.wrong = rank, left, barrier, wrong
        self.before = None

    def buffer(self, count, dtype):
        if self.wrong == "none" and self.rank:
            raise RuntimeError("no peer access")
        return torch.zeros(count, dtype=dtype)

    def add(self, held, out):
        if self.wrong == "raises":
            raise RuntimeError("invalid argument")
        self.left[self.rank] = held.clone()
        self.barrier.wait(PATIENCE)
        parts = list(self.left)
        self.barrier.wait(PATIENCE)
        if self.wrong == "stale" and self.rank == 0:
            now, before = parts[1], self.before
            if before is not None and before.shape == now.shape:
                parts[1] = before
            self.before = now
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if self.wrong == "short":
            total = torch.cat([total[:-8], held[-8:]])
        if self.wrong == "apart" and self.rank == 1:
            total = total * (1 + torch.finfo(total.dtype).eps)
        out.copy_(total)


def cards_of(size, dtype, wrong="", may=lambda *given: ""):
    """(OnCard of every rank, its Nccl) after the test of one-shot sums through a Memory."""
    left, barrier = [None] * size, threading.Barrier(size)

    def make(rank, store):
        carrier, host = nccl(rank, size, store), Gloo(rank, size, store, PATIENCE)

        def agree(yes):
            out = torch.empty(size, 1)
            host.gather(torch.tensor([float(yes)]), out)
            return bool((out > 0).all())

        memory = Memory(rank, left, barrier, wrong)
        return on_card(carrier, rank, size, dtype, agree, lambda: memory, may)

    return together(size, make)


def ranks_on_cards(size):
    """A Ranks of every thread, whose tensors NCCL carries."""

    def make(rank, store):
        ranks = Ranks(rank, size, store, PATIENCE)
        ranks.hold_card(OnCard(nccl(rank, size, store)))
        return ranks

    return together(size, make)
