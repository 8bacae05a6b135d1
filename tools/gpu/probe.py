"""`make check-gpu`, the probe of its second command: the constants that a decode step's time is
made of and that no desk check can know, each part standing alone.

In a rehearsal on a CPU the parts run on small shapes and by the clock; those that ask about a
driver or a graph say that they need a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import linear

from engine import LLM, Full
from engine.bank.pool.host_pool import HostPool
from engine.bank.pool.pinned_memory import cuda_driver
from kernels.layer.gemv import multiply_rows
from kernels.prefill.dense import COPIED_BLOCK, attend_rows, has_cudnn
from tools.bench.floor import sync
from tools.bench.gather import Rows
from tools.common.synthetic_bank import synthesize
from tools.gpu.context import Context
from tools.gpu.kernels import GPU, SMALL, Bench, median_time, selecting

Facts = dict[str, Any]
# [out, in] of Llama-3-8B's products, and how many of each a step has
PRODUCTS = {
    "qkv": (6144, 4096, 32),
    "o": (4096, 4096, 32),
    "gate_up": (28672, 4096, 32),
    "down": (4096, 14336, 32),
    "lm_head": (128256, 4096, 1),
}
NODES = (290, 330, 500)  # of a step: on the device, over the host tier, on torch's operators
GATHERED = 2048  # rows of a packed load
STEPS = 20
PINNED = 1 << 30  # bytes that are locked, once in each way


class NeedsGPU(Exception):
    """A part that has no meaning on a CPU."""


def _weights(ctx: Context, out: int, inner: int) -> list[torch.Tensor]:
    """Matrices that together exceed the caches, so that each product reads memory."""
    if ctx.small:
        out, inner = out // 64, inner // 64
    dtype = torch.float32 if ctx.small else torch.bfloat16
    count = max(1, min(8, 2**29 // (out * inner * 2))) if not ctx.small else 2
    return [torch.randn(out, inner, device=ctx.device, dtype=dtype) for _ in range(count)]


def nodes(ctx: Context) -> Facts:
    """Microseconds of one dependent small kernel in a graph, and of issuing the graph."""
    if ctx.small:
        raise NeedsGPU
    found, x = {}, torch.zeros(4096, device=ctx.device)
    for count in NODES:

        def many(count: int = count) -> None:
            for _ in range(count):
                x.add_(1)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        host, device = [], []
        for _ in range(20):
            sync(ctx.device)
            start = time.perf_counter()
            graph.replay()
            host.append(time.perf_counter() - start)
            sync(ctx.device)
            device.append(time.perf_counter() - start)
        found[count] = {
            "us_per_node": 1e6 * statistics.median(device) / count,
            "us_on_host": 1e6 * statistics.median(host),
        }
    return {"graphs": found}


def products(ctx: Context) -> Facts:
    """One-row products out of memory against the read rate of this run, and all of a step's."""
    rate, found, total, floor = ctx.measured().read, {}, 0.0, 0.0
    for name, (out, inner, times) in PRODUCTS.items():
        matrices = _weights(ctx, out, inner)
        x = torch.randn(1, matrices[0].shape[1], device=ctx.device, dtype=matrices[0].dtype)

        def all_of_them(
            x: torch.Tensor = x, matrices: list[torch.Tensor] = matrices
        ) -> list[torch.Tensor]:
            return [linear(x, w) for w in matrices]

        us = 1e6 * median_time(all_of_them, ctx.device) / len(matrices)
        least = 1e6 * matrices[0].nbytes / rate
        found[name] = {"us": us, "floor_us": least, "share": least / us}
        total, floor = total + us * times, floor + least * times
    return {"products": found, "step_ms": total / 1e3, "floor_ms": floor / 1e3}


def products_by_rows(ctx: Context) -> Facts:
    """Microseconds of each product of a layer with 1, 2, 4 and 8 rows: the library's and our own
    kernel's, over all layers in turn, so that no weight is in a cache.
    """
    assert ctx.llm.model is not None
    found: Facts = {}
    for name in ("qkv", "o", "gate_up", "down"):
        weights = [getattr(layer, name).weight for layer in ctx.llm.model.layers]
        for rows in (1, 2, 4, 8):
            x = torch.randn(rows, weights[0].shape[1], device=ctx.device, dtype=weights[0].dtype)
            ways: dict[str, Callable] = {"library": linear}
            if not ctx.small:
                ways["ours"] = multiply_rows

            def us(way: Callable, x: torch.Tensor = x, weights: list = weights) -> float:
                all_layers = lambda: [way(x, w) for w in weights]  # noqa: E731
                return 1e6 * median_time(all_layers, ctx.device) / len(weights)

            found[f"{name}, {rows} rows"] = {way: us(run) for way, run in ways.items()}
    return found


FORMS = {
    "plain": dict(step="plain"),
    "fused": dict(step="fused"),
    "fused, launched in turn": dict(step="fused"),
}


def step_form(ctx: Context) -> Facts:
    """Milliseconds of a step at 8,192 tokens in each form, its token read before the next one is
    issued and after. On a CPU the plain form alone.
    """
    n, steps = 8192, {}
    for name, settings in FORMS.items():
        if ctx.small and name != "plain":
            continue
        in_turn = mock.patch("kernels.launch.pdl.supported", lambda device: False)
        with in_turn if "in turn" in name else contextlib.nullcontext():
            llm = ctx.shared(Full(), n + 64, **settings)
            steps[name] = _step_ms(llm, n)
            steps[f"{name}, issued ahead"] = _step_ms(llm, n, ahead=True)
    return {"step_ms": steps, **({"fused": "needs a GPU"} if ctx.small else {})}


def _step_ms(llm: LLM, n: int, ahead: bool = False) -> float:
    """Median milliseconds of a decode step at n tokens whose token is read before the next one is
    issued, or (ahead) after, as in a greedy answer on a GPU.
    """
    with llm.session() as session:
        synthesize(session, n)
        int(session.decode(5).argmax())
        steps = []
        for _ in range(STEPS):
            start = time.perf_counter()
            if ahead:
                session.step(None)
            else:
                int(session.decode(5).argmax())
            steps.append(1e3 * (time.perf_counter() - start))
    return statistics.median(steps)


def contention(ctx: Context) -> Facts:
    """The same products while rows are gathered from pinned memory on another stream, by number
    of the gather's programs.
    """
    if ctx.small:
        raise NeedsGPU
    pool, found = HostPool(slab_bytes=2**28), {}
    gather = Rows(pool, torch.device(ctx.device), GATHERED, 4096, 4096, None)
    lane = torch.cuda.Stream(ctx.device)
    for name in ("o", "gate_up", "down"):
        matrices = _weights(ctx, *PRODUCTS[name][:2])
        x = torch.randn(1, matrices[0].shape[1], device=ctx.device, dtype=matrices[0].dtype)

        def seconds(matrices: list[torch.Tensor] = matrices, x: torch.Tensor = x) -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for w in matrices:
                linear(x, w)
            stop.record()
            sync(ctx.device)
            return start.elapsed_time(stop) * 1e-3 / len(matrices)

        row = {"alone": 1e6 * statistics.median(seconds() for _ in range(5))}
        for programs in (2, 4, 8, 16, 32):
            gather.programs = programs
            lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane):
                for _ in range(40):
                    gather.bring("gather kernel")
            row[f"beside {programs}"] = 1e6 * seconds()
            sync(ctx.device)
        found[name] = row
    return {"us": found}


def past_attention(ctx: Context) -> Facts:
    """The folded queries of a chunk over their past: torch's flash kernel and cuDNN's, the first
    call at a shape apart, and how far they differ.
    """
    s, found = SMALL if ctx.small else GPU, {}
    rows = 512 if ctx.small else COPIED_BLOCK
    q = torch.randn(1, s.chunk, s.heads, s.head_dim, device=ctx.device, dtype=s.dtype)
    k, v = torch.randn(2, 1, s.kv_heads, rows, s.head_dim, device=ctx.device, dtype=s.dtype)
    operations = 4 * s.heads * s.chunk * rows * s.head_dim
    outs = {}
    cudnn = has_cudnn(torch.device(ctx.device), s.dtype, s.head_dim)
    for name, by_cudnn in (("flash", False), *((("cudnn", True),) if cudnn else ())):

        def run(by_cudnn: bool = by_cudnn) -> torch.Tensor:
            return attend_rows(q, k, v, s.head_dim**-0.5, by_cudnn)[0]

        start = time.perf_counter()
        outs[name] = run()
        sync(ctx.device)
        first = time.perf_counter() - start
        seconds = median_time(run, ctx.device, 5)
        found[name] = {"tflops": operations / seconds / 1e12, "first_ms": 1e3 * first}
    if cudnn:
        found["difference"] = float((outs["cudnn"].float() - outs["flash"].float()).abs().max())
    return {"rows": rows, "forms": found}


def launches(ctx: Context) -> Facts:
    """Microseconds of every single kernel behind the launchers, out of the profiler."""
    if ctx.small:
        raise NeedsGPU
    found: dict[str, dict[str, float]] = {}
    for n in (8192, 131072):
        b = Bench(GPU, n, ctx.device)
        runs: dict[str, Callable[[], Any]] = {
            "dense": b.dense,
            "scored": lambda b=b: b.dense(scores=b.keys),
            "sparse": b.sparse,
            "top-k": selecting(torch.rand(1, n, device=ctx.device), GPU.budget),
            "window": b.windowed,
            "blocks": b.blocks,
        }
        for name, run in runs.items():
            for _ in range(3):
                run()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                for _ in range(5):
                    run()
                sync(ctx.device)
            spent: dict[str, float] = {}
            for event in profile.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    key = event.name[:32]
                    spent[key] = spent.get(key, 0.0) + event.time_range.elapsed_us() / 5
            found[f"{name} at {n}"] = spent
    return {"us": found}


def pinning(ctx: Context) -> Facts:
    """Seconds per GiB to lock fresh pages, as they are and with large pages asked for first."""
    driver = None if ctx.small else cuda_driver()
    if driver is None:
        raise NeedsGPU
    found = {}
    torch.cuda.init()
    for name, advice in (("small pages", None), ("large pages", mmap.MADV_HUGEPAGE)):
        pages = mmap.mmap(-1, PINNED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if advice is not None:
            pages.madvise(advice)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        start = time.perf_counter()
        driver.register(address, PINNED)
        found[name] = (time.perf_counter() - start) * 2**30 / PINNED
        driver.unregister(address)
    return {"seconds_per_gib": found}


def capture(ctx: Context) -> Facts:
    """What a captured step leaves allocated per bucket, how long the first step of a bucket takes,
    and whether the session's own clock agrees with the wall's.
    """
    lengths, found = (1000, 4090, 8186, 16378), []
    llm = ctx.shared(Full(), lengths[-1] + 64)
    cuda = torch.device(ctx.device).type == "cuda"
    with llm.session() as session:
        for n in lengths:
            session.truncate(0)
            synthesize(session, n)
            before = torch.cuda.memory_allocated() if cuda else 0
            start = time.perf_counter()
            int(session.decode(5).argmax())
            first = time.perf_counter() - start
            stays = torch.cuda.memory_allocated() - before if cuda else 0
            steps, counted = [], session.stats.decode_seconds
            for _ in range(10):
                start = time.perf_counter()
                int(session.decode(5).argmax())
                steps.append(1e3 * (time.perf_counter() - start))
            found.append(
                {
                    "n": n,
                    "first_s": first,
                    "bytes_that_stay": stays,
                    "step_ms": statistics.median(steps),
                    "slowest_ms": max(steps),
                    "session_counts_ms": 1e2 * (session.stats.decode_seconds - counted),
                }
            )
    return {"buckets": found}


PARTS = (nodes, step_form, products, contention, past_attention, launches, pinning, capture)


def probe(ctx: Context) -> Facts:
    """{part: its facts} of every part; one that fails is noted by name and the next one runs."""
    found: Facts = {}
    failed = []
    for part in PARTS:
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                facts = part(ctx)
        except NeedsGPU:
            facts = {"skipped": "needs a GPU"}
        except Exception as error:
            said = str(error).splitlines()
            facts = {"failed": f"{type(error).__name__}: {said[0][:300] if said else ''}"}
            failed.append(part.__name__)
        found[part.__name__] = {**facts, "seconds": round(time.perf_counter() - began, 2)}
        ctx.note(found)
        if ctx.device != "cpu":
            torch.cuda.empty_cache()
    return {**found, "error": f"failed: {', '.join(failed)}"} if failed else found
