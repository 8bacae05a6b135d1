"""Ranks of one model as threads of one process: what each holds and computes is as among processes,
and no process has to start. Sums are taken in the order of ranks.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.ranks.group import Ranks, Sent
from engine.ranks.share_llm import ShareLLM

PATIENCE = 60  # seconds that a thread waits for the others


class ThreadRanks(Ranks):
    """A rank that meets the others at a barrier and reads what they left."""

    def __init__(self, rank, size, barrier, left):
        self.rank, self.size, self.segment = rank, size, None
        self.sent, self._alone, self._refused = Sent(), False, ""
        self._barrier, self._left = barrier, left

    def _exchanged(self, x):
        self._left[self.rank] = x.contiguous().clone()
        self._barrier.wait(PATIENCE)
        found = list(self._left)
        self._barrier.wait(PATIENCE)
        return found

    def add(self, x):
        self._count(x)
        return sum(part.float() for part in self._exchanged(x)).to(x.dtype)

    def gathered(self, x, counted=True):
        if counted:
            self._count(x)
        return torch.stack(self._exchanged(x))


class Together:
    """A model held by `size` threads. `each(work)`: what work(llm) gives on every rank. ranks: of
    every rank; None: ThreadRanks.
    """

    def __init__(self, model, size, selection="global", split_by="heads", ranks=None, **settings):
        self.barrier, left = threading.Barrier(size), [None] * size
        self.pool = ThreadPoolExecutor(size)
        self.ranks = ranks or [ThreadRanks(rank, size, self.barrier, left) for rank in range(size)]
        self.llms = []
        for rank in range(size):
            llm = ShareLLM(model, (rank, size), selection, split_by, **settings)
            llm.hold(self.ranks[rank])
            self.llms.append(llm)
        for llm in self.llms:
            llm.load()

    def each(self, work, *given):
        """work(llm, *given) on every rank at once: the results in the order of ranks."""

        def run(llm):
            try:
                return work(llm, *given)
            except BaseException:
                self.barrier.abort()
                raise

        found = [self.pool.submit(run, llm) for llm in self.llms]
        errors = [done.exception() for done in found]
        self.barrier.reset()
        first = [e for e in errors if e and not isinstance(e, threading.BrokenBarrierError)]
        for error in first or [e for e in errors if e]:
            raise error
        return [done.result() for done in found]
