"""What a session should hold, and a fresh session that was brought there by the shortest way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from engine.base.errors import SettingError
from engine.llm import LLM
from engine.methods.base import Method
from engine.methods.requirements import validate_parts
from engine.plan.needs import RING, Needs
from engine.session.session import Session
from tests.builders import session_config
from tests.engine.methods.method_table import Row

TOLERANCE = 2e-3  # of logits that range over +-5; another selection moves them by 0.1 and more
# what an interrupted prompt leaves depends on the length that it was to have
FORESEES = ("scissorhands",)
WINDOW = 64  # the most past queries that any method reads
# rows whose steps are full attention
DENSE_STEPS = ("full", "brutal_offload", "minference", "quoka", "xattention")


@cache
def needs_of(method: Method) -> Needs:
    """What a method needs of a session here."""
    config = session_config()
    return method.needs(method.plan(config), config, 512, 4)


def windows(method: Method) -> tuple[int, int]:
    """Past queries that a method's steps read, and those that a prompt's end reads."""
    needs = needs_of(method)
    return needs.window, needs.prompt_window


@dataclass(frozen=True)
class Under:
    """A method of the table, with its row."""

    method: Method
    row: Row

    @property
    def keeps_rows(self) -> bool:
        """Whether going back leaves the bank's rows as they were read."""
        return not (self.row.evicts or self.row.replays)

    @property
    def forgets(self) -> bool:
        """Whether rows that its store does not take are freed."""
        return needs_of(self.method).forgets

    def keeps_queries(self, count: int) -> int:
        """Newest queries at the end of a prompt of `count` tokens that come back there."""
        if self.row.approximate or not self.keeps_rows:
            return WINDOW
        window = windows(self.method)[0]
        return window if count < window else 0


@dataclass(frozen=True)
class Event:
    """A prompt or a part of one (kind "prefill"), a token ("decode"), or a "switch". guesses: it
    read queries that were computed anew, otherwise than first.
    """

    kind: str
    under: Under
    ids: tuple[int, ...] = ()
    more: bool = False
    guesses: bool = False

    @property
    def dense(self) -> bool:
        """Whether full attention over the bank gives its tokens' queries again."""
        row = self.under.row
        if self.kind == "decode":
            return row.name in DENSE_STEPS
        return not row.approximate and self.under.keeps_rows


@dataclass
class Model:
    """events: what a fresh session has to do to be in this one's state.

    inexact: position from which rows depend on tokens that are gone, as the method says they do;
    nothing is compared while it holds such rows. logits: whether the newest token's logits follow
    from the events. low: queries of positions below it have left the ring. guessed: positions whose
    queries full attention has to compute anew although other attention computed them first: a
    method that reads these may choose otherwise, as docs/RELIABILITY.md says.
    """

    begun: Under
    events: list[Event] = field(default_factory=list)
    inexact: int | None = None
    switched: int = 0  # where a method took over whose logits there are those of the one before
    logits: bool = True
    low: int = 0
    guessed: frozenset[int] = frozenset()

    @property
    def ids(self) -> list[int]:
        """The session's tokens."""
        return [token for event in self.events for token in event.ids]

    @property
    def under(self) -> Under:
        """The method now."""
        return self.events[-1].under if self.events else self.begun

    @property
    def guesses(self) -> bool:
        """Whether what the session holds, or its next step, follows from guessed queries."""
        reads = max(windows(self.under.method))
        return any(event.guesses for event in self.events) or self.reaches(reads, len(self.ids))

    def reaches(self, window: int, stop: int) -> bool:
        """Whether the window that ends at `stop` holds a guessed query."""
        return any(position >= stop - window for position in self.guessed)

    def reserve(self, stop: int) -> None:
        """A chunk or step up to position `stop` has begun."""
        self.low = max(self.low, stop - RING)

    def copy(self) -> Model:
        """A model that goes its own way."""
        return replace(self, events=list(self.events))

    def add(self, kind: str, ids: list[int], more: bool = False) -> None:
        """Tokens were read or decoded."""
        step, end = windows(self.under.method)
        stop = len(self.ids) + len(ids)
        guesses = self.reaches(step if kind == "decode" else end, stop)
        self.events.append(Event(kind, self.under, tuple(ids), more, guesses))
        self.reserve(stop)
        self.logits = True

    def switch(self, under: Under) -> None:
        """Another method goes on. Tokens are read again, as one prompt, after one that forgets;
        and before one, where its session goes back or a commit was interrupted.
        """
        forgot, ids = self.under.forgets, tuple(self.ids)
        if forgot and under.method == self.under.method:
            return
        if ids and (forgot or under.forgets):
            rows = all(event.dense or event.kind == "switch" for event in self.events)
            exact = forgot or (rows and self.inexact is None)
            self.inexact = None if exact else 0
            self.events = [Event("prefill", under, ids)]
            self.begun, self.logits = under, forgot
            self.switched = 0 if forgot else len(ids)
            if forgot:
                self.guessed, self.low = frozenset(), max(0, len(ids) - RING)
            return
        guesses = self.reaches(windows(under.method)[1], len(self.ids))
        self.events.append(Event("switch", under, guesses=guesses))

    def interrupted(self, ids: list[int], wanted: int, more: bool) -> None:
        """Of a prompt of `wanted` tokens these were read."""
        row = self.under.row
        at = len(self.ids)
        self.add("prefill", ids, more)
        self.reserve(at + wanted)
        self.logits = False
        if len(ids) < wanted and (row.approximate or row.name in FORESEES):
            self.inexact = at if self.inexact is None else self.inexact

    def truncate(self, n: int) -> None:
        """Only the first n tokens are left. Switches that came later come now."""
        now, kept, later, at, cut = self.under, [], [], 0, False
        if n == len(self.ids):
            return
        for event in self.events:
            if event.kind == "switch":
                (kept if at <= n else later).append(event)
            elif at < n:
                part = event.ids[: n - at]
                whole = len(part) == len(event.ids)
                cut = not whole
                # a prompt that is cut is read again, unless its rows stay
                stays = now.keeps_rows or event.under is not now or later
                if not whole and stays and event.under.row.approximate:
                    self.inexact = at if self.inexact is None else min(self.inexact, at)
                kept.append(replace(event, ids=part, more=event.more and whole))
            at += len(event.ids)
        self.guess(n, kept, cut, bool(later))
        end = windows(now.method)[1]
        self.events = kept + [replace(e, guesses=self.reaches(end, n)) for e in later]
        self.logits = not any(event.kind == "switch" for event in self.events)
        self.logits = self.logits and n != self.switched
        if self.inexact is not None and n <= self.inexact:
            self.inexact = None
        if not self.events:
            self.begun = now

    def guess(self, n: int, kept: list[Event], cut: bool, switched: bool) -> None:
        """Note which queries at n tokens have to be computed anew. kept: the events up to there,
        the last of them cut or not. switched: a later switch comes now.
        """
        self.guessed = frozenset(position for position in self.guessed if position < n)
        read = [event for event in kept if event.ids]
        if (self.under.keeps_rows or switched) and read:
            last, at = read[-1], 0
            ends = last.kind == "prefill" and not cut
            back = last.under.keeps_queries(len(last.ids)) if ends else 0
            for event in read:
                lost = range(max(at, n - WINDOW), min(at + len(event.ids), self.low, n - back))
                self.guessed |= frozenset(() if event.dense else lost)
                at += len(event.ids)
        self.low = min(self.low, n)

    @property
    def replayable(self) -> bool:
        """Whether a fresh session may read these prompts: a truncate may leave less of one, or of
        its last part, than its method begins with.
        """
        at = ended = 0
        goes_on = False
        for event in self.events:
            method, stop = event.under.method, at + len(event.ids)
            try:
                if event.kind == "prefill":
                    method.validate_prompt(at, stop)
                    last = len(event.ids) if goes_on and not event.more else None
                    validate_parts(method, needs_of(method), event.more or goes_on, last)
                    ended = stop
                elif event.kind == "switch" and at:
                    method.validate_prompt(0, ended or at)
            except SettingError:
                return False
            goes_on = event.more and event.kind == "prefill"
            at = stop
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
