"""Host memory of the layers that stream: one packed buffer for each, page-locked for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch

from engine.bank.pool.pinned_memory import Allocator, allocators_here, limits
from engine.base.errors import OutOfHostMemory
from engine.base.figures import first_line, human
from engine.plan.free_memory import available_bytes


class HostMemory:
    """Allocates buffers of host memory: from the allocators in order, going on with the next where
    one refuses. allocators, free: of tests; None: this machine's, and a function that returns the
    bytes of its free RAM.
    """

    def __init__(
        self,
        device: torch.device,
        allocators: Iterable[Allocator] | None = None,
        free: Callable[[], int] | None = None,
    ) -> None:
        self._asked = device.type == "cuda"
        self._allocators = list(allocators or allocators_here(self._asked))
        self._free = free or (lambda: available_bytes(torch.device("cpu"))[0])
        self._refusals: list[str] = []
        self.pinned = True  # whether a GPU reads all that was taken while the host does other work

    def take(self, size: int) -> torch.Tensor:
        """Allocate uint8 [size]. Raises OutOfHostMemory where there is no room for it at all."""
        if size > (free := self._free()):
            # locked pages are taken at once: a machine without them would end the process
            raise self._full(size, f"{human(free)} are free")
        while True:
            allocator = self._allocators[0]
            try:
                memory = allocator.allocate(size)
            except (RuntimeError, MemoryError, OSError) as error:
                self._refusals.append(f"{allocator.name}: {first_line(error)}")
                if len(self._allocators) == 1:
                    raise self._full(size, self._refusals[-1]) from error
                del self._allocators[0]
                continue
            self.pinned = self.pinned and allocator.pinned
            return memory

    def _full(self, size: int, why: str) -> OutOfHostMemory:
        return OutOfHostMemory(
            f"no host memory for another layer's weights of {human(size)}: {why}; {limits()}, "
            "weights='int4', fewer layers in weights_offload"
        )

    def report(self) -> None:
        """Warn in one line where a GPU was to read page-locked memory and does not."""
        if self._asked and not self.pinned:
            warnings.warn(
                "weights that stream lie in ordinary memory, pinning was refused "
                f"({'; '.join(self._refusals)}): copies wait for the host and no step is captured; "
                "remedy: ulimit -l unlimited",
                stacklevel=2,
            )
