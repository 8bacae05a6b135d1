"""What a prompt's chunks leave in the heap, given back before it is too much."""

from __future__ import annotations

from engine.bank.pool.heap import free_in_heap, give_back
from engine.plan.free_memory import resident_bytes


class HeapLimit:
    """Gives what lies free in the heap back when the process has grown by more than `most` bytes
    since it did so last: what is needed again comes back, and no more.

    Activations of sizes that differ leave holes that the next ones do not fit into: a chunk of a
    model of 160 million parameters, which has at most 32 MB of them at a time, touches 70 to 120 MB
    of the heap (glibc 2.36). What lies free says nothing of it: it counts what was given back.
    Where the system or the C library does not say, nothing is done.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._before: int | None = None  # resident when it was last given back

    def keep(self) -> bool:
        """Look, and give back; whether it did."""
        now = resident_bytes()
        if now is None:
            return False
        if self._before is None or now < self._before:
            self._before = now
        if now - self._before <= self._most or free_in_heap() <= self._most:
            return False
        give_back()
        self._before = resident_bytes()
        return True
