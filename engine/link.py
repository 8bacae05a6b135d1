"""The gather's configuration for this machine: a short measurement of the link to host memory, once per pool and device."""

from dataclasses import dataclass

import torch

from kernels.gather import BLOCK_TOKENS, move_rows

CANDIDATES = (2, 4, 8, 16, 32)      # programs of 256 threads: more take SMs from the step, fewer leave the link idle
ROWS, ROW = 2048, 4096              # a published budget's rows of an 8B layer


@dataclass(frozen=True)
class Link:
    """What was measured: programs chosen, and bytes per second of the gather and of one contiguous pinned copy."""

    programs: int
    gather: float
    copy: float

    def __str__(self):
        return (f"link: gather {self.gather / 1e9:.1f} GB/s with {self.programs} programs, contiguous pinned copy "
                f"{self.copy / 1e9:.1f} GB/s ({self.gather / self.copy:.0%})")


def choose(rates, slack=0.03):
    """The fewest programs within `slack` of the best rate. rates: {programs: bytes per second}."""
    best = max(rates.values())
    return min(programs for programs, rate in rates.items() if rate >= best * (1 - slack))


def measure_link(pool, device):
    """A Link for `device`, measured on blocks of `pool` (given back afterwards); None without a GPU or pinned memory.

    2048 rows of 4 KB in random order per run, 20 runs per candidate: about half a second at 50 GB/s, compiling apart.
    """
    if device.type != "cuda":
        return None
    blocks = pool.take(BLOCK_TOKENS * ROW, 2 * ROWS // BLOCK_TOKENS)       # pins the first slab, so that `pinned` is true or not
    try:
        if not pool.pinned:
            return None
        table = torch.tensor([block.address for block in blocks], device=device)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randperm(2 * ROWS, generator=generator)[:ROWS].int().to(device)
        buffer = torch.empty(ROWS, ROW // 4, dtype=torch.int32, device=device)
        rates = {}
        for programs in CANDIDATES:
            rates[programs] = _rate(lambda p=programs: move_rows(table, 0, ROW, buffer, tokens, 0, ROWS, None, programs=p))
        source = blocks[0].slab.memory[:ROWS * ROW]
        copy = _rate(lambda: buffer.view(torch.uint8).view(-1).copy_(source, non_blocking=True))
    finally:
        pool.release(blocks)
    programs = choose(rates)
    return Link(programs, rates[programs], copy)


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
