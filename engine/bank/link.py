"""The gather's configuration for this machine: a short measurement of the link to host memory, once
per pool and device.
"""

from dataclasses import dataclass

import torch

from engine.errors import OutOfHostMemory
from engine.units import human
from kernels.gather import BLOCK_TOKENS, move_rows

# programs of 256 threads: more take SMs from the step, fewer leave the link idle
CANDIDATES = (2, 4, 8, 16, 32)
ROWS, ROW = 2048, 4096  # a published budget's rows of an 8B layer


@dataclass(frozen=True)
class Link:
    """How rows travel between host memory and the device: str() is one line for people.

    programs: of the gather kernel; gather, copy: bytes per second of it and of one contiguous
    pinned copy; memory: how host memory was had. Where nothing was measured, why not.
    """

    programs: int | None = None
    gather: float | None = None
    copy: float | None = None
    memory: str = ""
    why: str = ""

    def __str__(self):
        if self.gather is None:
            return f"link: not measured, {self.why}"
        return (
            f"link: gather {self.gather / 1e9:.1f} GB/s with {self.programs} programs, contiguous pinned copy "
            f"{self.copy / 1e9:.1f} GB/s ({self.gather / self.copy:.0%}); {self.memory}"
        )


def choose(rates, slack=0.03):
    """The fewest programs within `slack` of the best rate. rates: {programs: bytes per second}."""
    best = max(rates.values())
    return min(programs for programs, rate in rates.items() if rate >= best * (1 - slack))


def measure_link(pool, device):
    """The Link between `pool`'s memory and `device`, measured on blocks of the pool (given back
    afterwards) where there is a GPU.

    2048 rows of 4 KB in random order per run, 20 runs per candidate: about half a second at 50
    GB/s, compiling apart.
    """
    if device.type != "cuda":
        return Link(
            why="host memory is ordinary memory: this model runs on the CPU, and rows are copied within RAM"
        )
    try:
        # the first slab: now `pinned` is true or not
        blocks = pool.take(BLOCK_TOKENS * ROW, 2 * ROWS // BLOCK_TOKENS)
    except OutOfHostMemory:
        return Link(why="the pool has no room for the measurement")
    try:
        if not pool.pinned:
            return Link(
                why="host memory is ordinary memory (pinning was refused), and rows go through the CPU"
            )
        memory = f"{human(pool.reserved)} pinned in {pool.pin_seconds:.2f} s, {pool.way.name}"
        return _measured(blocks, device, memory)
    finally:
        pool.release(blocks)


def _measured(blocks, device, memory):
    table = torch.tensor([block.address for block in blocks], device=device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randperm(2 * ROWS, generator=generator)[:ROWS].int().to(device)
    buffer = torch.empty(ROWS, ROW // 4, dtype=torch.int32, device=device)
    rates = {}
    for programs in CANDIDATES:
        rates[programs] = _rate(
            lambda p=programs: move_rows(table, 0, ROW, buffer, tokens, 0, ROWS, None, programs=p)
        )
    source = blocks[0].slab.memory[: ROWS * ROW]
    copy = _rate(lambda: buffer.view(torch.uint8).view(-1).copy_(source, non_blocking=True))
    programs = choose(rates)
    return Link(programs, rates[programs], copy, memory)


def _rate(run, runs=20):
    for _ in range(3):
        run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(runs):
        run()
    stop.record()
    stop.synchronize()
    return runs * ROWS * ROW / (start.elapsed_time(stop) / 1e3)
