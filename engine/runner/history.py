"""The history of a session: a savepoint at the end of each prompt, and the replay that a truncate
or an interrupted commit has left pending.

A record and nothing else: engine/runner/prompt.py ends prompts, engine/runner/rewind.py goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.bank.recurrent.savepoints import Savepoints, cheapest
from engine.base.newest_tokens import NewestTokens


@dataclass(frozen=True)
class Savepoint:
    """The end of a prompt. start, length: the bank's length before and after it; state: the
    runtime's state after it.

    logits: float32 [vocab] of the prompt's last token. open: the prompt is continued by the next
    prefill. switched: another method read the tokens, and this one took them for one prompt.
    """

    start: int
    length: int
    state: Any = field(repr=False, default=None)
    logits: torch.Tensor | None = field(repr=False, default=None)
    open: bool = False
    switched: bool = False

    def ends(self, part: Savepoint) -> bool:
        """Return whether a decode step added this savepoint to end the open prompt of `part`."""
        here = (self.start, self.length, self.open)
        return part.open and here == (part.start, part.length, False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in `state`."""

        def size(thing: Any) -> int:
            if isinstance(thing, torch.Tensor):
                return thing.numel() * thing.element_size()
            return sum(map(size, thing)) if isinstance(thing, (list, tuple)) else 0

        return size(self.state)


@dataclass(frozen=True)
class PendingReplay:
    """Work left by a truncate or an interrupted commit: replay `ids`. ends: savepoints before the
    truncate. open: the last prompt is to be continued. inconsistent: a commit was interrupted.
    """

    ids: list[int] | NewestTokens
    ends: list[Savepoint]
    inconsistent: bool = False
    open: bool = False


def reopened(points: list[Savepoint], n: int | None = None) -> list[Savepoint]:
    """Savepoints without the prompt ends that a decode step added at length n (any length if None).
    Undoing that step reopens the prompt.
    """
    return [
        point
        for before, point in zip([None, *points], points, strict=False)
        if not (before and point.ends(before) and n in (None, point.length))
    ]


class History:
    """The savepoints of one session, oldest first, and its pending replay. states: at most
    `most_states` earlier states of its recurrent layers. most_stores: of the savepoints that keep a
    method's state; None: all do. A session that forgets has the stores of these and no others.
    """

    def __init__(self, most_states: int = 0) -> None:
        self.states = Savepoints(most_states)
        self.most_stores: int | None = None
        self.savepoints: list[Savepoint] = []
        self.pending: PendingReplay | None = None  # runs before the next step
        self.initial: Any = None  # the runtime's state before the first prompt

    @property
    def latest(self) -> Savepoint | None:
        """The newest savepoint."""
        return self.savepoints[-1] if self.savepoints else None

    @property
    def prompt_length(self) -> int:
        """Tokens in the bank at the end of the latest prompt; 0 before the first."""
        return self.savepoints[-1].length if self.savepoints else 0

    @property
    def ends(self) -> list[Savepoint]:
        """The savepoints before the pending replay; without one, those now."""
        return self.pending.ends if self.pending else self.savepoints

    @property
    def nbytes(self) -> int:
        """Bytes of the savepoints' states."""
        return sum(point.nbytes for point in self.savepoints)

    def prompt_is_open(self, length: int) -> bool:
        """Return whether the prompt that ended at `length` is to be continued."""
        latest = self.latest
        return latest is not None and latest.open and latest.length == length

    def prompt_begin(self, start: int) -> int:
        """Return the first position of the prompt that is continued at `start`; `start` if none."""
        for point in reversed(self.savepoints):
            if not point.open or point.length != start:
                break
            start = point.start
        return start

    def begin(self, initial: Any, points: list[Savepoint], most_stores: int | None = None) -> None:
        """Record a new runtime's state before its first prompt, and the savepoints under it."""
        self.initial, self.most_stores = initial, most_stores
        self.savepoints = self._thinned(points)

    def add(self, point: Savepoint) -> None:
        """Record the end of a prompt."""
        # a new list: a replay may hold the old one
        self.savepoints = self._thinned([*self.savepoints, point])

    def make_way(self, length: int) -> None:
        """Let go of the store that `add` would let go of, before another is made at `length`: no
        more are held at any time than may be kept.
        """
        self.savepoints = self._thinned([*self.savepoints, Savepoint(length, length, ())])[:-1]

    def _thinned(self, points: list[Savepoint]) -> list[Savepoint]:
        """The savepoints, of which no more keep a state than may: those go that cost least."""
        if self.most_stores is None:
            return points
        held = [i for i, point in enumerate(points) if point.state is not None]
        while len(held) > self.most_stores:
            del held[cheapest([(points[i].length, True) for i in held])]
        kept = {*held, len(points) - 1}  # a step may end the newest one's prompt with its logits
        return [
            replace(
                point,
                state=point.state if i in held else None,
                logits=point.logits if i in kept else None,
            )
            for i, point in enumerate(points)
        ]

    def forget_before(self, first: int) -> None:
        """Drop savepoints of a stream that no session can return to: the tokens before `first`,
        which lead on from them, are gone. The newest one stays, without its state.
        """
        if not self.savepoints or self.savepoints[0].length >= first:
            return
        *older, newest = self.savepoints
        if newest.length < first and (older or newest.state is not None):
            older, newest = [], replace(newest, state=None, logits=None)
        self.savepoints = [*(point for point in older if point.length >= first), newest]

    def loadable(self, point: Savepoint) -> bool:
        """Say whether a session can return to a savepoint without what came before it."""
        return self.most_stores is None or point.state is not None

    def keep(self, points: list[Savepoint]) -> None:
        """Replace the savepoints."""
        self.savepoints = points

    def postpone(self, pending: PendingReplay | None) -> None:
        """Set the replay that runs before the next step; None: there is none."""
        self.pending = pending

    def invalidate(self, ids: list[int] | NewestTokens, start: int) -> None:
        """Mark the runtime for rebuilding before the next step. ids: the committed tokens. start:
        first position of the prompt being read, else the number of ids.
        """
        if self.pending is None or self.pending.inconsistent:
            ends = list(self.savepoints)
            if self.prompt_length < len(ids) and start < len(ids):
                ends.append(Savepoint(start, len(ids) + 1))
            self.pending = PendingReplay(ids.copy(), ends, inconsistent=True)

    def copy_from(self, other: History) -> None:
        """Copy another session's savepoints (fork)."""
        self.savepoints, self.initial = list(other.savepoints), other.initial
        self.most_stores = other.most_stores
        self.states.copy_from(other.states)
