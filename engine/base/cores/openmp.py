"""How many threads torch's OpenMP has, and how they wait for the others of their team: asleep.

OpenMP reads this once, when torch is loaded, so `engine` and `tools` import this file before torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from engine.base.cores.free_cores import free_cores

# By default a thread spins for milliseconds. Where other processes use the cores it takes the time
# of the very thread that it waits for: a decode step took two threads 3 to 4 times as long as one,
# and 7 times the processor time; two that sleep took 0.7 to 1.3 times one's (docs/PERFORMANCE.md).
# C++ kernels have a team of their own, which sees that it is disturbed (kernels/native/team.cpp).
_SAID = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
_COUNT = "OMP_NUM_THREADS"


def settle(environment: MutableMapping[str, str], cores: int, visible: int) -> str:
    """Put into `environment` how OpenMP's threads wait, and their number where what stands there is
    none or is more than `cores`. Return the line that says so, or "".

    cores: what this process may use (`free_cores`); visible: what OpenMP would count by itself,
    which knows the affinity but no quota of a container.
    """
    if not _SAID & environment.keys():
        environment["OMP_WAIT_POLICY"] = "passive"
    found = environment.get(_COUNT, "").strip()
    if not found:
        if cores < visible:
            environment[_COUNT] = str(cores)
        return ""
    first = found.split(",")[0].strip()  # of nested teams, the outermost
    number = int(first) if first.isascii() and first.isdigit() else 0
    if 1 <= number <= cores:
        return ""
    environment[_COUNT] = str(cores)
    if number < 1:
        return f"{_COUNT}: found {found!r}, expected a number of threads from 1 on; using {cores}"
    return f"{_COUNT}: found {number}, more than the cores of this process; using {cores}"


def _visible() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


if _line := settle(os.environ, free_cores(), _visible()):
    print(_line, file=sys.stderr)
