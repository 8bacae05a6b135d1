"""The sessions that a worker holds. A request gets the one whose tokens begin as its own do; what
they share is not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.base.errors import SettingError
from engine.base.newest_tokens import NewestTokens
from engine.batch.batch import Batch
from engine.methods.base import Method
from engine.runner.ranks.led import led
from engine.runner.rewind import point_before
from engine.runner.rollback import exclusive
from engine.saved.cache import BlockCache
from engine.session.session import Session

WORTH = 16  # tokens; a shorter common beginning is not worth a copy


@dataclass
class Slot:
    """A held session. used: when it last began an answer, for the least recently used. owner:
    whose key asked for that answer.
    """

    session: Session
    busy: bool = False
    used: int = 0
    owner: bytes = b""


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists of ids."""
    if isinstance(one, NewestTokens):
        return one.shared(other)
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def going_back(session: Session, n: int, total: int) -> int:
    """Of the first n tokens, how many a session may keep for a prompt of `total` tokens so that
    none runs again. Those that it holds all, and a prompt that goes on from them: every one.
    """
    if n < len(session) and session.loaded.config.rope.kind == "dynamic":
        return 0  # they were rotated for a prompt of another length
    n = point_before(session, n, total)
    return n if _goes_on(session.method, n, total) else 0


def _goes_on(method: Method, n: int, total: int) -> bool:
    """Whether a session of n tokens may read a prompt up to `total`."""
    try:
        if n < total:
            method.validate_prompt(n, total)
    except SettingError:
        return False
    return True


def copies(source: Session, n: int, total: int) -> bool:
    """Whether another session may have the rows of the first n tokens of `source`, and no more of
    it, for a prompt of `total` tokens.
    """
    return (
        source.runtime.needs.history == "bank"
        and source.history.pending is None
        and source.loaded.config.rope.kind != "dynamic"
        and source.bank.holds(n)
        and _goes_on(source.method, n, total)
    )


@led
def begin_as(session: Session, source: Session, ids: list[int]) -> None:
    """Have a session hold `ids`, which are the first tokens of another's, and no more of it."""
    n = len(ids)
    session.truncate(0)
    with exclusive(session.loaded):
        session.bank.copy_from(source.bank, n)
    session.adopt(ids, source.origins.of(0, n), source.history.states)


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

    def take(
        self, ids: list[int], method: Method | None = None, anew: bool = False
    ) -> tuple[Slot, int]:
        """(a slot, how many first tokens of `ids` its session holds now). method: what the rest
        will be read with; None: as the session is. anew: hold none, all are read.
        """
        self._turn += 1
        shared = {id(slot): 0 if anew else common(slot.session.ids, ids) for slot in self.slots}
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
            held = self._prepare(slot, ids, method, shared, source, best)
            if self.cache is not None and not anew:
                held = self.cache.fill(slot.session, ids)
            return slot, held
        except BaseException:
            self.drop(slot)
            raise

    def _prepare(
        self,
        slot: Slot,
        ids: list[int],
        method: Method | None,
        shared: dict[int, int],
        source: Session | None,
        best: Slot | None,
    ) -> int:
        """Have a session hold the first tokens of `ids`, as many as it may without running any
        again, or as `source` can give it; how many.
        """
        session = slot.session
        held = going_back(session, shared[id(slot)], len(ids))
        theirs = min(shared[id(best)], len(ids) - 1) if best is not None else 0
        if source is not None and source.bank.recurrent is not None:
            theirs = source.history.states.reach(theirs)
        worth = theirs >= max(held + WORTH, 2 * WORTH)
        if source is not None and worth and copies(source, theirs, len(ids)):
            begin_as(session, source, ids[:theirs])
            held = theirs
        else:
            session.truncate(held)
        if method is not None and session.method != method:
            session.set_method(method)
        return held

    def release(self, slot: Slot) -> None:
        """The slot's answer has ended; its session stays."""
        slot.busy = False

    def drop(self, slot: Slot) -> None:
        """Close a session that something went wrong with."""
        if slot in self.slots:
            self.slots.remove(slot)
        slot.session.close()

    def forget(self, ids: list[int], owner: bytes = b"") -> int:
        """Close the idle sessions of `owner` whose tokens begin with `ids`; how many."""
        idle = [slot for slot in self.slots if not slot.busy and slot.owner == owner]
        held = [slot for slot in idle if common(slot.session.ids, ids) == len(ids)]
        for slot in held:
            self.drop(slot)
        return len(held)

    def close(self) -> None:
        """Close all sessions."""
        while self.slots:
            self.drop(self.slots[0])
