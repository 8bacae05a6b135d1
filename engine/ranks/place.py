"""Where a process stands among the ranks of a model, and which cores it runs on.

Nothing here imports torch: a rank that is started binds itself to its cores first, so that all
memory that it touches lies at its own node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "OMNIKV_RANK"  # the place of a rank that rank 0 has started, as JSON
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Place:
    """Rank `rank` of `size`. folder: where ranks that rank 0 started meet; "": as torchrun's
    variables say. cores: it runs on these alone; (): wherever the system puts it. threads: 0:
    torch's own number. timeout: seconds that it waits for the others. leader: the process of rank 0
    where that started it.
    """

    rank: int
    size: int
    folder: str = ""
    cores: tuple[int, ...] = ()
    threads: int = 0
    timeout: float = 120.0
    leader: int = 0

    def variables(self) -> dict[str, str]:
        """Environment variables by which a process takes this place."""
        found = {VARIABLE: json.dumps(asdict(self))}
        if self.threads:
            found["OMP_NUM_THREADS"] = str(self.threads)
        return found

    @property
    def orphaned(self) -> bool:
        """Whether the process that started this one has ended."""
        return self.leader > 0 and os.getppid() != self.leader

    def bind(self) -> None:
        """Run this process on its cores alone; where the system refuses, a line says so."""
        if self.cores and hasattr(os, "sched_setaffinity"):
            try:
                os.sched_setaffinity(0, self.cores)
            except OSError as error:  # a container whose cores have become fewer
                cores = ", ".join(map(str, self.cores))
                print(
                    f"rank {self.rank}: cannot run on cores {cores} alone ({error.strerror}); "
                    "it runs wherever the system puts it",
                    file=sys.stderr,
                )


def started(environment: Mapping[str, str]) -> Place | None:
    """The place of a process that rank 0 started, or that torchrun did; None for any other."""
    if VARIABLE in environment:
        given = json.loads(environment[VARIABLE])
        return Place(**{**given, "cores": tuple(given["cores"])})
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return Place(rank, size) if size > 1 and "MASTER_ADDR" in environment else None


def allowed_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def nodes(folder: Path = NODES) -> list[tuple[int, ...]]:
    """The allowed cores of each NUMA node that has any; all of them as one where none is known."""
    mine, found = set(allowed_cores()), []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            listed = (path / "cpulist").read_text().strip()
        except OSError:
            continue
        own = tuple(core for core in _listed(listed) if core in mine)
        if own:
            found.append(own)
    return found or [tuple(sorted(mine))]


def _listed(text: str) -> list[int]:
    """Parse 0-3,8: numbers and ranges of them."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def places(
    size: int, folder: str, numa: bool = False, timeout: float = 120.0, bound: bool = True
) -> list[Place]:
    """The places of `size` ranks on this machine: each has its part of the cores where there are
    enough. numa: ranks are dealt over the nodes, and share a node's cores where they outnumber
    them. bound: they run on these cores alone; else they have as many threads.
    """
    groups = nodes() if numa else [tuple(allowed_cores())]
    owners = [rank * len(groups) // size for rank in range(size)]
    found = []
    for rank, owner in enumerate(owners):
        cores, count = groups[owner], owners.count(owner)
        place = owners[:rank].count(owner)
        mine = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
        threads = max(1, len(mine))
        found.append(Place(rank, size, folder, mine if bound else (), threads, timeout))
    return found
