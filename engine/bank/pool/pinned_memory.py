"""Allocators of host memory. A GPU's kernels can read it only where its pages are locked.

Pages that are mapped and then registered with the driver cost no more than their
size. torch's pinned
allocator rounds every request up to a power of two (2.25 GiB become 4). Ordinary memory is not
locked. engine/bank/pool/host_pool.py tries the three in this order.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.base.device import synchronize_all
from engine.base.figures import human
from engine.plan.free_memory import available_bytes, container_memory

# bytes: a host sector read twice made unaligned rows 4 to 18 times slower
ALIGN = 64
# CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: for every context, readable in kernels
PORTABLE, MAPPED = 1, 2
# Locking 2 MB pages takes 2.5 times less than 4 KB ones. A child process must not share locked
# pages: after a fork the parent's first write would move a page that the device still reads.
ADVICE = [getattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if hasattr(mmap, name)]


@dataclass(frozen=True)
class Allocator:
    """A source of host memory: allocate(bytes) returns a uint8 tensor of that many bytes, aligned
    to ALIGN, or raises RuntimeError, MemoryError or OSError.

    pinned: whether a GPU's kernels can read it. exact: whether a request costs no more
    than the bytes asked for.
    """

    name: str
    allocate: Callable[[int], torch.Tensor]
    pinned: bool = False
    exact: bool = True


class Registrar(Protocol):
    """Locks and unlocks pages. register raises RuntimeError where it cannot."""

    def register(self, address: int, size: int) -> None: ...

    def unregister(self, address: int) -> None: ...


def allocators_here(pin: bool) -> list[Allocator]:
    """Return the allocators to try on this machine, best first. pin: those that a GPU can read come
    first.
    """
    found = [Allocator("ordinary memory", ordinary)]
    if pin:
        pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)
        found.insert(0, Allocator("torch's pinned allocator", pinned, pinned=True, exact=False))
        driver = cuda_driver()
        if driver is not None:
            mapped = partial(registered, driver)
            found.insert(0, Allocator("mapped and registered", mapped, pinned=True))
    return found


def ordinary(size: int) -> torch.Tensor:
    """Allocate `size` bytes that a GPU cannot read."""
    memory = torch.empty(size + ALIGN, dtype=torch.uint8)
    skip = -memory.data_ptr() % ALIGN
    return memory[skip : skip + size]


def registered(registrar: Registrar, size: int) -> torch.Tensor:
    """Map `size` bytes of fresh pages and lock them; the last view of the tensor unlocks and unmaps
    them. Raises OSError where nothing can be mapped.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ADVICE:
        with contextlib.suppress(OSError):  # a kernel without it: 4 KB pages, and forks as ever
            pages.madvise(advice)
    view = memoryview(pages)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    registrar.register(memory.data_ptr(), size)
    # The view dies with the tensor's storage; the finalizer holds the pages, so that they are
    # unlocked before they are unmapped. Not at exit: by then the driver may be gone, and the
    # process gives everything back.
    weakref.finalize(view, _unlock, registrar, memory.data_ptr(), pages).atexit = False
    return memory


def _unlock(registrar: Registrar, address: int, _pages: mmap.mmap) -> None:
    # race: a copy that is still on its way would read or write pages that are gone
    synchronize_all()
    registrar.unregister(address)


class Driver:
    """A Registrar that asks the CUDA driver. library: the driver's ctypes library. enter: makes a
    context current on this thread; called where none is.

    The runtime has the same calls (torch.cuda.cudart().cudaHostRegister), but one that fails leaves
    its error behind, torch offers nothing to take it away, and the next kernel launch would find
    it. The driver's calls leave nothing.
    """

    def __init__(self, library: ctypes.CDLL, enter: Callable[[], object]) -> None:
        self._library, self._enter = library, enter

    def register(self, address: int, size: int) -> None:
        """Lock pages. Raises RuntimeError with the driver's words where it refuses, or where the
        device sees the pages at another address.
        """
        current = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(current))
        if not current.value:
            self._enter()
        code = self._library.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(PORTABLE | MAPPED)
        )
        if code:
            raise RuntimeError(f"{self._name(code)} when registering {human(size)}")
        seen = ctypes.c_uint64()
        code = self._library.cuMemHostGetDevicePointer_v2(
            ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        # tables of host addresses are read by kernels as they are
        if code or seen.value != address:
            self.unregister(address)
            raise RuntimeError(
                self._name(code) if code else "the device sees registered memory at another address"
            )

    def unregister(self, address: int) -> None:
        """Unlock pages. A context that is gone has done so already."""
        self._library.cuMemHostUnregister(ctypes.c_void_p(address))

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace") + f" ({code})"


def cuda_driver() -> Driver | None:
    """Return this machine's Driver, or None where mapping and registering is not known to work
    (Windows, no driver).
    """
    if sys.platform != "linux":
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"), torch.cuda.mem_get_info)
    except OSError:
        return None


def limits() -> str:
    """Describe the limits that a host allocation can meet here and the remedies, for an error."""
    found = []
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        found.append(
            "ulimit -l is unlimited"
            if soft == resource.RLIM_INFINITY
            else f"ulimit -l allows {soft // 1024} kB"
        )
    except (ImportError, OSError, ValueError):
        pass
    container = container_memory()
    if container is not None:
        found.append(f"the container's memory limit is {human(container[0])}")
    free, where = available_bytes(torch.device("cpu"))
    found.append(f"{human(free)} {where}")
    found.append(
        "remedies: a smaller max_context, ram_budget, ulimit -l unlimited, closing other sessions, "
        "freeing RAM"
    )
    return "; ".join(found)
