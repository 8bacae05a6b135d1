"""How many cores this process may use: of the machine, of its affinity, of the container."""

from __future__ import annotations

import os
from pathlib import Path

from engine.base.cores.control_groups import control_groups

# files of a control group of version 1, beside version 2's cpu.max: microseconds of a period
_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def free_cores(
    process: Path = Path("/proc/self"), version_1: Path = Path("/sys/fs/cgroup/cpu")
) -> int:
    """Return the least of the machine's cores, this process's affinity and the quota of the control
    groups around it (Docker, Slurm, systemd), at least 1. process, version_1: where the last stand.
    """
    try:
        found = [len(os.sched_getaffinity(0))]
    except AttributeError:  # macOS, Windows
        found = [os.cpu_count() or 1]
    for kind, group in control_groups(process):
        if kind == "cgroup2":
            found += _quota(group / "cpu.max")
    found += _quota(*(version_1 / name for name in _V1))
    return max(1, min(found))


def _quota(*files: Path) -> list[int]:
    """Return [whole cores] of a quota and a period, in one file or in two; [] without a quota."""
    try:
        words = [word for file in files for word in file.read_text().split()]
        quota, period = int(words[0]), int(words[1])  # "max" and -1 are no quota
        return [quota // period] if quota > 0 else []
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return []
