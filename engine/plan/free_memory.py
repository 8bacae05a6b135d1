"""How much memory is free: on a GPU, in the machine, in the container around this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Share of the free memory that a plan may use: a card filled to 98% is 5-20 times slower, without
# an error.
HEADROOM = 0.95
# (limit, used, statistics, name there of file pages that nobody uses) below /sys/fs/cgroup, for
# control groups version 2 and 1.
_CONTAINERS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
_NO_LIMIT = 1 << 62  # version 1 writes a number of this size for "no limit"


def available_bytes(device: torch.device) -> tuple[int, str]:
    """Return the free bytes of a device and the name of what was asked.

    On a GPU this is CUDA's own figure; on a CPU the smaller of MemAvailable and what the
    container's limit leaves.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    free = _meminfo() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = container_memory()
    left = free if found is None else found[1]
    return (free, "free RAM") if left >= free else (left, "left of the container's memory limit")


def _meminfo(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def container_memory(folder: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return (limit, bytes left) of this process's container; None without container or limit.

    Files read from disk, such as weights, stay in the container's page cache and count as used. The
    kernel drops idle ones first, so they are counted as free here.
    """
    for limit, used, statistics, idle in _CONTAINERS:
        try:
            most = int((folder / limit).read_text())  # "max" is no number: no limit
            held = int((folder / used).read_text())
            rows = dict(
                line.split()
                for line in (folder / statistics).read_text().splitlines()
                if line.count(" ") == 1
            )
        except (OSError, ValueError):
            continue
        if most < _NO_LIMIT:
            return most, max(0, most - max(0, held - int(rows.get(idle, 0))))
    return None
