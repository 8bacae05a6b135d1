"""How fast rows travel between host memory and this device, measured once per pool and device.

The measurement chooses how many programs the gather kernel runs with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.bank.pool.host_pool import Block, HostPool
from engine.base.errors import OutOfHostMemory
from engine.base.figures import human
from kernels.tier.gather import BLOCK_TOKENS, move_rows

# programs of 256 threads: more take SMs from the step, fewer leave the link idle
CANDIDATES = (2, 4, 8, 16, 32)
ROWS, ROW = 2048, 4096  # a published budget's rows of an 8B layer


@dataclass(frozen=True)
class Link:
    """The result of a measurement; str() is one line for people.

    programs: of the gather kernel. gather, copy: bytes per second of the gather and of one
    contiguous pinned copy. memory: how host memory was allocated. why: the reason where nothing was
    measured.
    """

    programs: int | None = None
    gather: float | None = None
    copy: float | None = None
    memory: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.gather is None or self.copy is None:
            return f"link: not measured, {self.why}"
        return (
            f"link: gather {self.gather / 1e9:.1f} GB/s with {self.programs} programs, "
            f"contiguous pinned copy {self.copy / 1e9:.1f} GB/s ({self.gather / self.copy:.0%}); "
            f"{self.memory}"
        )


def choose(rates: Mapping[int, float], slack: float = 0.03) -> int:
    """Return the fewest programs within `slack` of the best rate. rates: {programs: bytes per
    second}.
    """
    best = max(rates.values())
    return min(programs for programs, rate in rates.items() if rate >= best * (1 - slack))


def measure_link(pool: HostPool, device: torch.device) -> Link:
    """Measure the link between `pool`'s memory and a GPU, on blocks that are given back afterwards.

    Each candidate gathers 2048 rows of 4 KB in random order 20 times: about half a second in all at
    50 GB/s, compilation not included.
    """
    if device.type != "cuda":
        return Link(
            why="host memory is ordinary memory: this model runs on the CPU, and rows are copied "
            "within RAM"
        )
    try:
        # the first slab: now `pinned` is true or not
        blocks = pool.take(BLOCK_TOKENS * ROW, 2 * ROWS // BLOCK_TOKENS)
    except OutOfHostMemory:
        return Link(why="the pool has no room for the measurement")
    try:
        if not pool.pinned:
            return Link(
                why="host memory is ordinary memory (pinning was refused), and rows go through "
                "the CPU"
            )
        seconds = f"{pool.pin_seconds:.2f} s"
        memory = f"{human(pool.reserved)} pinned in {seconds}, {pool.allocator.name}"
        return _measured(blocks, device, memory)
    finally:
        pool.release(blocks)


def _measured(blocks: Sequence[Block], device: torch.device, memory: str) -> Link:
    table = torch.tensor([block.address for block in blocks], device=device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(2 * ROWS, generator=generator)[:ROWS].int().to(device)
    buffer = torch.empty(ROWS, ROW // 4, dtype=torch.int32, device=device)
    gather = partial(move_rows, table, 0, ROW, buffer, tokens, 0, ROWS, [])
    rates = {}
    for programs in CANDIDATES:
        rates[programs] = _rate(partial(gather, programs=programs))
    source = blocks[0].slab.memory[: ROWS * ROW]
    copy = _rate(lambda: buffer.view(torch.uint8).view(-1).copy_(source, non_blocking=True))
    programs = choose(rates)
    return Link(programs, rates[programs], copy, memory)


def _rate(run: Callable[[], object], runs: int = 20) -> float:
    for _ in range(3):
        run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        run()
    stop.record()
    stop.synchronize()
    return runs * ROWS * ROW / (start.elapsed_time(stop) / 1e3)
