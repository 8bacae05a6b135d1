"""The resident memory of this process, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

from engine.base.errors import UsageError


def resident(field: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most since `forget_peak`. UsageError where the
    system does not say.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise UsageError(f"/proc/self/status: found no {field}; resident memory is read on Linux alone")


def forget_peak() -> None:
    """Have the peak begin at what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
