"""torch.distributed's Gloo group, which carries what lies in host memory over sockets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.base.figures import first_line
from engine.ranks.collectives.carrier import CollectiveFailed


class Gloo:
    """A Carrier of CPU tensors. store: where the processes meet. timeout: seconds that a rank waits
    for the others.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: float) -> None:
        wait = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("omnikv-ranks", store), rank, size, wait
        )

    def adds(self, x: torch.Tensor) -> bool:
        """As Carrier."""
        return True

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """As Carrier; 16 bits are added in float32."""
        wide = x.float() if x.element_size() == 2 else x.clone()
        self._wait(self._group.allreduce([wide], summed()))
        return wide.to(x.dtype)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """As Carrier."""
        self._wait(self._group.allgather([list(out.unbind(0))], [x]))

    def meet(self) -> None:
        """Wait until every rank is here."""
        self._wait(self._group.barrier())

    def end(self) -> None:
        """Nothing: a rank that waits hears of the end of another by its socket."""

    @staticmethod
    def _wait(work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveFailed(first_line(error)) from None


def summed() -> dist.AllreduceOptions:
    """Options of a sum."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    return options
