"""The C++ kernels that multiply in tiles of AMX: whether this process runs them.

They are off until OMNIKV_AMX=1 asks for them, since no machine has timed them ahead yet
(`python -m tools.speed.amx` does), and tiles of bfloat16 sum in another order than vectors, so that
the choice must not depend on a timing.
"""

from __future__ import annotations

import ctypes
import functools
import warnings

from kernels.launch.isa import wants_tiles
from kernels.native.library import Binding, missing, native

REASONS = {
    1: "its compiler knows no AMX: install GCC 11 or clang 12, or newer ones",
    2: "the system refuses tiles to this process: Linux gives them from 5.16 on",
}


class TileBinding(Binding):
    """Functions that multiply in tiles: usable where tiles are wanted, allowed and right."""

    def __init__(self, name: str, **sizes: type[ctypes.Structure]) -> None:
        super().__init__(name, **sizes)
        TILES.append(self)

    def usable(self) -> bool:
        """Whether they run in this process; the first call compiles and tries them."""
        return wanted() and super().usable()


TILES: list[TileBinding] = []


def wanted() -> bool:
    """Whether tiles are asked for, in this CPU, and given to this process. Where the library or
    the system has none, warns once: other forms run.
    """
    return wants_tiles() and not refused(native())


@functools.cache
def refused(library: ctypes.CDLL | None) -> str:
    """Why a process that asks for tiles has none, "" where it has: the system is asked once."""
    why = REASONS.get(library.omnikv_allow_tiles(), "") if library is not None else missing()
    if why:
        warnings.warn(f"OMNIKV_AMX=1 changes nothing here: {why}", stacklevel=3)
    return why


def in_use() -> tuple[str, ...]:
    """Name the products that run in tiles here: their results differ from other forms' in the last
    bits.
    """
    return tuple(binding.name for binding in TILES if binding.usable())
