"""A rank that follows: it makes the calls that rank 0 makes, and ends when that does."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engine.base.errors import RankLost
from engine.base.figures import first_line
from engine.batch.slots import begin_as
from engine.batch.stepping import Fed, Stepping
from engine.forward.scores import PromptScores
from engine.load.loaded import Loaded
from engine.methods.mass_meter import Watch
from engine.ranks.drive.followers import GRACE, Numbered
from engine.ranks.group import Ranks
from engine.runner.extend import caught_up
from engine.saved.cache import filled, stored
from engine.session.session import Session
from engine.session.switch import switch


def _prefill(
    session: Session, scores: tuple[list[int], int] | None = None, **arguments: Any
) -> Any:
    """Read a prompt. scores: rank 0 scores these ids, with so many alternatives to each."""
    every = None if scores is None else PromptScores(session.loaded.model, *scores).take
    return session.prefill(**arguments, every=every)


CALLS: dict[str, Callable[..., Any]] = {
    "prefill": _prefill,
    "decode": Session.decode,
    "with_logits": Session.refresh_logits,
    "step": Session.step,
    "cut": Session.truncate,
    "switch": switch,
    "fork": Session.fork,
    "check": Session.check,
    "save_session": Session.save,
    "caught_up": caught_up,
    "begin_as": begin_as,
    "filled": filled,
    "stored": stored,
}
GATED = ("prefill", "with_logits", "switch", "check")
Opens = dict[str, Callable[..., Session]]  # makes a session with settings, on this rank


def _stepped(
    stepping: Stepping,
    sessions: dict[int, Session],
    fed: list[tuple[int, int | None, int, Watch | None]],
) -> None:
    """Take a step of several sessions: (number, token, length, watch) of each."""
    for number, _, _, watch in fed:
        sessions[number].watch_with(watch)
    stepping.step({sessions[number]: Fed(token, length) for number, token, length, _ in fed})


class Stopped(BaseException):
    """Rank 0 has stopped a call here."""


class Follower:
    """Follows rank 0 over one connection."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self._rank, self._connection = rank, connection
        self._told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._ends = False
        connection.send(rank)
        threading.Thread(target=self._read, daemon=True).start()
        # Ctrl-C is rank 0's, and so is SIGTERM, which torchrun and systemd send to every process:
        # it ends what is under way and tells the others
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        warnings.simplefilter("ignore")  # rank 0 says them once

    def _read(self) -> None:
        """Hear rank 0, and end where it ends."""
        while True:
            try:
                message = self._connection.recv()
            except (OSError, EOFError):
                if not self._ends:
                    self.leave("rank 0 has ended")
                return
            if message[0] == "abort":
                self.leave(message[1])
            self._ends = message[0] == "end"
            self._told.put(message)

    def leave(self, why: str, code: int = 1) -> None:
        """End this process, whatever it is doing, with one line. It holds nothing to save."""
        sys.stderr.write(f"rank {self._rank}: {why}\n")
        sys.stderr.flush()
        os._exit(code)

    def next(self) -> tuple[Any, ...]:
        """Wait for what rank 0 says next."""
        return self._told.get()

    def say(self, *words: Any) -> None:
        """Tell rank 0."""
        try:
            self._connection.send(words)
        except OSError:
            self.leave("rank 0 has ended")

    def run(self, ranks: Ranks, loaded: Loaded, opens: Opens) -> int:
        """Make rank 0's calls until it ends; the exit code."""
        sessions: dict[int, Session] = {}
        count, stepping = 0, Stepping(loaded)
        made: Any
        while True:
            kind, *rest = self.next()
            if kind == "end":
                return 0
            if kind == "close":
                sessions.pop(rest[0]).close()
            if kind != "call":
                continue
            serial, name, number, arguments, watch = rest
            try:
                with ranks.together():
                    if name == "step together":
                        _stepped(stepping, sessions, **arguments)
                    elif name in opens:
                        made = opens[name](**arguments)
                    else:
                        sessions[number].watch_with(watch)
                        more = {"progress": self._gate} if name in GATED else {}
                        given = {
                            key: sessions[value.number] if isinstance(value, Numbered) else value
                            for key, value in arguments.items()
                        }
                        made = CALLS[name](sessions[number], **given, **more)
                if name in opens or name == "fork":
                    sessions[count] = made
                    count += 1
            except Stopped:
                pass
            except RankLost as error:
                self._lost(error)
            except Exception as error:
                self._failed(serial, error)

    def _gate(self, *figures: Any) -> None:
        """Go on or stop as rank 0 does."""
        kind, go = self.next()
        assert kind == "gate", f"found {kind}, expected a gate"
        if not go:
            raise Stopped

    def _lost(self, error: RankLost) -> None:
        """Leave after a collective failed; rank 0 may know which rank has ended."""
        try:
            kind, *rest = self._told.get(timeout=GRACE)
        except queue.Empty:
            self.leave(str(error))
        self.leave(rest[0] if kind == "abort" else str(error))

    def _failed(self, serial: int, error: Exception) -> None:
        """Tell rank 0 of an error, and go on if it has met the same."""
        if os.environ.get("OMNIKV_RANKS_TRACE"):
            traceback.print_exc()
        line = f"{type(error).__name__}: {first_line(error)}"
        self.say("raised", serial, line)
        try:
            kind, *rest = self._told.get(timeout=GRACE)
        except queue.Empty:
            kind, rest = "", []
        if (kind, *rest) != ("also", serial):
            self.leave(line)
