"""The cost of copying chosen rows from host memory: the gather kernel beside a contiguous copy, a
gather on the host, and a copy per row.

The last two need the chosen indices on the host and are baselines only. Without a GPU all four run
within ordinary memory: that shows that they work and agree, and nothing about a link.
"""

import statistics
import time

import torch

from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.link import measure_link
from kernels.tier.gather import BLOCK_TOKENS, move_rows
from tools.bench.floor import sync

ROWS = 2048  # a published budget
# (bytes moved, bytes from row to row) of an 8B model: a layer's rows side by side, those of one
# layer of a group of 12, the group's.
GPU_SHAPES = ((4096, 4096), (4096, 49152), (49152, 49152))
CPU_SHAPES = ((4096, 4096),)
KERNEL, CONTIGUOUS, SELECTED, SINGLE = WAYS = (
    "gather kernel",
    "contiguous copy",
    "host index_select + copy",
    "copy per row",
)
CPU_NOTE = (
    "no GPU: ordinary memory to ordinary memory on the CPU, so this says nothing about a link"
)


class Rows:
    """Rows of one shape in host memory, a random choice of them, and four ways to bring it over."""

    def __init__(self, pool, device, rows, row, pitch, programs):
        tokens = -(-2 * rows // BLOCK_TOKENS) * BLOCK_TOKENS
        self.pool, self.rows, self.row, self.pitch, self.programs = pool, rows, row, pitch, programs
        (self.block,) = pool.take(tokens * pitch, 1)
        generator = torch.Generator().manual_seed(rows + row)
        self.block.bytes.view(torch.int32).random_(generator=generator)
        self.host = self.block.bytes.view(tokens, pitch)[:, :row]
        self.tokens = torch.randperm(tokens, generator=generator)[:rows].int().to(device)
        starts = torch.arange(tokens // BLOCK_TOKENS) * (BLOCK_TOKENS * pitch)
        self.table = (self.block.address + starts).to(device)
        self.target = torch.empty(rows, row, dtype=torch.uint8, device=device)
        self.stage = torch.empty(rows, row, dtype=torch.uint8, pin_memory=pool.pinned)

    def bring(self, way):
        """Issue one way once; on a GPU it waits only where the way itself must."""
        if way == KERNEL:
            move_rows(
                self.table,
                0,
                self.pitch,
                self.target.view(torch.int32),
                self.tokens,
                0,
                self.rows,
                self.pool.slabs,
                programs=self.programs,
            )
        elif way == CONTIGUOUS:
            self.target.view(-1).copy_(self.block.bytes[: self.target.numel()], non_blocking=True)
        elif way == SELECTED:
            torch.index_select(self.host, 0, self.tokens.cpu(), out=self.stage)
            self.target.copy_(self.stage, non_blocking=True)
        else:
            for at, token in enumerate(self.tokens.tolist()):
                self.target[at].copy_(self.host[token], non_blocking=True)

    def check(self):
        """Raise AssertionError where a way that chooses brings anything but the chosen rows."""
        wanted = self.host[self.tokens.cpu().long()]
        for way in (KERNEL, SELECTED, SINGLE):
            self.target.zero_()
            self.bring(way)
            assert torch.equal(self.target.cpu(), wanted), f"{way}: other rows than were chosen"

    def close(self):
        """Give the host memory back."""
        self.pool.release([self.block])
        self.host = self.block = None


def compare(device, shapes=None, rows=ROWS, rounds=7):
    """(link line, list of {way, rows, row_bytes, pitch, us, gb_per_s, of_contiguous, vs_single,
    on}) for each shape, ways in turns.

    us: medians over rounds. of_contiguous: rate over the contiguous copy's; vs_single: how many
    times faster than a copy per row.
    """
    device = torch.device(device)
    gpu = device.type == "cuda"
    shapes = shapes or (GPU_SHAPES if gpu else CPU_SHAPES)
    pool = HostPool(pin=gpu, slab_bytes=max(pitch for _, pitch in shapes) * 3 * rows)
    link, found = measure_link(pool, device), []
    for row, pitch in shapes:
        bench = Rows(pool, device, rows, row, pitch, link.programs)
        bench.check()
        times = _times(bench, device, rounds, 10 if gpu else 1)
        bench.close()
        for way in WAYS:
            rate = rows * row / times[way]
            found.append(
                {
                    "way": way,
                    "rows": rows,
                    "row_bytes": row,
                    "pitch": pitch,
                    "us": 1e6 * times[way],
                    "gb_per_s": rate / 1e9,
                    "of_contiguous": times[CONTIGUOUS] / times[way],
                    "vs_single": times[SINGLE] / times[way],
                    "on": str(device.type),
                }
            )
    pool.close()
    return str(link), found


def _times(bench, device, rounds, runs):
    """Median seconds per way. Ways that do not wait by themselves run `runs` times per clock
    reading: a launch is not a transfer.
    """
    seconds = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            often = runs if way in (KERNEL, CONTIGUOUS) else 1
            sync(device)
            start = time.perf_counter()
            for _ in range(often):
                bench.bring(way)
            sync(device)
            seconds[way].append((time.perf_counter() - start) / often)
    return {way: statistics.median(found) for way, found in seconds.items()}


COLUMNS = [
    "bringing rows from host memory",
    "rows x bytes (of)",
    "us",
    "GB/s",
    "of contiguous",
    "x copy per row",
]


def table_rows(found):
    """Cells of a table with COLUMNS."""
    return [
        [
            r["way"],
            f"{r['rows']} x {r['row_bytes']} ({r['pitch']})",
            f"{r['us']:.0f}",
            f"{r['gb_per_s']:.2f}",
            f"{r['of_contiguous']:.0%}",
            f"{r['vs_single']:.1f}",
        ]
        for r in found
    ]
