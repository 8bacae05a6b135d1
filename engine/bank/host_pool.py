"""Host memory of the context bank: one pool of pinned blocks per LLM, handed out in ring order,
shared by sessions and forks.

A block holds 64 tokens; what a row means is its owner's business (opaque bytes). The pool grows
slab by slab up to its limit and keeps its slabs for later sessions; what sessions took and gave
back is counted, and zero at the end.
"""

import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field

import torch

from engine.bank.pinned_memory import limits
from engine.bank.pinned_memory import ways as default_ways
from engine.errors import OutOfHostMemory
from engine.plan.free_memory import HEADROOM, available_bytes
from engine.units import human

# bytes; a power of two, which is what torch's pinned allocator rounds a request up to
SLAB = 1 << 30


@dataclass(eq=False)
class Block:
    """One block of host memory: `bytes` is a uint8 view of its slab; refs counts the sequences that
    hold it.
    """

    slab: object
    bytes: torch.Tensor
    refs: int = 0

    @property
    def address(self):
        """Where it begins; valid on the device too where the pool is pinned (unified addressing)."""
        return self.bytes.data_ptr()


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor
    block_bytes: int = 0
    used: int = 0
    carved: list = field(default_factory=list)


class HostPool:
    """Blocks of host memory, at most `limit` bytes of slabs (None: no limit but the machine's).

    pin: None pins where there is a GPU. A way of pinning that is refused at the first slab gives
    way to the next, and pinning to ordinary memory with one warning: `pinned` and `way` say which
    it is. ways: engine.bank.pinned_memory.Way list in order, free() -> bytes of free RAM; both
    replaceable in tests. Thread-safe. Times in seconds, sizes in bytes.
    """

    def __init__(self, limit=None, slab_bytes=SLAB, pin=None, ways=None, free=None):
        self.limit, self.slab_bytes = limit, slab_bytes
        self.pin_seconds = 0.0
        self.in_use = 0  # bytes of blocks with refs > 0
        # of the gather, where the link was measured (engine/bank/link.py)
        self.programs = None
        self._ways = list(
            ways
            if ways is not None
            else default_ways(torch.cuda.is_available() if pin is None else pin)
        )
        self._free_ram = free or (lambda: available_bytes(torch.device("cpu"))[0])
        self._refusals = []
        self._slabs, self._free = [], {}
        self._lock = threading.RLock()

    @property
    def way(self):
        """The engine.bank.pinned_memory.Way that slabs come by; before the first slab, the one that
        will be tried.
        """
        return self._ways[0]

    @property
    def pinned(self):
        """Whether kernels can read the blocks."""
        return self.way.pinned

    @property
    def reserved(self):
        """Bytes of slabs, whether used or not."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def slabs(self):
        """The slabs' tensors (uint8), for copies without a GPU."""
        return [slab.memory for slab in self._slabs]

    def take(self, block_bytes, count):
        """`count` blocks of `block_bytes` bytes (a multiple of 64), refs 1 each: all of them or
        OutOfHostMemory and none.
        """
        taken = []
        with self._lock:
            try:
                for _ in range(count):
                    block = self._one(block_bytes)
                    block.refs = 1
                    block.slab.used += 1
                    self.in_use += block_bytes
                    taken.append(block)
            except BaseException:
                self.release(taken)
                raise
        return taken

    def _one(self, size):
        free = self._free.setdefault(size, deque())
        if not free:
            self._carve(self._idle(size) or self._grow(size), size)
        return free.popleft()  # ring order: what was given back last is taken last

    def _idle(self, size):
        """A slab that nobody uses, cut for blocks of another size."""
        return next(
            (
                s
                for s in self._slabs
                if s.used == 0 and s.block_bytes != size and s.memory.numel() >= size
            ),
            None,
        )

    def _carve(self, slab, size):
        if slab.carved:
            mine = set(map(id, slab.carved))
            self._free[slab.block_bytes] = deque(
                b for b in self._free[slab.block_bytes] if id(b) not in mine
            )
        slab.block_bytes = size
        slab.carved = [
            Block(slab, slab.memory[at : at + size])
            for at in range(0, slab.memory.numel() - size + 1, size)
        ]
        self._free[size].extend(slab.carved)

    def _grow(self, size):
        memory = None
        while memory is None:
            wanted, pinned, began = self._slab_size(size), self.pinned, time.perf_counter()
            memory = self._get(size, wanted)
            self.pin_seconds += (time.perf_counter() - began) * pinned
        slab = _Slab(memory)
        self._slabs.append(slab)
        return slab

    def _slab_size(self, size):
        """Bytes of the next slab: the usual size, or what the limit and, for pages that are locked
        at once, the free RAM leave.
        """
        exact = self.way.exact
        wanted = (
            self.slab_bytes
            if self.slab_bytes >= size
            else size
            if exact
            else 1 << (size - 1).bit_length()
        )
        left, why = float("inf"), ""
        if self.limit is not None:
            left, why = self.limit - self.reserved, f"the pool's limit is {self.limit} bytes"
        if self.pinned and (free := int(self._free_ram() * HEADROOM)) < left:
            left, why = free, f"only {human(free)} of RAM may still be locked"
        if wanted > left and exact:
            wanted = left // size * size
        while wanted > left and wanted >= 2 * size:
            wanted //= 2
        if not size <= wanted <= left:
            raise OutOfHostMemory(_refused(size, self, why))
        return wanted

    def _get(self, size, wanted):
        """A slab's memory, or None where its way was refused and the next one takes its place."""
        try:
            return self.way.allocate(wanted)
        except (RuntimeError, MemoryError, OSError) as error:
            why = _first_line(error)
            follower = self._ways[1] if len(self._ways) > 1 else None
            if follower is None or (self._slabs and follower.pinned != self.pinned):
                raise OutOfHostMemory(_refused(size, self, why)) from error
        refused = self._ways.pop(0)
        self._refusals.append(f"{refused.name}: {why}")
        if refused.pinned and not follower.pinned:
            warnings.warn(
                f"host memory cannot be pinned ({'; '.join(self._refusals)}); going on with ordinary memory, which is "
                f"slower. {limits()}",
                stacklevel=2,
            )
        return None

    def retain(self, blocks):
        """One more holder of each block (fork)."""
        with self._lock:
            for block in blocks:
                block.refs += 1

    def release(self, blocks):
        """One holder less of each; a block without holders may be handed out again."""
        with self._lock:
            for block in blocks:
                block.refs -= 1
                if block.refs == 0:
                    block.slab.used -= 1
                    self.in_use -= block.slab.block_bytes
                    self._free[block.slab.block_bytes].append(block)

    def close(self):
        """Give the memory back to the system. Raises ValueError while blocks are in use."""
        with self._lock:
            if self.in_use:
                raise ValueError(
                    f"host pool: {self.in_use} bytes are in use; close their sessions first"
                )
            self._slabs, self._free = [], {}


def _first_line(error):
    return str(error).split("\n")[0][:200]


def _refused(size, pool, why):
    return f"no host memory for {size} more bytes of context ({pool.in_use} bytes of {pool.reserved} in use): {why}; {limits()}"
