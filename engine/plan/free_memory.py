"""How much memory is free: on a GPU, in the machine, in the container that this process may be in."""

import os
from pathlib import Path

import torch

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
_NO_LIMIT = 1 << 62  # version 1 says "none" by a number of this size


def available_bytes(device):
    """(free bytes, what was asked) on a device: CUDA's own figure, or MemAvailable and the
    container's limit on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], f"{torch.cuda.get_device_name(device)}"
    free = _meminfo() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = container_memory()
    left = free if found is None else found[1]
    return (free, "free RAM") if left >= free else (left, "left of the container's memory limit")


def _meminfo(path=Path("/proc/meminfo")):
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def container_memory(folder=Path("/sys/fs/cgroup")):
    """(limit, bytes left) of this process's container, or None where there is none or it has no
    limit.

    Weights that were read from disk stay in the container's page cache and count as used; the
    kernel drops them first, so they are free.
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
