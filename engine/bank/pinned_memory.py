"""Where host memory comes from: pages mapped and registered with the GPU's driver, torch's pinned
allocator, ordinary memory.

A GPU reads host memory in kernels only where its pages are locked. torch's pinned allocator rounds
every request up to a power of two (2.25 GiB become 4); pages that are mapped first and registered
then cost what they are. engine/bank/host_pool.py tries these in order.
"""

import ctypes
import mmap
import sys
import weakref
from dataclasses import dataclass
from functools import partial

import torch

from engine.plan.free_memory import available_bytes, container_memory
from engine.units import human

# bytes: a host sector read twice made unaligned rows 4 to 18 times slower (KERNELS.md 2.1)
ALIGN = 64
# CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP: for every context, readable in kernels
PORTABLE, MAPPED = 1, 2


@dataclass(frozen=True)
class Way:
    """One way to get host memory: allocate(bytes) -> uint8 tensor of that many bytes,
    ALIGN-aligned, or a RuntimeError, MemoryError or OSError. pinned: whether a GPU can read it in
    kernels; exact: whether it costs what was asked for, whatever the number.
    """

    name: str
    allocate: object
    pinned: bool = False
    exact: bool = True


def ordinary(size):
    """uint8 tensor of `size` bytes that the GPU cannot read."""
    memory = torch.empty(size + ALIGN, dtype=torch.uint8)
    skip = -memory.data_ptr() % ALIGN
    return memory[skip : skip + size]


def ways(pin):
    """The ways to try on this machine, best first; `pin`: those that a GPU can read come first."""
    found = [Way("ordinary memory", ordinary)]
    if pin:
        found.insert(
            0,
            Way(
                "torch's pinned allocator",
                partial(torch.empty, dtype=torch.uint8, pin_memory=True),
                pinned=True,
                exact=False,
            ),
        )
        driver = cuda_driver()
        if driver is not None:
            found.insert(0, Way("mapped and registered", partial(registered, driver), pinned=True))
    return found


def registered(registrar, size):
    """uint8 tensor over `size` bytes of fresh pages that `registrar` has locked; unlocked and
    unmapped with its last view.

    registrar: register(address, bytes), which raises RuntimeError, and unregister(address). Raises
    OSError where nothing can be mapped.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(pages)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    registrar.register(memory.data_ptr(), size)
    # The view dies with the tensor's storage; the finalizer holds the pages, so that they are
    # unlocked before they are unmapped. Not at exit: by then the driver may be gone, and the
    # process gives everything back.
    weakref.finalize(view, _unlock, registrar, memory.data_ptr(), pages).atexit = False
    return memory


def _unlock(registrar, address, _pages):
    registrar.unregister(address)


class Driver:
    """Page-locking by the CUDA driver: `library` is its ctypes library, `enter` makes a context
    current on this thread if none is.

    The runtime has the same calls (torch.cuda.cudart().cudaHostRegister), but one that fails leaves
    its error behind, torch offers nothing to take it away, and the next kernel launch would find
    it. The driver's calls leave nothing.
    """

    def __init__(self, library, enter):
        self._library, self._enter = library, enter

    def register(self, address, size):
        """Lock pages. RuntimeError with the driver's words where it refuses, or where the device
        sees them at another address.
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

    def unregister(self, address):
        """Unlock pages; a context that is gone has done so already."""
        self._library.cuMemHostUnregister(ctypes.c_void_p(address))

    def _name(self, code):
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace") + f" ({code})"


def cuda_driver():
    """The Driver of this machine, or None where mapping and registering is not known to work
    (Windows, no driver).
    """
    if sys.platform != "linux":
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"), torch.cuda.mem_get_info)
    except OSError:
        return None


def limits():
    """The limits that a host allocation can meet here, and what to do about them: text for an
    error's line.
    """
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
    return "; ".join(
        [
            *found,
            "remedies: a smaller max_context, ram_budget, ulimit -l unlimited, closing other sessions, freeing RAM",
        ]
    )
