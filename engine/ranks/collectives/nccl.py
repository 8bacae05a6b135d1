"""NCCL, which carries what lies on cards, inside CUDA graphs too.

A call puts its work on the current stream and returns. So it works where a step is captured: the
communicator is made before (a first call of each kind makes it), its buffers are the tensors that
the captured step has anyway, and a replay launches NCCL's kernels like any other. A process group
notes no captured work for its watchdog (torch's pull request 102542), and a capture in the mode
thread_local is not disturbed by what the watchdog asks about work before it (104555).

Nothing here waits for a card, so nothing here sees that another rank is gone: a kernel that waits
for it goes on waiting. `end` tells it to stop; who sees to it that a process does not wait for ever
stands in watch.py.

The order in which NCCL adds depends on the size of a message and on the cards' links: the same on
every run of a machine, the same bits on every rank, but for more than two ranks not those of
another size. Numbers of 16 bits are rounded after every addition or once, as NCCL chooses.
"""

from __future__ import annotations

import ctypes
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.base.errors import DeviceFailed
from engine.ranks.collectives.gloo import summed

# torch's own watchdog would end a process by a signal and pages of text; watch.py has a line
QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
WARM = (1, 1 << 16)  # elements of the first sums


class Nccl:
    """A Carrier of tensors on one card. group: a ProcessGroupNCCL, or what has its methods."""

    def __init__(self, group: Any, device: torch.device, size: int) -> None:
        self._group, self.device, self._size = group, device, size
        self._ended = False
        self._sum = _on_this_stream(summed())
        self._list = _on_this_stream(_options())

    @classmethod
    def made(
        cls, rank: int, size: int, store: dist.Store, device: torch.device, timeout: float
    ) -> Nccl:
        """Make the process group of a card's rank."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        kind: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined]
        options = kind.Options()
        options._timeout = timedelta(seconds=timeout)
        group = kind(dist.PrefixStore("omnikv-cards", store), rank, size, options)
        # never destroyed, at the end of the process neither: that would wait for every graph that
        # holds one of its collectives (vLLM's pull request 39846)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return cls(group, device, size)

    def adds(self, x: torch.Tensor) -> bool:
        """As Carrier."""
        return True

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """As Carrier, in place."""
        self._then(self._group.allreduce([x], self._sum))
        return x

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """As Carrier."""
        self._then(self._group._allgather_base(out.view(-1), x.view(-1), self._list))

    def warm_up(self, dtype: torch.dtype) -> None:
        """Make the communicator, and see that it adds and lists. Raises DeviceFailed."""
        for count in WARM:
            ones = torch.ones(count, dtype=dtype, device=self.device)
            out = ones.new_empty(self._size, count)
            self.gather(ones, out)
            listed = bool((out == 1).all())
            if not listed or not bool((self.add(ones) == self._size).all()):
                raise DeviceFailed(
                    f"NCCL: {count} ones of {self._size} ranks add up to something else on "
                    f"{self.device}; NCCL_P2P_DISABLE=1 takes the way through host memory"
                )

    def end(self) -> None:
        """As Carrier: the communicator is given up, by a thread that nobody waits for: it may wait
        for a card, and for graphs.
        """
        if not self._ended:
            self._ended = True
            threading.Thread(target=self._group.abort, daemon=True).start()

    @staticmethod
    def _then(work: Any) -> None:
        """Have the current stream go on behind a collective; the host does not wait."""
        if work is not None:
            work.wait()


def _options() -> Any:
    """Options of a list."""
    return torch._C._distributed_c10d.AllgatherOptions()


def _on_this_stream(options: Any) -> Any:
    """Options of a collective that runs on the current stream and no other, where torch can."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options
