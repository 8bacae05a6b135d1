"""`make check-gpu`, kernels: each against its reference, then timed against its bytes."""

import functools
import statistics
import time
from dataclasses import dataclass

import torch

from engine.forward.graphs import captured
from kernels.attention.dense import decode_dense
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.prefill.block_sparse import BLOCK, attend_blocks
from kernels.prefill.dense import prefill_dense
from kernels.select.topk import select_topk
from kernels.select.window_scores import window_scores
from tools.bench.floor import sync


@dataclass(frozen=True)
class Sizes:
    """Shapes that the kernels are timed at: Llama-3-8B's on a GPU, small ones in a rehearsal."""

    heads: int
    kv_heads: int
    head_dim: int
    contexts: tuple
    budget: int
    top: tuple
    checked: int  # rows at which results are compared with the reference
    chunk: int
    dtype: torch.dtype


GPU = Sizes(
    32, 8, 128, (32768, 131072, 450000), 2048, (131072, 1048576), 20000, 2048, torch.bfloat16
)
KEPT = 0.3  # share of key blocks that the block-sparse kernel is timed with
SMALL = Sizes(8, 2, 32, (1000, 8192), 2048, (3000, 8192), 5000, 64, torch.float32)


class Bench:
    """Inputs at one context on a device, and a timer. K and V are token-major, as in layers with
    gathered rows.
    """

    def __init__(self, sizes, n, device):
        generator = torch.Generator(device=device).manual_seed(n)
        options = dict(generator=generator, device=device)
        s, self.n, self.device, self.sizes = sizes, n, torch.device(device), sizes
        self.rows = torch.randn(1, n, 2, s.kv_heads, s.head_dim, **options, dtype=s.dtype)
        self.k, self.v = self.rows.permute(2, 0, 3, 1, 4)
        self.q = (2 * torch.randn(1, 1, s.heads, s.head_dim, **options)).to(s.dtype)
        self.window = (2 * torch.randn(1, 16, s.heads, s.head_dim, **options)).to(s.dtype)
        self.lengths = self.int(n)
        self.tail = self.int(max(0, n // 64 * 64 - 256))
        self.keys = torch.zeros(1, n, device=device)
        self.index = torch.full((1, 1, s.budget), -1, dtype=torch.int32, device=device)
        self.counts = self.int(0)
        candidates = int(self.tail[0])
        chosen = (
            torch.randperm(candidates, device=device, generator=generator)[: s.budget].sort().values
        )
        self.index[0, 0, : len(chosen)] = chosen.int()
        self.counts.fill_(len(chosen))
        self.scale = s.head_dim**-0.5
        # a chunk of whole blocks, at the last block that leaves room for it
        self.whole = max(BLOCK, s.chunk // BLOCK * BLOCK)
        self.first = (n - self.whole) // BLOCK * BLOCK
        shape = 1, s.heads, self.whole // BLOCK, (self.first + self.whole) // BLOCK
        self.keep = torch.rand(shape, **options) < KEPT
        largest = ScratchShape(1, 1, s.heads, s.kv_heads, s.head_dim, n, s.budget, True, 16)
        self.scratch = make_scratch(largest, self.device)

    def int(self, value):
        """One int32 on the device."""
        return torch.full((1,), value, dtype=torch.int32, device=self.device)

    def dense(self, backend="auto", scores=None):
        """decode_dense over everything."""
        return decode_dense(
            self.q,
            self.k,
            self.v,
            self.lengths,
            self.scale,
            scores=scores,
            scratch=self.scratch,
            backend=backend,
        )

    def sparse(self, backend="auto"):
        """decode_sparse over the chosen rows and the tail."""
        return decode_sparse(
            self.q,
            self.k,
            self.v,
            self.index,
            self.counts,
            self.tail,
            self.lengths,
            self.scale,
            scratch=self.scratch,
            backend=backend,
        )

    def windowed(self, backend="auto", scores=None):
        """window_scores of 16 queries."""
        out = self.keys if scores is None else scores
        window_scores(
            self.window,
            self.k,
            self.lengths,
            self.scale,
            torch.ones(16, device=self.device),
            "softmax",
            out,
            scratch=self.scratch,
            backend=backend,
        )
        return out

    def prefill(self, backend="auto"):
        """prefill_dense of the last chunk."""
        chunk = min(self.sizes.chunk, self.n)
        q = self.q.expand(1, chunk, -1, -1) * torch.linspace(
            0.5, 1, chunk, device=self.device
        ).view(1, -1, 1, 1).to(self.q.dtype)
        return prefill_dense(q, self.k, self.v, self.n - chunk, self.scale, backend=backend)

    def blocks(self, backend="auto"):
        """attend_blocks of a chunk, of the past KEPT of all blocks per head."""
        q = self.q.expand(1, self.whole, -1, -1) * torch.linspace(
            0.5, 1, self.whole, device=self.device
        ).view(1, -1, 1, 1).to(self.q.dtype)
        return attend_blocks(q, self.k, self.v, self.keep, self.first, self.scale, backend=backend)[
            0
        ]

    def blocks_operations(self):
        """Products of `blocks`, in operations: whole tiles of every kept past block, and the own
        one's lower half.
        """
        own = self.first // BLOCK + torch.arange(self.whole // BLOCK, device=self.device).unsqueeze(
            1
        )
        past = int(
            (self.keep & (torch.arange(self.keep.shape[-1], device=self.device) < own)).sum()
        )
        return (
            4
            * BLOCK
            * BLOCK
            * self.sizes.head_dim
            * (past + 0.5 * self.sizes.heads * (self.whole // BLOCK))
        )


def selecting(scores, k, backend="auto"):
    """A function without arguments that selects the top k of a row and returns the index [1, k]
    int32; its buffers are made here.
    """
    one = torch.ones(1, dtype=torch.int32, device=scores.device)
    lo, hi, count, kept = one * 0, one * scores.shape[1], one * k, one.clone()
    out = torch.empty(1, k, dtype=torch.int32, device=scores.device)
    scratch = make_scratch(
        ScratchShape(1, 1, 1, 1, 16, scores.shape[1], scored=True), scores.device
    )

    def run():
        select_topk(scores, lo, hi, count, out, kept, scratch=scratch, backend=backend)
        return out

    return run


def _dense(b, compare):
    compare("dense decode", b.dense(), b.dense("reference"))
    fast, slow = torch.zeros_like(b.keys), torch.zeros_like(b.keys)
    compare("dense decode with scores", b.dense(scores=fast), b.dense("reference", scores=slow))
    compare("scores", fast / slow.max(), slow / slow.max())


def _sparse(b, compare):
    compare("sparse decode", b.sparse(), b.sparse("reference"))


def _window(b, compare):
    fast = b.windowed(scores=torch.zeros_like(b.keys))
    slow = b.windowed("reference", torch.zeros_like(b.keys))
    compare("window scores", fast / slow.max(), slow / slow.max())


def _prefill(b, compare):
    compare("prefill attention", b.prefill(), b.prefill("reference"))


def _blocks(b, compare):
    compare("block-sparse prefill", b.blocks(), b.blocks("reference"))


def _top(b, compare):
    slow, k = b.windowed("reference", torch.zeros_like(b.keys)), b.sizes.budget
    for name, scores in (("top-k", slow), ("top-k with ties", (slow * 50).round())):
        compare(name, selecting(scores, k)(), selecting(scores, k, "reference")(), 0.0)


# each stands alone, so that processes of their own compile them side by side
CHECKS = {
    "dense": _dense,
    "sparse": _sparse,
    "window": _window,
    "prefill": _prefill,
    "blocks": _blocks,
    "top": _top,
}


def check(sizes, device, groups=tuple(CHECKS)):
    """{kernel: {difference, allowed, ok}} of launchers against their references at `sizes.checked`
    rows. groups: names of CHECKS.
    """
    b, found = Bench(sizes, sizes.checked, device), {}
    loose = 2e-2 if sizes.dtype is not torch.float32 else 1e-4

    def compare(name, got, want, allowed=loose):
        difference = (got.float() - want.float()).abs().max().item()
        found[name] = {"difference": difference, "allowed": allowed, "ok": difference <= allowed}

    for group in groups:
        CHECKS[group](b, compare)
    return found


def speed(sizes, device, rates, note=lambda row: None):
    """Rows {kernel, n, us, floor_us, share}: medians, and the time that the bytes alone would take
    at the measured read rate.
    """
    item, rows = torch.empty(0, dtype=sizes.dtype).element_size(), []

    def add(name, n, function, size, **more):
        seconds = median_time(function, device)
        row = {
            "kernel": name,
            "n": n,
            "us": 1e6 * seconds,
            "floor_us": 1e6 * size / rates.read,
            "share": size / rates.read / seconds,
            **more,
        }
        rows.append(row)
        note(row)

    for n in sizes.contexts:
        b = Bench(sizes, n, device)
        row = 2 * sizes.kv_heads * sizes.head_dim * item
        visited = int(b.counts[0]) + n - int(b.tail[0])
        add("dense decode", n, b.dense, n * row)
        add("dense decode with scores", n, lambda b=b: b.dense(scores=b.keys), n * row)
        add("sparse decode", n, b.sparse, visited * row)
        add("window scores", n, b.windowed, n * row // 2)
        chunk = min(sizes.chunk, n)
        add("prefill attention of a chunk", n, b.prefill, n * row)
        rows[-1]["tflops"] = 4 * chunk * n * sizes.heads * sizes.head_dim / rows[-1]["us"] / 1e6
        add("block-sparse prefill of a chunk", n, b.blocks, n * row, kept=KEPT)
        rows[-1]["tflops"] = b.blocks_operations() / rows[-1]["us"] / 1e6
    del b
    for n in sizes.top:
        scores = torch.rand(1, n, device=device)
        k = min(sizes.budget, n)
        torch_us = 1e6 * median_time(lambda scores=scores, k=k: torch.topk(scores, k), device)
        add("top-k", n, selecting(scores, k), 4 * n, torch_topk_us=torch_us)
    return rows


def median_time(function, device, repeats=None):
    """Median seconds of a call: on a GPU by events over replays of a captured graph, with caches
    flushed between, less what a replay costs without any kernel; else by the clock.
    """
    device = torch.device(device)
    if device.type != "cuda":
        function()
        seconds = []
        for _ in range(repeats or 3):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    return max(1e-9, _replay_seconds(function, repeats or 20) - _launch_seconds())


FEW, MANY = 2, 22  # small kernels of two graphs whose times tell a graph's launch from its kernels


@functools.cache
def _launch_seconds():
    """Seconds between the events around a replay that no kernel accounts for: 6 to 8 us expected,
    as much as a small product takes.
    """
    x = _flushed(1)

    def graph_of(count):
        def run():
            for _ in range(count):
                x.add_(1)

        return _replay_seconds(run, 20)

    few, many = graph_of(FEW), graph_of(MANY)
    return max(0.0, few - FEW * (many - few) / (MANY - FEW))


def _flushed(elements):
    """A float32 tensor on the GPU."""
    return torch.empty(elements, device="cuda")


def _replay_seconds(function, repeats):
    # five times the L2 of an H200
    flush = _flushed(256 * 1024**2 // 4)
    graph, _ = captured(flush.device, function)
    seconds = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        sync("cuda")
        seconds.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(seconds)
