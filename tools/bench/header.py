"""Where a figure was measured: hardware, versions, commit, flags; and what may have spoilt it."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from engine.base.version import VERSION
from kernels.launch.isa import isa

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "llama-cpp-python", "numpy")


def header(device, flags, rates):
    """Facts of this run as a dict."""
    return {
        "program": f"omnikv bench {VERSION}",
        "commit": commit(),
        "date": _date(),
        "hardware": hardware(device),
        "load": load(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "flags": " ".join(flags),
        "measured": rates.to_dict(),
    }


def _date():
    import datetime

    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def commit():
    """Short hash of the checkout, with "+" where files differ from it; "unknown" outside one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def load():
    """Mean number of runnable processes in the last 1, 5 and 15 minutes, this one's threads among
    them; None where the system does not say.
    """
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None


def version(package):
    """Version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hardware(device):
    """One line: the processor or the GPU, with memory."""
    device = torch.device(device)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return (
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} "
            f"SMs, CUDA {torch.version.cuda}"
        )
    memory = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if hasattr(os, "sysconf")
        else 0
    )
    return f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, instruction set {isa()}"


def _processor():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def last_level_cache():
    """Bytes of the largest CPU cache, or 0 where the system does not tell."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit():
            sizes.append(int(text[:-1]) * {"K": 1024, "M": 1024**2}.get(text[-1], 1))
    return max(sizes)


def clocks():
    """(SM MHz, memory MHz, degrees) of GPU 0 by nvidia-smi, or None."""
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=clocks.sm,clocks.mem,temperature.gpu",
            "--format=csv,noheader,nounits",
            "--id=0",
        ]
        found = subprocess.run(query, capture_output=True, text=True, timeout=10)
        return tuple(int(part) for part in found.stdout.strip().split(","))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def warnings(device, cells, before, after, clocks_before, clocks_after):
    """Lines about what may have spoilt the figures: spread, other load, bandwidth or clocks that
    moved, caches.
    """
    found = []
    loud = [f"{c.name} {c.test} {c.n}" for c in cells if c.noisy]
    if loud:
        found.append(
            f"noisy: p95 above 1.25 x median in {len(loud)} of "
            f"{sum(bool(c.seconds) for c in cells)} cells "
            f"({', '.join(loud[:4])}{' ...' if len(loud) > 4 else ''})"
        )
    if abs(after.read / before.read - 1) > 0.1:
        found.append(
            f"memory bandwidth moved during the run: {before.read / 1e9:.1f} -> "
            f"{after.read / 1e9:.1f} GB/s"
        )
    if torch.device(device).type == "cpu":
        load, threads = (
            os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
            torch.get_num_threads(),
        )
        if load > threads + 0.5:
            found.append(
                f"other programs ran: load average {load:.1f} with {threads} threads of ours"
            )
        small = [
            c for c in cells if c.needed is not None and c.needed.floor < 2 * last_level_cache()
        ]
        if small:
            found.append(
                f"{len(small)} cells read less than twice the last-level cache "
                f"({last_level_cache() / 2**20:.0f} MiB): part of "
                f"it may come from there, so more than 100% of the floor is possible"
            )
    if clocks_before and clocks_after and abs(clocks_after[0] / max(1, clocks_before[0]) - 1) > 0.1:
        found.append(f"SM clock moved: {clocks_before[0]} -> {clocks_after[0]} MHz")
    return found


def flags_given():
    """The command line as typed."""
    return sys.argv[1:]
