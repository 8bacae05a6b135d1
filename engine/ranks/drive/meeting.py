"""How the ranks of a model come together: started by rank 0, or by torchrun."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine.base.errors import RankLost, SettingError
from engine.ranks.collectives.segment import Segment, new_segment
from engine.ranks.drive.followers import Followers
from engine.ranks.group import Ranks
from engine.ranks.place import Place, places
from kernels.ranks.join import usable

FOLDER = "omnikv-folder"  # under which torchrun's store names the folder of the ranks
PACKAGE = Path(__file__).resolve().parents[3]  # that holds `engine`


class Meeting:
    """Rank 0's side. asked: how many ranks to start, or the place that torchrun gave. cards: each
    runs on a GPU of its own, and on no cores of its own.
    """

    def __init__(self, asked: int | Place, numa: bool, timeout: float, cards: bool = False) -> None:
        self._folder = self._segment = ""
        if isinstance(asked, Place):
            self.places = [Place(asked.rank, asked.size, timeout=timeout)]
        else:
            if isinstance(asked, bool) or not isinstance(asked, int) or asked < 2:
                raise SettingError(f"ranks: found {asked!r}, expected a number of at least 2")
            self.places = places(asked, "", numa, timeout, bound=not cards)
        self.place = self.places[0]
        self._ranks: Ranks | None = None
        self._followers: Followers | None = None
        self._store: dist.Store | None = None

    def gather(self) -> Followers:
        """Start the other ranks, or wait for torchrun's. Raises RankLost where one ends."""
        self._folder = tempfile.mkdtemp(prefix="omnikv-ranks-")  # this user's alone
        atexit.register(shutil.rmtree, self._folder, True)
        # a call is unpickled where it arrives, so nobody else may have the key or the socket
        key = secrets.token_bytes(16)
        (Path(self._folder) / "key").write_bytes(key)
        listener = Listener(f"{self._folder}/calls", "AF_UNIX", authkey=key)
        processes = [self._start(place) for place in self.places[1:]]
        if processes:
            self._store = dist.FileStore(f"{self._folder}/store", self.place.size)
        else:
            self._store = _torchruns()
            self._store.set(FOLDER, self._folder)
        atexit.register(self.end)
        self._followers = Followers(listener, self.place.size, self.place.timeout, processes)
        return self._followers

    def _start(self, place: Place) -> subprocess.Popen[bytes]:
        """Start a rank, which takes its place before it imports torch."""
        mine = Place(**{**vars(place), "folder": self._folder, "leader": os.getpid()})
        paths = [str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, **mine.variables(), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "engine.ranks"]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def segment(self) -> str:
        """The path of the ranks' shared memory; "" where there is none: without C++ kernels."""
        if not self._segment and usable():
            self._segment = new_segment(self.place.size, self._folder)
            atexit.register(self.all_have_it)
        return self._segment

    def all_have_it(self) -> None:
        """Take the name of the shared memory away: it goes with the last process that has it."""
        with contextlib.suppress(OSError):
            if self._segment:
                os.unlink(self._segment)
        self._segment = ""

    def ranks(self, card: Card | None = None) -> Ranks:
        """The group, once every rank is told to make it. card: as of `grouped`."""
        assert self._store is not None
        self._ranks = grouped(self.place, self._store, self.segment(), card)
        return self._ranks

    def end(self) -> None:
        """End the other ranks."""
        if self._followers is not None:
            self._followers.close()
            self._followers = None
            if self._ranks is not None:
                self._ranks.close()


class Card(NamedTuple):
    """A rank's GPU, and the dtype of what is added there."""

    device: torch.device
    dtype: torch.dtype


def grouped(place: Place, store: dist.Store, segment: str = "", card: Card | None = None) -> Ranks:
    """Make a rank's group over a store where all meet. segment: path of their shared memory. card:
    the GPU that it runs on; None: it runs on a CPU.
    """
    if place.folder or segment:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of one machine
    held = Segment(segment, place.rank, place.size, place.timeout) if segment else None
    ranks = Ranks(place.rank, place.size, store, place.timeout, held)
    if card is not None:
        ranks.take_card(*card)
    return ranks


def _torchruns() -> dist.Store:
    """The store that torchrun's variables name."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore("omnikv", store)


def joining(place: Place) -> tuple[Connection, dist.Store]:
    """A following rank's connection to rank 0, and the store where all meet. Raises RankLost where
    rank 0 is not there.
    """
    until = time.monotonic() + place.timeout
    store = None if place.folder else _torchruns()
    folder = Path(place.folder or store.get(FOLDER).decode())  # type: ignore[union-attr]
    _require_own(folder)
    connection = _connected(str(folder / "calls"), (folder / "key").read_bytes(), until, place)
    return connection, store or dist.FileStore(str(folder / "store"), place.size)


def _require_own(folder: Path) -> None:
    """Raise RankLost for a folder that others can read or write: torchrun's store, which names it,
    takes anybody's word.
    """
    try:
        state = folder.stat()
    except OSError:
        raise RankLost(f"rank 0's folder {folder} is not here: ranks run on one machine") from None
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise RankLost(f"rank 0's folder {folder} is not this user's alone: its word is not taken")


def _connected(address: str, key: bytes, until: float, place: Place) -> Connection:
    while True:
        try:
            return Client(address, authkey=key)
        except (OSError, AuthenticationError, EOFError) as error:
            if place.orphaned or time.monotonic() > until:
                raise RankLost(f"rank 0 is not there: {error}") from None
            time.sleep(0.05)
