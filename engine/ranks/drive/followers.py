"""The other ranks as rank 0 sees them: it tells them what to do, and hears when one has ended."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, NamedTuple, NoReturn, TypeVar

from engine.base.errors import EngineError, RankLost

GRACE = 10.0  # seconds in which ranks that fail alike say so
LAST = 1.0  # seconds in which the end of a process becomes known
GONE = "the sessions of this model are gone; start it again"


T = TypeVar("T")


class Numbered(NamedTuple):
    """A session in a message: its number, which every rank gave it."""

    number: int


def _raise(error: Exception) -> NoReturn:
    raise error


class Followers:
    """Connections to ranks 1 .. size-1. processes: those that were started here, in order."""

    def __init__(
        self,
        listener: Listener,
        size: int,
        timeout: float,
        processes: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self._processes, self._timeout = list(processes), timeout
        self._news = threading.Condition()
        self._heard: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(1, size)}
        self._lost: dict[int, str] = {}
        self._ending = False
        self._hear_of_it: Callable[[str], None] = lambda why: None
        self._connections = self._accepted(listener, size)
        for rank, connection in self._connections.items():
            reader = threading.Thread(target=self._read, args=(rank, connection), daemon=True)
            reader.start()

    def _accepted(self, listener: Listener, size: int) -> dict[int, Connection]:
        """Wait until every rank has come. Raises RankLost where one ends first or none comes."""
        found: dict[int, Connection] = {}
        until = time.monotonic() + self._timeout

        def accept() -> None:
            while len(found) < size - 1:
                try:
                    connection = listener.accept()
                    found[connection.recv()] = connection
                except (EOFError, AuthenticationError):
                    continue  # one that died at the door, or a stranger
                except OSError:
                    return  # the listener was closed
                with self._news:
                    self._news.notify_all()

        threading.Thread(target=accept, daemon=True).start()
        while len(found) < size - 1:
            with self._news:
                self._news.wait(0.1)
            missing = [rank for rank in range(1, size) if rank not in found]
            why = next((said for rank in missing if (said := self._ended(rank))), "")
            if not why and missing and time.monotonic() > until:
                why = f"rank {missing[0]} did not come within {self._timeout:.0f} s"
            if why:
                listener.close()
                self._stop()
                raise RankLost(f"{why}; the model was not loaded")
        listener.close()
        return found

    def _ended(self, rank: int) -> str:
        """What is known of a process that has ended; "" where it runs or was not started here."""
        if rank > len(self._processes):
            return ""
        process = self._processes[rank - 1]
        code = process.poll()
        if code is None:
            return ""
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} (process {process.pid}) {how}"

    def _read(self, rank: int, connection: Connection) -> None:
        """Hear what a rank says, until it ends."""
        try:
            while True:
                message = connection.recv()
                with self._news:
                    self._heard[rank].append(message)
                    self._news.notify_all()
        except (OSError, EOFError):
            pass
        if self._ending:
            return
        until = time.monotonic() + LAST
        while not (why := self._ended(rank)) and time.monotonic() < until:
            time.sleep(0.02)
            if rank > len(self._processes):
                break
        with self._news:
            failed = next((m[2] for m in self._heard[rank] if m[0] == "raised"), "")
            said = f" after {failed}" if failed else ""
            self._lost.setdefault(rank, (why or f"rank {rank} has gone") + said)
            self._news.notify_all()
        self._hear_of_it(self.lost)
        self.tell(("abort", self.lost))

    def when_lost(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with what is known when a rank ends, so that nobody waits for it."""
        self._hear_of_it = hear

    @property
    def lost(self) -> str:
        """What is known of the first rank that has ended; "" while all run."""
        return next(iter(self._lost.values()), "")

    def meanwhile(self, work: Callable[[], T]) -> T:
        """What `work` returns, which waits for the other ranks. Raises RankLost where one ends
        first: whoever waits for it goes with this process.
        """
        done: list[Callable[[], T]] = []

        def run() -> None:
            try:
                found = work()
                done.append(lambda: found)
            except Exception as error:
                done.append(partial(_raise, error))
            with self._news:
                self._news.notify_all()

        threading.Thread(target=run, daemon=True).start()
        with self._news:
            while not done and not self._lost:
                self._news.wait(1.0)
        self.require_whole()
        return done[0]()

    def require_whole(self) -> None:
        """Raise RankLost where a rank has ended."""
        if self.lost:
            raise RankLost(f"{self.lost}; {GONE}")

    def why(self, error: EngineError) -> RankLost:
        """The error for a collective that failed: it names the rank that has ended, if one has."""
        with self._news:
            self._news.wait_for(lambda: self._lost, LAST)
        return RankLost(f"{self.lost or error}; {GONE}")

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message to every rank that is there."""
        for rank, connection in self._connections.items():
            if rank in self._lost:
                continue
            try:
                connection.send(message)
            except OSError:
                pass  # its reader says more

    def wait(self, kind: str, serial: int, patience: float) -> list[str]:
        """Wait until every rank has said `kind` of call `serial`: the third word of each. Raises
        RankLost where one has ended or says nothing.
        """

        def said(rank: int) -> str | None:
            words = (m[2] for m in self._heard[rank] if m[:2] == (kind, serial))
            return next(words, None)

        def failed(rank: int) -> bool:
            return kind != "raised" and any(m[:2] == ("raised", serial) for m in self._heard[rank])

        with self._news:
            ready = self._news.wait_for(
                lambda: self._lost or all(said(r) is not None or failed(r) for r in self._heard),
                patience,
            )
            for rank, heard in self._heard.items():
                if failed(rank):
                    line = next(m[2] for m in heard if m[:2] == ("raised", serial))
                    raise RankLost(f"rank {rank}: {line}; {GONE}")
        self.require_whole()
        if not ready:
            silent = next(rank for rank in self._heard if said(rank) is None)
            raise RankLost(f"rank {silent} said nothing for {patience:.0f} s; {GONE}")
        found = [said(rank) or "" for rank in self._heard]
        for heard in self._heard.values():
            heard.clear()
        return found

    def failure(self) -> str:
        """What a rank says has failed while rank 0 went on; "" where none does."""
        with self._news:
            for rank, heard in self._heard.items():
                for message in heard:
                    if message[0] == "raised":
                        return f"rank {rank}: {message[2]}"
        return ""

    def close(self, why: str = "") -> None:
        """End all ranks, at once where there is a `why`."""
        self._ending = True
        self.tell(("abort", why) if why else ("end",))
        self._stop(0.0 if why else LAST * 5)

    def _stop(self, patience: float = 0.0) -> None:
        """End the processes that were started here."""
        until = time.monotonic() + patience
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()) or 0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
