"""What a session should hold, and a fresh session that was brought there by the shortest way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.errors import SettingError
from engine.llm import LLM
from engine.methods.base import Method
from engine.session import Session
from tests.engine.methods.method_table import Row

TOLERANCE = 2e-3  # of logits that range over +-5; another selection moves them by 0.1 and more
# what an interrupted prompt leaves depends on the length that it was to have
FORESEES = ("scissorhands",)


@dataclass(frozen=True)
class Under:
    """A method of the table, with its row."""

    method: Method
    row: Row

    @property
    def keeps_rows(self) -> bool:
        """Whether going back leaves the bank's rows as they were read."""
        return not (self.row.evicts or self.row.replays)


@dataclass(frozen=True)
class Event:
    """A prompt or a part of one (kind "prefill"), a token ("decode"), or a "switch"."""

    kind: str
    under: Under
    ids: tuple[int, ...] = ()
    more: bool = False


@dataclass
class Model:
    """events: what a fresh session has to do to be in this one's state.

    inexact: position from which rows depend on tokens that are gone, as the method says they do;
    nothing is compared while it holds such rows. logits: whether the newest token's logits follow
    from the events.
    """

    begun: Under
    events: list[Event] = field(default_factory=list)
    inexact: int | None = None
    logits: bool = True

    @property
    def ids(self) -> list[int]:
        """The session's tokens."""
        return [token for event in self.events for token in event.ids]

    @property
    def under(self) -> Under:
        """The method now."""
        return self.events[-1].under if self.events else self.begun

    def copy(self) -> Model:
        """A model that goes its own way."""
        return replace(self, events=list(self.events))

    def add(self, kind: str, ids: list[int], more: bool = False) -> None:
        """Tokens were read or decoded."""
        self.events.append(Event(kind, self.under, tuple(ids), more))
        self.logits = True

    def switch(self, under: Under) -> None:
        """Another method goes on."""
        self.events.append(Event("switch", under))

    def interrupted(self, ids: list[int], wanted: int, more: bool) -> None:
        """Of a prompt of `wanted` tokens these were read."""
        row = self.under.row
        at = len(self.ids)
        self.add("prefill", ids, more)
        self.logits = False
        if len(ids) < wanted and (row.approximate or row.name in FORESEES):
            self.inexact = at if self.inexact is None else self.inexact

    def truncate(self, n: int) -> None:
        """Only the first n tokens are left. Switches that came later come now."""
        now, kept, later, at = self.under, [], [], 0
        if n == len(self.ids):
            return
        for event in self.events:
            if event.kind == "switch":
                (kept if at <= n else later).append(event)
            elif at < n:
                part = event.ids[: n - at]
                whole = len(part) == len(event.ids)
                # a prompt that is cut is read again, unless its rows stay
                stays = now.keeps_rows or event.under is not now or later
                if not whole and stays and event.under.row.approximate:
                    self.inexact = at if self.inexact is None else min(self.inexact, at)
                kept.append(replace(event, ids=part, more=event.more and whole))
            at += len(event.ids)
        self.events = kept + later
        self.logits = not any(event.kind == "switch" for event in self.events)
        if self.inexact is not None and n <= self.inexact:
            self.inexact = None
        if not self.events:
            self.begun = now

    @property
    def replayable(self) -> bool:
        """Whether a fresh session may read these prompts: a truncate may leave less of one than its
        method begins with.
        """
        at = 0
        for event in self.events:
            if event.kind == "prefill":
                try:
                    event.under.method.validate_prompt(at, at + len(event.ids))
                except SettingError:
                    return False
            at += len(event.ids)
        return True

    def replay(self, llm: LLM, offload: str, backend: str) -> Session:
        """A fresh session in this state."""
        session = llm.session(self.begun.method, offload=offload)
        if backend != session.backend:
            session.set_backend(backend)
        for event in self.events:
            if event.kind == "switch":
                session.set_method(event.under.method)
            elif event.kind == "prefill":
                session.prefill(event.ids, more=event.more)
            else:
                for token in event.ids:
                    session.decode(token)
        return session


def differences(session: Session, fresh: Session, logits: bool, probe: tuple[int, ...]) -> str:
    """How a session differs from a fresh one in its next steps; empty where it does not."""
    if session.ids != fresh.ids:
        return f"{len(session)} tokens that differ from {len(fresh)}"
    if logits and session.last_logits is not None and fresh.last_logits is not None:
        by = float((session.last_logits - fresh.last_logits).abs().max())
        if not by <= TOLERANCE:
            return f"the newest token's logits differ by {by:.3g}"
    with session.fork() as copy:
        for number, token in enumerate(probe[: session.capacity - len(session)]):
            mine, theirs = outcome(copy, token), outcome(fresh, token)
            if isinstance(mine, str) or isinstance(theirs, str):
                return "" if mine == theirs else f"a step gives {mine!r}, should be {theirs!r}"
            by = float((mine - theirs).abs().max())
            if not by <= TOLERANCE:
                return f"logits of step {number + 1} differ by {by:.3g}"
    return ""


def outcome(session: Session, token: int):
    """Logits of a step, or the words with which it is refused."""
    try:
        return session.decode(token)
    except SettingError as error:
        return str(error)
