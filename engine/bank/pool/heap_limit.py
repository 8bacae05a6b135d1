"""What a prompt's chunks leave in the heap, given back before it is too much."""

from __future__ import annotations

from engine.bank.pool.heap import free_in_heap, give_back, used_of_heap
from engine.plan.free_memory import resident_bytes
from kernels.native.own_pages import mapped_bytes


class HeapLimit:
    """Gives what lies free in the heap back when holes have come to take more than `most` bytes of
    memory since they took least: what is needed again comes back, and no more.

    Activations of sizes that differ leave holes that the next ones do not fit into: a chunk of a
    model of 160 million parameters, which has at most 32 MB of them at a time, touches 70 to 120 MB
    of the heap (glibc 2.36). What lies free says nothing of it: it counts what was given back. So
    holes are what is resident and lives neither in the heap nor in pages of its own
    (kernels/native/own_pages.py), over what that was where it was least: libraries, stacks. What
    other parts of the process write into mappings of their own counts as holes too. Where the
    system or the C library does not say, nothing is done.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least: int | None = None  # resident bytes where nothing lives, when they were fewest
        self._untouched: dict[int, int] = {}

    def keep(self, untouched: int = 0, bank: int = 0) -> bool:
        """Look, and give back; whether it did. untouched: bytes of pages of their own that nothing
        was written to yet, so that they take no memory, in the bank of this number; those of a
        model's other parts are as they said last.
        """
        self._untouched[bank] = untouched
        untouched = sum(self._untouched.values())
        now = _idle(untouched)
        if now is None:
            return False
        if self._least is None or now < self._least:
            self._least = now
        if now - self._least <= self._most or free_in_heap() <= self._most:
            return False
        give_back()
        self._least = _idle(untouched)
        return True


def _idle(untouched: int) -> int | None:
    """Resident bytes in which nothing lives that is known of."""
    resident = resident_bytes()
    if resident is None:
        return None
    return resident - used_of_heap() - (mapped_bytes() - untouched)
