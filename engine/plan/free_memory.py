"""How much memory is free: on a GPU, in the machine, in the container around this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.base.cores.control_groups import at_the_top, control_groups
from engine.base.figures import human

# Share of the free memory that a plan may use: a card filled to 98% is 5-20 times slower, without
# an error.
HEADROOM = 0.95
# (limit, used, name in memory.stat of file pages that nobody uses) of a control group's folder, for
# version 2 and 1.
_GROUPS = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Bytes of address space that a run maps beside what a plan counts: libraries that load late, and
# stacks and heaps of threads (207 MB measured with one thread, for 1,024 and for 8,192 tokens).
UNPLANNED = 256 << 20
_NO_LIMIT = 1 << 62  # version 1 writes a number of this size for "no limit"


def available_bytes(device: torch.device) -> tuple[int, str]:
    """Return the free bytes of a device and the name of their source.

    On a GPU this is CUDA's own figure; on a CPU the least of MemAvailable and what the limits of
    the container and of the address space leave.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    found = [(_meminfo() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "free RAM")]
    if (container := container_memory()) is not None:
        found.append((container[1], "left of the container's memory limit"))
    if (space := address_space_left()) is not None:
        left = max(0, space - UNPLANNED)
        found.append((left, "left of the address space limit (ulimit -v)"))
    return min(found)


def shares_memory(device: torch.device) -> bool:
    """Return whether a GPU's memory is the host's: Jetson, DGX Spark, GPUs within a processor. What
    is pinned there lies where everything else does.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False  # a plan may be of a card that is not here
    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


class Free(NamedTuple):
    """Free bytes of a device and of host memory, within budgets, each with the words for what
    bounds it and the figure that was found or given: "20.85 GB free RAM", "a budget of 64.00 GB".
    shared: the device is a GPU and both are the same bytes.
    """

    bytes: int
    name: str
    host: int
    host_name: str
    shared: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What a plan says of it."""
        own = dict(free=self.bytes, free_name=self.name, shared=self.shared)
        return dict(**own, host_free=self.host, host_name=self.host_name)

    def divided(self, parts: int, host_parts: int) -> Free:
        """What one has of it where so many share the device, and host memory."""
        if parts == host_parts == 1:
            return self
        own, host = self.bytes // parts, self.host // host_parts
        name = self.name if parts == 1 else f"1/{parts} of {self.name}"
        where = self.host_name if host_parts == 1 else f"1/{host_parts} of {self.host_name}"
        return self._replace(bytes=own, name=name, host=host, host_name=where)


def free_bytes(
    device: torch.device,
    budget: int | None = None,
    host_budget: int | None = None,
    imagined: int | None = None,
    imagined_host: int | None = None,
    idle_host: int = 0,
) -> Free:
    """Return what is free. imagined, imagined_host: bytes of a GPU and its host that are not here;
    without the second its host memory is host_budget, or this machine's. idle_host: bytes of a
    GPU's host memory that are taken for sessions and that none of them uses.
    """
    shared = imagined is None and shares_memory(device)
    if shared:
        # CUDA's own figure counts the page cache as used there
        free, name = available_bytes(torch.device("cpu"))[0] + idle_host, "free, GPU and CPU share"
    elif imagined is None:
        free, name = available_bytes(device)
    else:
        free, name = imagined, "free on an imagined GPU"
    free, name = _within(budget, free, name)
    host, host_name = free, "free host memory"
    if imagined_host is not None:
        host, host_name = imagined_host, "free imagined host memory"
    elif imagined is not None and host_budget is not None:
        host = _budgeted(host_budget)  # all that is known of an imagined GPU's host
    elif device.type != "cpu" and not shared:
        host = available_bytes(torch.device("cpu"))[0] + idle_host
        host_name += " of this machine" if imagined is not None else ""
    return Free(free, name, *_within(host_budget, host, host_name), shared)


def _budgeted(budget: int) -> int:
    """Return the free bytes of which a plan may use just the budget."""
    return int(budget / HEADROOM)


def _within(budget: int | None, free: int, name: str) -> tuple[int, str]:
    """Return (free bytes, the words for what bounds them)."""
    if budget is not None and _budgeted(budget) <= free:
        return _budgeted(budget), f"a budget of {human(budget)}"
    return free, f"{human(free)} {name}"


def _meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def container_memory(
    folder: Path | None = None, process: Path = Path("/proc/self")
) -> tuple[int, int] | None:
    """Return (limit, bytes left) of the tightest control group around this process: Docker,
    systemd, Slurm; None without one or without a limit. folder: look only where this one stands for
    /sys/fs/cgroup.

    Files read from disk, such as weights, stay in the group's page cache and count as used. The
    kernel drops idle ones first, so they are counted as free here.
    """
    found = []
    groups = control_groups(process) if folder is None else at_the_top(folder)
    for kind, group in groups:
        limit, used, idle = _GROUPS[kind]
        try:
            most = int((group / limit).read_text())  # "max" is no number: no limit
            held = int((group / used).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            rows = dict(line.split() for line in lines if line.count(" ") == 1)
            spare = int(rows.get(idle, 0))
        except (OSError, ValueError):
            continue
        if most < _NO_LIMIT:
            found.append((most, max(0, most - max(0, held - spare))))
    return min(found, key=lambda pair: pair[1], default=None)


def address_space_left() -> int | None:
    """Return the bytes that RLIMIT_AS (ulimit -v) still lets this process map; None without it."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError, ValueError):
        return None
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def resident_bytes() -> int | None:
    """Return the RAM of this process now; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
