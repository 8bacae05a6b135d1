"""A segment of shared memory for what the ranks of one machine tell each other in a step."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import torch

from engine.ranks.collectives.carrier import CollectiveFailed
from kernels.ranks import join

SLOT = 1 << 20  # bytes that a rank leaves at a time: a chunk's sums take several
MEMORY = Path("/dev/shm")


def new_segment(ranks: int, fallback: str) -> str:
    """Make the file of a segment and return its path. fallback: a folder where the system has no
    MEMORY.
    """
    folder = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(fallback)
    number, path = tempfile.mkstemp(prefix="omnikv-ranks-", dir=folder)
    with os.fdopen(number, "wb") as file:
        file.truncate(join.segment_bytes(ranks, SLOT))
    return path


class Segment:
    """A Carrier: one rank's place in the segment at `path`. timeout: seconds that it waits for
    another.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout: float) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        # a page that a rank writes first lies at its own node
        self._held = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(self._held)
        self._joins = join.Joins(address, SLOT, rank, ranks, timeout)

    def adds(self, x: torch.Tensor) -> bool:
        """As Carrier."""
        return x.dtype in join.SUMS

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """As Carrier; added in float32, in the order of ranks."""
        out, code = self._joins.add(x)
        _require(code)
        return out

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """As Carrier."""
        _require(self._joins.listed(x, out))

    def end(self) -> None:
        """As Carrier."""
        self._joins.end()


def _require(code: int) -> None:
    """Raise CollectiveFailed where a call has not come to its end."""
    if code:
        gone = code == join.ENDED
        raise CollectiveFailed("another rank has ended" if gone else "another rank did not come")
