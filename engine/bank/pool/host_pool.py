"""Host memory of the context bank: one pool of pinned blocks per LLM, shared by its sessions.

The pool allocates slabs, up to its limit, and cuts them into blocks of the size that is asked for.
Blocks are opaque bytes, counted by holder, so that forks can share them. Slabs are kept for later
sessions. While a prompt is read, a thread takes the slabs that it will need: mapping, touching and
locking pages is slow, 3 to 4 GB/s published for locking.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from engine.bank.pool.pinned_memory import Allocator, allocators_here, limits
from engine.base.device import current, synchronize_all
from engine.base.errors import OutOfHostMemory
from engine.base.figures import first_line, human
from engine.base.interrupts import complete
from engine.plan.free_memory import HEADROOM, available_bytes

# bytes: a power of two, because torch's pinned allocator rounds every request up to one
SLAB = 1 << 30
PAGE = 4096
# bytes that the thread touches before it hands their blocks out: 5 to 10 ms of page faults
TOUCHED_AT_ONCE = 1 << 25


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor  # uint8
    block_bytes: int = 0  # of the blocks it is cut into
    used: int = 0  # blocks with holders
    blocks: list[Block] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """A block of host memory: `bytes` is a uint8 view of its slab, refs counts its holders."""

    slab: _Slab
    bytes: torch.Tensor
    refs: int = 0

    @property
    def address(self) -> int:
        """Where it begins, for the device too where the pool is pinned (unified addressing)."""
        return self.bytes.data_ptr()


class HostPool:
    """Blocks of host memory, in slabs of at most `limit` bytes together (None: no limit but the
    machine's). Thread-safe. Times in seconds, sizes in bytes.

    pin: whether the GPU is to read the memory (None: where there is one). Allocators are tried in
    order: one that fails at the first slab is replaced by the next, and falling back to memory that
    is not pinned warns once. allocators (in order) and free (a function that returns the bytes of
    free RAM) can be given by tests.
    """

    def __init__(
        self,
        limit: int | None = None,
        slab_bytes: int = SLAB,
        pin: bool | None = None,
        allocators: Iterable[Allocator] | None = None,
        free: Callable[[], int] | None = None,
    ) -> None:
        self.limit, self.slab_bytes = limit, slab_bytes
        self.pin_seconds = 0.0
        self.in_use = 0  # bytes of blocks with holders
        # programs of the gather kernel, where the link was measured (engine/bank/pool/link.py)
        self.programs: int | None = None
        if allocators is None:
            allocators = allocators_here(torch.cuda.is_available() if pin is None else pin)
        self._allocators = list(allocators)
        self._free_ram = free or (lambda: available_bytes(torch.device("cpu"))[0])
        self._refusals: list[str] = []
        self._slabs: list[_Slab] = []
        self._free: dict[int, list[Block]] = {}  # by bytes of a block
        self._lock = threading.Condition()
        self._growing = False  # a thread takes slabs, and tells when it has some

    @property
    def allocator(self) -> Allocator:
        """The Allocator that slabs come from; before the first slab, the one tried first."""
        return self._allocators[0]

    @property
    def pinned(self) -> bool:
        """Whether kernels can read the blocks."""
        return self.allocator.pinned

    @property
    def reserved(self) -> int:
        """Bytes of all slabs, in use or not."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def idle(self) -> int:
        """Bytes of the slabs without holders. The system counts them as used; new blocks of any
        size come from them before the pool grows.
        """
        return sum(slab.memory.numel() for slab in self._slabs if slab.used == 0)

    @property
    def slabs(self) -> list[torch.Tensor]:
        """The slabs' memory (uint8), for copies without a GPU."""
        return [slab.memory for slab in self._slabs]

    def take(self, block_bytes: int, count: int, into: list[Block] | None = None) -> list[Block]:
        """Return `count` blocks of `block_bytes` bytes (a multiple of 64) with one holder each, in
        the empty list `into` where it is given: an interrupt on the way back loses none of those.
        Raises OutOfHostMemory where not all can be had.
        """
        taken: list[Block] = [] if into is None else into
        with self._lock:
            try:
                for _ in range(count):
                    block = self._next_free(block_bytes)
                    block.refs = 1
                    block.slab.used += 1
                    self.in_use += block_bytes
                    taken.append(block)
            except BaseException:
                self.release(taken)
                raise
        return taken

    def _next_free(self, size: int) -> Block:
        while not (free := self._free.setdefault(size, [])):
            if self._growing:
                self._lock.wait()
            else:
                self._hand_out(self._cut(self._idle(size) or self._grow(size), size))
        # last given back, first taken: pages that nobody has touched stay the system's
        return free.pop()

    def _idle(self, size: int) -> _Slab | None:
        """Return a slab without holders that is cut into blocks of another size."""
        for slab in self._slabs:
            if slab.used == 0 and slab.block_bytes != size and slab.memory.numel() >= size:
                return slab
        return None

    def _cut(self, slab: _Slab, size: int) -> list[Block]:
        """Cut a slab into blocks of `size` bytes, none of which is free yet."""
        if slab.blocks:
            mine = set(map(id, slab.blocks))
            self._free[slab.block_bytes] = [
                b for b in self._free[slab.block_bytes] if id(b) not in mine
            ]
        slab.block_bytes = size
        starts = range(0, slab.memory.numel() - size + 1, size)
        slab.blocks = [Block(slab, slab.memory[at : at + size]) for at in starts]
        return slab.blocks

    def _hand_out(self, blocks: list[Block]) -> None:
        """Make new blocks of one slab free: the first is taken first, and after older ones."""
        if blocks:
            self._free.setdefault(blocks[0].slab.block_bytes, [])[:0] = reversed(blocks)

    def _grow(self, size: int) -> _Slab:
        """Allocate a slab for blocks of `size` bytes."""
        memory = None
        while memory is None:
            wanted, pinned, began = self._slab_size(size), self.pinned, time.perf_counter()
            memory = self._allocate(size, wanted)
            self.pin_seconds += (time.perf_counter() - began) * pinned
        slab = _Slab(memory)
        self._slabs.append(slab)
        return slab

    def _slab_size(self, size: int) -> int:
        """Return the bytes of the next slab: the usual size, or as much as the limit leaves. Pages
        that are locked at once are limited by the free RAM too.
        """
        exact = self.allocator.exact
        if self.slab_bytes >= size:
            wanted = self.slab_bytes
        else:
            wanted = size if exact else 1 << (size - 1).bit_length()
        left, why = wanted, ""
        if self.limit is not None:
            left, why = self.limit - self.reserved, f"the pool's limit is {self.limit} bytes"
        if self.pinned and (free := int(self._free_ram() * HEADROOM)) < left:
            left, why = free, f"only {human(free)} of RAM may still be locked"
        if wanted != left and exact:
            wanted = min(wanted, left) // size * size  # whole blocks: the limit loses no byte
        while wanted > left and wanted >= 2 * size:
            wanted //= 2
        if not size <= wanted <= left:
            raise OutOfHostMemory(_refused(size, self, why))
        return wanted

    def _allocate(self, size: int, wanted: int) -> torch.Tensor | None:
        """Return a slab's memory, or None where the allocator failed and the next one is due."""
        try:
            return self.allocator.allocate(wanted)
        except (RuntimeError, MemoryError, OSError) as error:
            why = first_line(error)
            follower = self._allocators[1] if len(self._allocators) > 1 else None
            # pinned and ordinary slabs are never mixed
            if follower is None or (self._slabs and follower.pinned != self.pinned):
                raise OutOfHostMemory(_refused(size, self, why)) from error
        refused = self._allocators.pop(0)
        self._refusals.append(f"{refused.name}: {why}")
        if refused.pinned and not follower.pinned:
            warnings.warn(
                f"host memory cannot be pinned ({'; '.join(self._refusals)}); going on with "
                f"ordinary memory, which is slower. {limits()}",
                stacklevel=2,
            )
        return None

    @contextlib.contextmanager
    def ahead(self, size: int, count: int, device: torch.device) -> Iterator[None]:
        """While the body runs, let a thread allocate slabs until `count` blocks of `size` bytes are
        there to be taken. No thread is left behind, however the body ends.

        What the thread cannot have, it leaves to `take`, which tries again and raises. device:
        whose context a new thread enters.
        """
        stop = threading.Event()
        work = threading.Thread(
            target=self._grow_ahead, args=(size, count, device, stop), name="host memory"
        )
        with self._lock:
            wanted = count > len(self._free.get(size, ())) and not self._growing
            wanted = wanted and self._idle(size) is None
        try:
            if wanted:
                self._growing = True
                try:
                    work.start()
                except RuntimeError:  # no more threads: blocks come as they are taken
                    self._grown()
            yield
        finally:
            stop.set()
            if work.is_alive():
                complete(work.join)
            if wanted:
                complete(self._grown)

    def _grown(self) -> None:
        with self._lock:
            self._growing = False
            self._lock.notify_all()

    def _grow_ahead(
        self, size: int, count: int, device: torch.device, stop: threading.Event
    ) -> None:
        """The thread of `ahead`."""
        missing = count - len(self._free.get(size, ()))
        refused = (OutOfHostMemory, RuntimeError, MemoryError, OSError)
        try:
            with contextlib.suppress(*refused), current(device):
                while missing > 0 and not stop.is_set():
                    missing -= self._one_ahead(size, missing, stop)
        finally:
            self._grown()

    def _one_ahead(self, size: int, missing: int, stop: threading.Event) -> int:
        """Allocate a slab and hand its blocks out; return how many they are."""
        began = time.perf_counter()
        memory = self.allocator.allocate(self._slab_size(size))
        with self._lock:
            self.pin_seconds += (time.perf_counter() - began) * self.pinned
            slab = _Slab(memory, used=1)  # nobody else cuts it meanwhile
            self._slabs.append(slab)
            self._cut(slab, size)
        self._touch(slab, missing, stop)
        return len(slab.blocks)

    def _touch(self, slab: _Slab, missing: int, stop: threading.Event) -> None:
        """Hand out a new slab's blocks; the first `missing` once their pages are there. Locked
        pages are there already.
        """
        blocks, size, done = slab.blocks, slab.block_bytes, 0
        while done < len(blocks):
            some = max(1, TOUCHED_AT_ONCE // size)
            if self.pinned or done >= missing or stop.is_set():
                some = len(blocks)
            else:
                some = min(some, missing - done)
                slab.memory[done * size : (done + some) * size : PAGE].zero_()
            with self._lock:
                self._hand_out(blocks[done : done + some])
                self._lock.notify_all()
            done += some
        with self._lock:
            slab.used -= 1

    def retain(self, blocks: Iterable[Block], into: list[Block]) -> None:
        """Count one more holder of each block (fork), and add it to `into`."""
        with self._lock:
            for block in blocks:
                block.refs += 1
                into.append(block)

    def release(self, blocks: list[Block]) -> None:
        """Count one holder less of each block, and empty the list. A block without holders may be
        handed out again.
        """
        with self._lock:
            for block in blocks:
                block.refs -= 1
                if block.refs == 0:
                    block.slab.used -= 1
                    self.in_use -= block.slab.block_bytes
                    self._free[block.slab.block_bytes].append(block)
            blocks.clear()

    def close(self) -> None:
        """Give the memory back to the system. Raises ValueError while blocks are in use."""
        with self._lock:
            while self._growing:
                self._lock.wait()
            if self.in_use:
                raise ValueError(
                    f"host pool: {self.in_use} bytes are in use; close their sessions first"
                )
            if self.pinned and self._slabs:
                # race: a copy that is still on its way would read or write pages that are gone
                synchronize_all()
            self._slabs, self._free = [], {}


def _refused(size: int, pool: HostPool, why: str) -> str:
    return (
        f"no host memory for {size} more bytes of context ({pool.in_use} bytes of "
        f"{pool.reserved} in use): {why}; {limits()}"
    )
