"""The processes that hold one model together, and what they tell each other in a step.

Sums and lists go through torch.distributed's Gloo group, and those of a step on one machine through
a segment of shared memory (engine/ranks/segment.py), which takes microseconds where Gloo takes
hundreds. Every rank gets the same bits: what is a sum is added in the order of ranks, or in one
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.base.errors import RankLost, SettingError
from engine.base.figures import first_line
from engine.model.config.share import Part
from engine.ranks.segment import Segment

TIMEOUT = 120.0  # seconds that a rank waits for the others


@dataclass
class Sent:
    """What a rank has brought into collectives: calls, and bytes of its own tensors."""

    calls: int = 0
    bytes: int = 0


class Ranks:
    """One process's place among `size`: its number `rank`, and the collectives of the model.

    store: of torch.distributed, where the processes meet. timeout: seconds. segment: shared memory
    for small tensors; None: Gloo carries all.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        timeout: float = TIMEOUT,
        segment: Segment | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.segment = rank, size, timeout, segment
        self.sent = Sent()
        self._alone, self._refused = False, ""
        wait = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("omnikv-ranks", store), rank, size, wait
        )

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [...] over ranks, of x's dtype; 16 bits are added in float32."""
        self._count(x)
        x = x.contiguous()
        if self.segment is not None and self.segment.adds(x):
            found, why = self.segment.add(x)
            self._require(not why, why)
            return found
        wide = x.float() if x.element_size() == 2 else x.clone()
        self._wait(self._group.allreduce([wide], _sum()))
        return wide.to(x.dtype)

    def beside(self, x: torch.Tensor, parts: tuple[Part, ...]) -> torch.Tensor:
        """x [..., part] of every rank side by side: [..., whole]; parts: of each rank."""
        self._count(x)
        whole = x.new_empty(*x.shape[:-1], parts[0].of)
        widest = max(part.size for part in parts)
        own = x.new_zeros(*x.shape[:-1], widest)
        own[..., : x.shape[-1]] = x
        for part, theirs in zip(parts, self.gathered(own, counted=False)):
            whole[..., part.first : part.stop] = theirs[..., : part.size]
        return whole

    def gathered(self, x: torch.Tensor, counted: bool = True) -> torch.Tensor:
        """x [...] of every rank, in the order of ranks: [size, ...]."""
        if counted:
            self._count(x)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        if self.segment is not None:
            why = self.segment.gathered(x, out)
            self._require(not why, why)
            return out
        self._wait(self._group.allgather([list(out.unbind(0))], [x]))
        return out

    def said(self, *numbers: int) -> list[list[int]]:
        """What each rank says, in the order of ranks; all say as many numbers, int64."""
        found: list[list[int]] = self.gathered(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return found

    def texts(self, text: str) -> list[str]:
        """A text of each rank, in the order of ranks."""
        own = text.encode("utf-8", "replace")
        sizes = [size for (size,) in self.said(len(own))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        rows = self.gathered(padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes)]

    def follow_calls(self) -> None:
        """From now on the ranks meet inside `together` alone: what one of them computes beside it
        would wait for the others for ever.
        """
        self._alone = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """A call that every rank makes."""
        before, self._alone = self._alone, False
        try:
            yield
        finally:
            self._alone = before

    def refuse(self, why: str) -> None:
        """Raise RankLost from now on."""
        self._refused = self._refused or why
        if self.segment is not None:
            self.segment.end()

    def meet(self) -> None:
        """Wait until every rank is here."""
        self._wait(self._group.barrier())

    def _count(self, x: torch.Tensor) -> None:
        if self._refused:
            raise RankLost(self._refused)
        if self._alone:
            raise SettingError(
                f"ranks: found {self.size}, but this works on one process: only calls of sessions "
                "are made by all ranks"
            )
        self.sent.calls += 1
        self.sent.bytes += x.numel() * x.element_size()

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective; RankLost where another rank is gone or late."""
        try:
            work.wait()
        except RuntimeError as error:
            self._require(False, first_line(error))

    def _require(self, well: bool, why: str) -> None:
        """Raise RankLost where a collective has failed; every later one fails too."""
        if not well:
            self.refuse(f"rank {self.rank} lost the others: {why}")
            raise RankLost(self._refused)


def _sum() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return options
