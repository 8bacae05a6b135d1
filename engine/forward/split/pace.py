"""How far a prompt's chunks are issued ahead of what the devices have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.base.device import current, synchronize

# records what is issued to a device so far, and returns what waits for it
Mark = Callable[[torch.device], Callable[[], object]]


class ChunkPace:
    """On one device the host waits for each chunk. On several it issues a chunk to all of them and
    then waits for the chunk before it: so the first device begins chunk i + 1 while the second
    works on chunk i, at most one chunk is in flight beside the one that is issued, and Ctrl-C and
    the time left are as good as a chunk. mark: for tests.
    """

    def __init__(self, devices: Sequence[torch.device], mark: Mark | None = None) -> None:
        self._devices, self._mark = devices, mark or marked
        self._before: Callable[[], object] | None = None  # waits for the chunk before

    def ended(self, last: bool) -> None:
        """A chunk is issued. last: nothing follows, so wait for it."""
        if len(self._devices) == 1 or last:
            self._before = None
            for device in self._devices:
                synchronize(device)
            return
        # the last device ends last
        now = self._mark(self._devices[-1])
        if self._before is not None:
            self._before()
        self._before = now


def marked(device: torch.device) -> Callable[[], object]:
    """An event of a GPU's work so far: returns what waits for it. A CPU has done its work."""
    if device.type != "cuda":
        return lambda: None
    with current(device):
        event = torch.cuda.Event()
        event.record()
    return event.synchronize
