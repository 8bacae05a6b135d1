"""The tokens of a stream without end: the newest of them, how many there were, and a digest of the
others.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from engine.base.errors import SettingError

BLOCK = 4096  # tokens that are dropped at once: `first` is a multiple of it
KEPT = 65536  # newest tokens that are held, and up to a block more
TYPE = "i"  # a token takes four bytes
BYTES = (KEPT + BLOCK) * array(TYPE).itemsize


class _Held(NamedTuple):
    """first: position of the oldest token that is held. past: digest of those before it."""

    first: int
    past: bytes
    ids: array


class NewestTokens(Sequence[int]):
    """Token ids by position, of which at least the newest `kept` are held; len() counts all.

    It is read like a list of all of them. What is gone raises SettingError. `[:n]` is a copy cut to
    n tokens; other slices are lists. Iteration gives those that are held.
    """

    def __init__(self, ids: Iterable[int] = (), kept: int | None = None) -> None:
        self.kept = KEPT if kept is None else kept
        self._held = _Held(0, b"", array(TYPE, ids))

    @classmethod
    def of(cls, first: int, past: bytes, ids: Iterable[int]) -> NewestTokens:
        """Tokens whose first so many are gone, and have this digest."""
        found = cls()
        found._held = _Held(first, past, array(TYPE, ids))
        return found

    @property
    def first(self) -> int:
        """Position of the oldest token that is held."""
        return self._held.first

    @property
    def past(self) -> bytes:
        """Digest of the tokens before `first`; empty where there are none."""
        return self._held.past

    def __len__(self) -> int:
        return self._held.first + len(self._held.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held.ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (NewestTokens, list)):
            return len(self) == len(other) == self.shared(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        first, _, ids = self._held
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                raise SettingError(f"tokens: found a step of {step}, expected 1")
            if at.start is None:
                return self._cut(stop)
            if start < min(first, stop):
                raise self._gone(start)
            return ids[start - first : max(stop, start) - first].tolist()
        index = at + len(self) if at < 0 else at
        if not 0 <= index < len(self):
            raise IndexError(f"token {at} of {len(self)}")
        if index < first:
            raise self._gone(index)
        return ids[index - first]

    def _gone(self, at: int) -> SettingError:
        return SettingError(
            f"tokens: found token {at:,} asked for, expected {self.first:,} or later: a stream "
            f"keeps its newest {self.kept:,} of {len(self):,}; make a new session"
        )

    def _cut(self, n: int) -> NewestTokens:
        first, past, ids = self._held
        if 0 < n < first:
            raise self._gone(n)
        found = NewestTokens(kept=self.kept)
        if n:
            found._held = _Held(first, past, ids[: max(0, n - first)])
        return found

    def copy(self) -> NewestTokens:
        """A copy that shares nothing."""
        return self._cut(len(self))

    # ---------------------------------------------------------------- writing

    def write(self, n: int, ids: Sequence[int]) -> None:
        """Have `ids` behind the first n tokens, and nothing else. May be called again."""
        first, past, held = self._cut(n)._held
        held.extend(ids)
        while len(held) >= self.kept + BLOCK and first + BLOCK <= n:
            past, first = _after(past, held[:BLOCK]), first + BLOCK
            del held[:BLOCK]
        self._held = _Held(first, past, held)

    def __setitem__(self, at: slice, ids: Sequence[int]) -> None:
        """Have `ids` from a position on, and nothing behind them. May be called again."""
        first, _, held = self._held
        n = len(self) if at.start is None else at.start
        if n < first or len(held) + len(ids) >= self.kept + BLOCK:
            self.write(n, ids)
        else:  # without a copy of those before
            held[n - first :] = array(TYPE, ids)

    def __delitem__(self, at: slice) -> None:
        self.write(at.start or 0, [])

    # ---------------------------------------------------------------- comparing

    def shared(self, other: Sequence[int]) -> int:
        """Length of the longest common beginning; 0 where `other` departs in what is gone, or ends
        there.
        """
        first, past, ids = self._held
        if len(other) < first or _digest(other, first) != past:
            return 0
        theirs = itertools.islice(other, first, None) if isinstance(other, list) else other[first:]
        count = first
        for mine, their in zip(ids, theirs, strict=False):
            if mine != their:
                break
            count += 1
        return count


def _after(past: bytes, block: array) -> bytes:
    """The digest of tokens whose digest was `past`, and a block more."""
    return hashlib.blake2b(past + block.tobytes(), digest_size=32).digest()


def _digest(ids: Sequence[int], stop: int) -> bytes:
    """The digest of the first `stop` tokens."""
    known = ids.first if isinstance(ids, NewestTokens) else 0
    past = ids.past if isinstance(ids, NewestTokens) else b""
    if known > stop:
        return b"gone"
    for start in range(known, stop, BLOCK):
        past = _after(past, array(TYPE, ids[start : start + BLOCK]))
    return past
