"""Rank 0's part of every call that changes a session: it tells the other ranks, makes the call, and
sees that all end it alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from engine.base.checks import listed_ids
from engine.base.errors import RankLost, SettingError
from engine.forward.scores import PromptScores
from engine.methods.base import Method
from engine.ranks.drive.followers import GONE, GRACE, Followers, Numbered
from engine.ranks.drive.signals import Deferred
from engine.ranks.group import Ranks
from engine.runner.state import SessionState

# calls that take what one process holds
ONE_PROCESS = {
    "adopt": "adopt: rows that others made",
}


# calls whose progress is rank 0's: ranks agree at their ends (engine/runner/ranks/agreed.py)
UNGATED = ("save_session", "filled")


class Lead:
    """Leads the ranks of one model. require: raises SettingError for a method that they cannot
    run.
    """

    def __init__(
        self,
        ranks: Ranks,
        followers: Followers,
        require: Callable[[Method], None],
    ) -> None:
        self._ranks, self._followers, self._require = ranks, followers, require
        self._numbers: WeakKeyDictionary[SessionState, int] = WeakKeyDictionary()
        self._count, self._serial, self._inside = 0, 0, False

    @property
    def lost(self) -> str:
        """What is known of the first rank that has ended; "" while all run."""
        return self._followers.lost

    @property
    def inside(self) -> bool:
        """Whether all ranks make a call now, each by itself."""
        return self._inside

    def open(self, make: Callable[[], Any], name: str = "open", **settings: Any) -> Any:
        """Make a session on every rank, with the same settings: what `make` returns, a session or
        (session, more). name: "open" or "restore".
        """
        if settings.get("method") is not None:
            self._require(settings["method"])
        made = self._together(name, None, (settings, None), make)
        self._number(made[0] if isinstance(made, tuple) else made)
        return made

    def _number(self, session: SessionState) -> None:
        """Number a session as every other rank does."""
        self._numbers[session] = self._count
        self._count += 1

    def step(self, fed: dict[SessionState, Any], work: Callable[[], Any]) -> Any:
        """Take a step of several sessions on every rank. fed: a Fed (engine/batch/stepping.py) of
        each.
        """
        told = [(self._numbers[one], *feed, one.watch) for one, feed in fed.items()]
        return self._together("step together", None, ({"fed": told}, None), work)

    def closed(self, session: SessionState) -> None:
        """Close a session on the other ranks too."""
        if session in self._numbers and not self._followers.lost:
            self._followers.tell(("close", self._numbers.pop(session)))

    def call(
        self,
        session: SessionState,
        call: Callable[..., Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Make a call of a session on every rank; calls inside it are each rank's own."""
        if self._inside:
            return call(session, *given, **named)
        with session.loaded.busy():
            bound = inspect.signature(call).bind(session, *given, **named)
            arguments = dict(list(bound.arguments.items())[1:])
            require_shared(call.__name__)
            if call.__name__ == "switch":
                self._require(arguments["method"])
            if "token_ids" in arguments:
                arguments["token_ids"] = listed_ids(arguments["token_ids"])
            progress = arguments.pop("progress", None)
            shared = self._numbered(_shared(arguments))
            told = call.__name__, self._numbers[session], (shared, session.watch)
            if call.__name__ in UNGATED:
                arguments["progress"] = progress
            if call.__name__ in UNGATED or "progress" not in inspect.signature(call).parameters:
                return self._ended(call, self._together(*told, lambda: call(session, **arguments)))
            gate = _Gate(self._followers, progress)

            def gated() -> Any:
                return call(session, **arguments, progress=gate)

            return self._together(*told, gated, gate)

    def _numbered(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments in which a session is its number."""
        return {
            name: Numbered(self._numbers[value]) if isinstance(value, SessionState) else value
            for name, value in arguments.items()
        }

    def _ended(self, call: Callable[..., Any], result: Any) -> Any:
        if call.__name__ == "fork":
            self._number(result)
        return result

    def _together(
        self,
        name: str,
        number: int | None,
        told: tuple[Any, ...],
        work: Callable[[], Any],
        gate: _Gate | None = None,
    ) -> Any:
        """Tell the others of a call and make it. Raises RankLost where a rank has ended or did
        something else, what the call raises otherwise.
        """
        followers = self._followers
        followers.require_whole()
        if failed := followers.failure():
            raise self._broken(RankLost(f"{failed}; {GONE}"))
        self._serial += 1
        serial = self._serial
        try:
            with Deferred() as signals, self._ranks.together():
                if gate is not None:
                    gate.signals = signals
                self._inside = True
                try:
                    followers.tell(("call", serial, name, number, *told))
                    result = work()
                    self._ranks.settle()
                    return result
                except RankLost as error:
                    raise self._broken(followers.why(error)) from None
                except BaseException:
                    self._raised(serial, gate)
                    raise
                finally:
                    self._inside = False
        finally:
            if gate is not None:
                gate.signals = None

    def _raised(self, serial: int, gate: _Gate | None) -> None:
        """See that all ranks have failed alike, or at the same gate."""
        if gate is not None and gate.shut:
            return
        self._followers.tell(("also", serial))
        try:
            self._followers.wait("raised", serial, GRACE)
        except RankLost as error:
            raise self._broken(error) from None

    def _broken(self, error: RankLost) -> RankLost:
        """End all ranks: they do not stand alike any more."""
        self._ranks.refuse(str(error))
        self._followers.close(str(error))
        return error


def require_shared(name: str) -> None:
    """Raise SettingError for a call that ranks do not make (docs/PARALLEL.md)."""
    if what := ONE_PROCESS.get(name, ""):
        raise SettingError(f"{what}: works on one process; leave --ranks and --numa out")


def _shared(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as the other ranks hear of them: who takes the scores of a prompt
    needs logits, which all ranks multiply, and what a program adds to a file is rank 0's. Raises
    SettingError for another who takes outputs.
    """
    own = ("every", "extra")
    told = {name: value for name, value in arguments.items() if name not in own}
    if "path" in told:
        told["path"] = str(Path(told["path"]).absolute())
    if (every := arguments.get("every")) is None:
        return told
    scores = getattr(every, "__self__", None)
    if not isinstance(scores, PromptScores):
        raise SettingError(
            f"every: found {every!r}, expected PromptScores.take: ranks know of no other outputs"
        )
    return {**told, "scores": (scores.token_ids, scores.top)}


class _Gate:
    """Called after every part of a long call: all ranks go on, or all stop there."""

    def __init__(self, followers: Followers, progress: Callable[..., None] | None) -> None:
        self._followers, self._progress = followers, progress
        self.signals: Deferred | None = None
        self.shut = False

    def __call__(self, *figures: Any) -> None:
        try:
            if self.signals is not None:
                self.signals.now()
            if self._progress is not None:
                self._progress(*figures)
        except BaseException:
            self.shut = True
            self._followers.tell(("gate", False))
            raise
        self._followers.tell(("gate", True))
