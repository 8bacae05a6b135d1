"""Host memory of the context bank: one pool of pinned blocks per LLM, handed out in ring order, shared by sessions and forks.

A block holds 64 tokens; what a row means is its owner's business (opaque bytes). The pool grows slab by slab up to its limit and
keeps its slabs for later sessions; what sessions took and gave back is counted, and zero at the end.
"""

import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.errors import OutOfHostMemory
from kernels.gather import BLOCK_TOKENS

SLAB = 1 << 30          # pinned slabs are powers of two: torch's pinned allocator rounds every request up to one
ALIGN = 64              # bytes: a host sector read twice made unaligned rows 4 to 18 times slower (KERNELS.md 2.1)


@dataclass(eq=False)
class Block:
    """One block of host memory: `bytes` is a uint8 view of its slab; refs counts the sequences that hold it."""

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

    pin: None pins where there is a GPU. Where pinning fails the pool warns once and goes on with ordinary memory: `pinned` says
    which. allocate(bytes, pinned) -> uint8 tensor, replaceable in tests. Thread-safe. Times in seconds, sizes in bytes.
    """

    def __init__(self, limit=None, slab_bytes=SLAB, pin=None, allocate=None):
        self.limit, self.slab_bytes = limit, slab_bytes
        self.pinned = torch.cuda.is_available() if pin is None else pin
        self.pin_seconds = 0.0
        self.in_use = 0                 # bytes of blocks with refs > 0
        self.programs = None            # of the gather, where the link was measured (engine/link.py)
        self._allocate = allocate or _allocate
        self._slabs, self._free = [], {}
        self._lock = threading.RLock()

    @property
    def reserved(self):
        """Bytes of slabs, whether used or not."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def slabs(self):
        """The slabs' tensors (uint8), for copies without a GPU."""
        return [slab.memory for slab in self._slabs]

    def take(self, block_bytes, count):
        """`count` blocks of `block_bytes` bytes (a multiple of 64), refs 1 each: all of them or OutOfHostMemory and none."""
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
        return free.popleft()           # ring order: what was given back last is taken last

    def _idle(self, size):
        """A slab that nobody uses, cut for blocks of another size."""
        return next((s for s in self._slabs if s.used == 0 and s.block_bytes != size and s.memory.numel() >= size), None)

    def _carve(self, slab, size):
        if slab.carved:
            mine = set(map(id, slab.carved))
            self._free[slab.block_bytes] = deque(b for b in self._free[slab.block_bytes] if id(b) not in mine)
        slab.block_bytes = size
        slab.carved = [Block(slab, slab.memory[at:at + size]) for at in range(0, slab.memory.numel() - size + 1, size)]
        self._free[size].extend(slab.carved)

    def _grow(self, size):
        wanted = self.slab_bytes if self.slab_bytes >= size else 1 << (size - 1).bit_length()
        left = wanted if self.limit is None else self.limit - self.reserved
        while wanted > left and wanted >= 2 * size:
            wanted //= 2                # the last slab is what the limit leaves
        if wanted > left:
            raise OutOfHostMemory(_refused(size, self, f"the pool's limit is {self.limit} bytes"))
        began = time.perf_counter()
        try:
            memory = self._get(wanted)
        finally:
            self.pin_seconds += time.perf_counter() - began
        slab = _Slab(memory)
        self._slabs.append(slab)
        return slab

    def _get(self, size):
        try:
            return self._allocate(size, self.pinned)
        except (RuntimeError, MemoryError) as error:
            if self.pinned and not self._slabs:
                warnings.warn(f"host memory cannot be pinned ({_first_line(error)}); going on with ordinary memory, which is slower. "
                              f"{_limits()}", stacklevel=2)
                self.pinned = False
                return self._get(size)
            raise OutOfHostMemory(_refused(size, self, _first_line(error))) from error

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
                raise ValueError(f"host pool: {self.in_use} bytes are in use; close their sessions first")
            self._slabs, self._free = [], {}


def _allocate(size, pinned):
    memory = torch.empty(size + (0 if pinned else ALIGN), dtype=torch.uint8, pin_memory=pinned)
    skip = -memory.data_ptr() % ALIGN
    return memory[skip:skip + size]


def _first_line(error):
    return str(error).split("\n")[0][:200]


def _limits():
    """The limits that a host allocation can meet here, and what to do about them."""
    found = []
    try:
        import resource
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        found.append("ulimit -l is unlimited" if soft == resource.RLIM_INFINITY else f"ulimit -l allows {soft // 1024} kB")
    except (ImportError, OSError, ValueError):
        pass
    container = Path("/sys/fs/cgroup/memory.max")
    if container.is_file():
        found.append(f"the container's memory.max is {container.read_text().strip()}")
    return "; ".join([*found, "remedies: a smaller max_context, ram_budget, ulimit -l unlimited, closing other sessions, freeing RAM"])


def _refused(size, pool, why):
    return (f"no host memory for {size} more bytes of context ({pool.in_use} bytes of {pool.reserved} in use): {why}; {_limits()}")


class BlockTable:
    """The blocks of one sequence: `blocks[i]` holds tokens 64 i .. 64 i + 63; `addresses` int64 on the device says where."""

    def __init__(self, pool, block_bytes, capacity, device):
        self.pool, self.block_bytes, self.blocks = pool, block_bytes, []
        self.addresses = torch.zeros(-(-capacity // BLOCK_TOKENS), dtype=torch.int64, device=device)

    def reserve(self, start, stop):
        """Make positions start .. stop-1 writable: blocks exist and are nobody else's. All or nothing (OutOfHostMemory).

        A shared block is replaced by a copy (fork); whoever calls has waited for transfers to it. Returns whether any was.
        """
        first, wanted = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        shared = [i for i in range(first, min(wanted, len(self.blocks))) if self.blocks[i].refs > 1]
        more = max(0, wanted - len(self.blocks))
        if not shared and not more:
            return False
        fresh = self.pool.take(self.block_bytes, len(shared) + more)
        for i in shared:
            block = fresh.pop()
            block.bytes.copy_(self.blocks[i].bytes)
            self.pool.release([self.blocks[i]])
            self.blocks[i] = block
            self.addresses[i].fill_(block.address)
        self._append(fresh)
        return bool(shared)

    def shares(self, start, stop):
        """Whether a block of positions start .. stop-1 has another holder."""
        return any(b.refs > 1 for b in self.blocks[start // BLOCK_TOKENS:-(-stop // BLOCK_TOKENS)])

    def _append(self, blocks):
        if not blocks:
            return
        at = len(self.blocks)
        self.blocks.extend(blocks)
        if len(blocks) == 1:            # decode: a fill is a kernel argument, nothing waits
            self.addresses[at].fill_(blocks[0].address)
        else:
            self.addresses[at:at + len(blocks)] = torch.tensor([b.address for b in blocks], dtype=torch.int64)

    def share(self, other, length):
        """Hold another table's blocks of the first `length` tokens too."""
        blocks = other.blocks[:-(-length // BLOCK_TOKENS)]
        self.pool.retain(blocks)
        self._append(list(blocks))

    def cut(self, length):
        """Give back the blocks past `length` tokens."""
        keep = -(-length // BLOCK_TOKENS)
        gone, self.blocks[keep:] = self.blocks[keep:], []
        self.pool.release(gone)
