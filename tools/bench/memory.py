"""How much memory this process holds, and its peak while something runs."""

import ctypes
import re
import threading
from pathlib import Path

import torch


def held(device):
    """Bytes held now: allocated on a GPU, anonymous resident memory on a CPU (0 where the system
    does not tell).
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    _trim()
    return _resident()


def _resident():
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def _trim():
    """Give freed heap pages back first, where the C library offers it: they are nobody's."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        pass


class Peak:
    """Context manager: `bytes` is the peak above the level at entry (CUDA's own statistic, or
    sampled every 5 ms).
    """

    def __init__(self, device):
        self.device, self.bytes, self._stop = torch.device(device), 0, threading.Event()

    def __enter__(self):
        self._base = held(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, _resident() - self._base)

    def __exit__(self, *_):
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._base
            return
        self._stop.set()
        self._thread.join()
