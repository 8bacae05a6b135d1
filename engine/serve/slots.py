"""The sessions that a server holds. A request gets the one whose tokens begin as its own do; what
they share is not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.saved.cache import follows_from_tokens

if TYPE_CHECKING:
    from engine.batch import Batch
    from engine.saved.cache import BlockCache
    from engine.session import Session

WORTH = 16  # tokens; a shorter common beginning is not worth a copy


@dataclass
class Slot:
    """A held session. used: when it last began an answer, for the least recently used."""

    session: Session
    busy: bool = False
    used: int = 0


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists of ids."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


class Slots:
    """The sessions of a batch, made when first needed."""

    def __init__(self, batch: Batch, cache: BlockCache | None = None) -> None:
        self.batch, self.count, self.cache = batch, batch.slots, cache
        self.slots: list[Slot] = []
        self._turn = 0

    @property
    def free(self) -> bool:
        """Whether a request could begin."""
        return len(self.slots) < self.count or any(not slot.busy for slot in self.slots)

    def take(self, ids: list[int]) -> tuple[Slot, int]:
        """(a slot, how many first tokens of `ids` its session holds now)."""
        self._turn += 1
        shared = {id(slot): common(slot.session.ids, ids) for slot in self.slots}
        idle = [slot for slot in self.slots if not slot.busy]
        best = max(self.slots, key=lambda slot: shared[id(slot)], default=None)
        mine = max(idle, key=lambda slot: shared[id(slot)], default=None)
        if mine is not None and 2 * shared[id(mine)] <= len(mine.session):
            # another conversation: let it stand as long as there is room
            mine = None
        slot = mine
        if slot is None and len(self.slots) < self.count:
            slot = Slot(self.batch.session())
            self.slots.append(slot)
            shared[id(slot)] = 0
        if slot is None:
            slot = min(idle, key=lambda slot: slot.used)
        slot.busy, slot.used = True, self._turn
        try:
            source = best.session if best is not None and best is not slot else None
            if source is not None and source.method != slot.session.method:
                source = None  # another method may keep its rows in another layout
            return slot, self._prepare(slot.session, ids, shared, slot, source, best)
        except BaseException:
            self.drop(slot)
            raise

    def _prepare(
        self,
        session: Session,
        ids: list[int],
        shared: dict[int, int],
        slot: Slot,
        source: Session | None,
        best: Slot | None,
    ) -> int:
        if not follows_from_tokens(session):
            session.truncate(0)
            return 0
        held = shared[id(slot)]
        theirs = min(shared[id(best)], len(ids) - 1) if best is not None else 0
        if source is not None and theirs >= max(held + WORTH, 2 * WORTH):
            session.truncate(0)
            with self.batch.llm.busy(), torch.inference_mode():
                session.bank.copy_from(source.bank, theirs)
            session.adopt(ids[:theirs])
            held = theirs
        else:
            session.truncate(held)
        if self.cache is not None:
            held = self.cache.fill(session, ids)
        return held

    def release(self, slot: Slot) -> None:
        """The slot's answer has ended; its session stays."""
        slot.busy = False

    def drop(self, slot: Slot) -> None:
        """Close a session that something went wrong with."""
        if slot in self.slots:
            self.slots.remove(slot)
        slot.session.close()

    def forget(self, ids: list[int]) -> int:
        """Close the idle sessions whose tokens begin with `ids`; how many."""
        held = [s for s in self.slots if not s.busy and common(s.session.ids, ids) == len(ids)]
        for slot in held:
            self.drop(slot)
        return len(held)

    def close(self) -> None:
        """Close all sessions."""
        while self.slots:
            self.drop(self.slots[0])
