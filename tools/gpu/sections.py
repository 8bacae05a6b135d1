"""`make check-gpu`, its first command: every verdict once, the most valuable first. Each section is
a function of a Context that returns plain facts and notes them as it goes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine import LLM, Exact, Full, OmniKV, SamplingParams
from engine.methods.base import Method
from tools.bench import gather as bench_gather
from tools.bench import header as bench_header
from tools.bench.floor import best_time, floor_seconds, sync
from tools.bench.memory import held
from tools.bench.methods import specs
from tools.bench.options import Options
from tools.bench.report import summary
from tools.bench.run import Engine, engine_bytes
from tools.bench.suite import ROOM, Suite
from tools.common.synthetic_bank import synthesize
from tools.gpu import kernels as gpu_kernels
from tools.gpu.context import BUDGET, Context
from tools.gpu.few_bits import few_bits
from tools.gpu.probe import products_by_rows

Facts = dict[str, Any]
COMPARED = 10  # captured steps that are compared with the reference
# largest difference of two right paths, as a share of the spread of the logits (tools.bench.run)
ROUNDING = 0.4
STEPS = 20  # timed steps of a row
WRITTEN = 64  # tokens of an answer in exact mode


def facts(ctx: Context) -> Facts:
    """Device, versions, clocks; copy, link and matrix product rates."""
    rates = ctx.measured()
    size = 256 if ctx.small else 8192
    dtype = torch.float32 if ctx.small else torch.bfloat16
    a = torch.randn(size, size, device=ctx.device, dtype=dtype)
    seconds = best_time(lambda: a @ a, ctx.device, 0.05 if ctx.small else 1.0)
    return {
        "hardware": bench_header.hardware(ctx.device),
        "python": sys.version.split()[0],
        "packages": {name: bench_header.version(name) for name in bench_header.PACKAGES},
        "commit": bench_header.commit(),
        "clocks": bench_header.clocks(),
        "rates": rates.to_dict(),
        "matmul_tflops": 2 * size**3 / seconds / 1e12,
    }


# ---------------------------------------------------------------- a decode step


def omnikv(ctx: Context, **more: Any) -> OmniKV:
    """OmniKV as it is timed."""
    return OmniKV(filter_layers=ctx.filters, tokens=BUDGET, dense_below=0, **more)


# (depth, methods, planted shares of rows that are there already) in the order they are timed: what
# is asked first comes first, and of the host tier the million, which needs most of its memory
TIMED = (
    (131072, ("full", "omnikv"), ()),
    (8192, ("full", "omnikv"), ()),
    (1048576, ("omnikv-host",), (0.9,)),
    (131072, ("omnikv-host",), (0.7,)),
    (450000, ("full", "omnikv"), ()),
)


def step(ctx: Context) -> Facts:
    """Whether a captured step says the reference's tokens, in three forms, and its time where goals
    are set: one round, one wait layer.
    """
    found: Facts = {"tokens": {}, "cells": [], "memory": []}
    for name, method, offload in (
        ("full", Full(), "device"),
        ("omnikv", omnikv(ctx), "device"),
        ("omnikv-host", omnikv(ctx), "host"),
    ):
        found["tokens"][name] = captured_tokens(ctx, method, offload)
        ctx.note(found)
    began = time.perf_counter()
    for n, names, reuses in TIMED:
        left = ctx.seconds - (time.perf_counter() - began)
        part = suite(
            ctx, (ctx.depth(n),), names, reuses=reuses or (None,), seconds=left, verify=n == 8192
        )
        join(found, part)
        ctx.note(found)
    return found


def join(found: Facts, part: Facts) -> None:
    """Add the cells, splits and memory of another run, and its header."""
    for name in ("cells", "memory", "splits"):
        found.setdefault(name, []).extend(part.get(name, ()))
    found.setdefault("header", part["header"])
    found.setdefault("model", part["model"])


def captured_tokens(ctx: Context, method: Method, offload: str) -> Facts:
    """Captured steps of a method: same tokens as eager ones, no sync inside, memory flat over 100
    steps, lengths that cross a capacity bucket.
    """
    n = 8150
    llm = ctx.shared(method, n + 400, offload)
    with llm.session() as session:
        synthesize(session, n)
        return _graph_facts(ctx, session, n, 100)


def _graph_facts(ctx: Context, session: Any, n: int, steps: int) -> Facts:
    cuda = torch.device(ctx.device).type == "cuda"
    fed = [(7 * i) % 200 for i in range(steps)]
    # captures every bucket that the measured steps come to: a capture holds memory of its own
    for token in fed:
        session.decode(token)
    session.truncate(n)
    captured = [session.decode(fed[0]).float().cpu()]
    before = held(ctx.device)
    for token in fed[1:]:
        logits = session.decode(token)
        if len(captured) < COMPARED:
            captured.append(logits.float().cpu())
    sync(ctx.device)
    grown = held(ctx.device) - before
    session.truncate(n)
    ahead = same_ahead(session, fed[0])
    session.set_backend("reference")
    eager = [session.decode(token).float().cpu() for token in fed[:COMPARED]]
    session.truncate(n)
    session.set_backend("auto")
    # resident pages of a process move by themselves
    flat = grown <= (0 if cuda else 2**20)
    facts = {"steps": steps, "grown_bytes": grown, "flat": flat, "same_ahead": ahead}
    facts |= same_tokens(captured, eager)
    if cuda:
        session.decode(fed[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.decode(fed[1])
            facts["sync_free"] = True
        except RuntimeError as error:
            facts["sync_free"], facts["sync"] = False, str(error)[:300]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        sync(ctx.device)
    return facts


def same_ahead(session: Any, token: int) -> bool:
    """Whether a greedy answer has the same tokens where each step is issued before its token is
    read (engine/sampling/greedy.py). The session is as it was.
    """
    n, read_first = len(session), []
    logits = session.decode(token)
    for _ in range(COMPARED):
        read_first.append(int(logits.argmax()))
        logits = session.decode(read_first[-1])
    session.truncate(n)
    session.decode(token)
    for _ in range(COMPARED):
        session.step(None)
    issued_first = list(session.ids[n + 1 :])
    session.truncate(n)
    return issued_first == read_first


def same_tokens(captured: list[torch.Tensor], eager: list[torch.Tensor]) -> Facts:
    """How many steps say the reference's token, ties within rounding counted beside them.

    captured, eager: logits, float32 [vocab] each. A tie: the reference's own gap between its token
    and the other path's is below twice the largest difference of the logits. Random weights in
    bfloat16 make some in every run (28 to 54 of 30 to 60 steps were equal between two right paths
    on a CPU).
    """
    equal = ties = 0
    worst = 0.0
    for ours, right in zip(captured, eager):
        said, expected = int(ours.argmax()), int(right.argmax())
        difference = float((ours - right).abs().max())
        worst = max(worst, difference / float(right.std()))
        equal += said == expected
        gap = float(right[expected] - right[said])
        ties += said != expected and gap < 2 * difference <= 2 * ROUNDING * float(right.std())
    return {
        "equal_to_reference": equal,
        "ties": ties,
        "compared": len(eager),
        "difference_of_spread": round(worst, 4),
    }


def suite(
    ctx: Context,
    contexts: tuple[int, ...],
    names: tuple[str, ...],
    reuses: tuple[float | None, ...] = (0.0, 0.7, 0.9),
    waits: tuple[int, ...] = (1,),
    dense_below: int | str = 0,
    others: Iterable[Any] = (),
    **more: Any,
) -> Facts:
    """A benchmark over the context's model, its facts noted after every depth."""
    wanted = [
        spec
        for name in names
        for spec in specs(
            (name,), ctx.filters, BUDGET, waits if name[:6] == "omnikv" else (1,), reuses,
            dense_below,
        )
    ]  # fmt: skip
    named = dict(
        shape=ctx.shape,
        device=ctx.device,
        dtype=ctx.dtype,
        contexts=contexts,
        specs=tuple(wanted),
        rounds=1,
        steps=2 if ctx.small else STEPS,
        seconds=ctx.seconds,
        split=False,
        append=False,
        rates_bytes=2**24 if ctx.small else None,
        rates_again=False,
    )
    chosen = Options(**{**named, **more})  # type: ignore[arg-type]
    run = Suite(chosen, lambda line: print(f"    {line}", file=sys.stderr, flush=True), ctx.llm)
    run.others = tuple(others)
    run.result.rates = ctx.measured()
    head = partial(bench_header.header, ctx.device, [f"--shape {ctx.shape}"])
    run.on_context = lambda result: ctx.note(summary(result, head(result.rates), []))
    result = run.run()
    return summary(result, head(result.rates), [])


# ---------------------------------------------------------------- prompts


def prefill(ctx: Context) -> Facts:
    """Prompts of 32,768 and 131,072 tokens read densely, and the longer one by OmniKV-prefill."""
    half = omnikv(ctx, prefill_ratio=2)
    found: Facts = {"cells": []}
    for name, method, n in (
        ("full", Full(), 131072),
        ("omnikv r=2", half, 131072),
        ("full", Full(), 32768),
    ):
        tokens = ctx.depth(n) if ctx.small else n
        cell = {"name": name, "n": tokens, "test": f"pp{tokens}"}
        cell["ms_median"] = 1e3 * read_seconds(ctx.shared(method, tokens), tokens)
        found["cells"].append(cell)
        ctx.note(found)
    return found


def read_seconds(llm: LLM, n: int) -> float:
    """Seconds from a prompt of n tokens to the logits of its last one, after a short one has
    compiled what there is to compile.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(llm.config.vocab_size, (n,), generator=generator).tolist()
    with llm.session() as session:
        session.prefill(ids[: min(n, 2 * llm.chunk)])
        session.truncate(0)
        start = time.perf_counter()
        int(session.prefill(ids).argmax())
        return time.perf_counter() - start


# ---------------------------------------------------------------- other forms


def forms(ctx: Context) -> Facts:
    """What no row of the decode table has: weights and bank in few bits, batches, exact mode."""
    found: Facts = {"cells": []}
    for bank in ("int8", "int4"):
        n = ctx.depth(131072)
        for name, method in (("full", Full()), ("omnikv w1", omnikv(ctx))):
            llm = ctx.shared(method, n + ROOM, bank=bank)
            found["cells"].append(_row(ctx, llm, f"{name}, {bank} bank", n))
            ctx.note(found)
    for count in (8, 4):
        found["cells"].append(_batch_row(ctx, count, ctx.depth(8192)))
        ctx.note(found)
    found["exact"] = _exact(ctx, ctx.depth(32768))
    ctx.note(found)
    for weights in ("int4", "int8"):
        n = ctx.depth(131072)
        llm = ctx.made(weights=weights, max_context=n + ROOM)
        for depth in (n, ctx.depth(8192)):
            found["cells"].append(_row(ctx, llm, f"full, {weights} weights", depth))
            ctx.note(found)
        del llm
    return found


def _row(ctx: Context, llm: LLM, name: str, n: int) -> Facts:
    """A cell of a step at n tokens, its floor by the bytes that are really held."""
    contestant = Engine(name, llm, n)
    try:
        seconds = step_seconds(contestant, 2 if ctx.small else STEPS)
    finally:
        contestant.close()
    assert llm.model is not None
    held_bytes = llm.model.nbytes - llm.model.embed.nbytes
    needed = replace(engine_bytes(llm, n, n), weights=held_bytes)
    floor = floor_seconds(needed, ctx.measured())
    facts = dict(ms_median=1e3 * seconds, floor_ms=1e3 * floor, share_of_floor=floor / seconds)
    return {"name": name, "n": n, "test": "tg", **facts}


def step_seconds(contestant: Engine, steps: int) -> float:
    """Median seconds of a step as in an answer, after those that capture it."""
    took = []
    for _ in range(3):
        contestant.step()
    sync(contestant.llm.device)
    for _ in range(steps):
        start = time.perf_counter()
        contestant.step()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def _exact(ctx: Context, n: int) -> Facts:
    """Tokens and milliseconds a token of an answer in exact mode beside full attention's."""
    answers, spent = [], []
    params = SamplingParams(max_tokens=8 if ctx.small else WRITTEN, ignore_eos=True)
    for method in (Full(), Exact(omnikv(ctx))):
        with ctx.shared(method, n + ROOM).session() as session:
            synthesize(session, n)
            start = time.perf_counter()
            answers.append([piece.token_id for piece in session.generate([5], params)])
            spent.append(1e3 * (time.perf_counter() - start) / len(answers[-1]))
    same = sum(one == other for one, other in zip(*answers, strict=True))
    return {"n": n, "same": same, "tokens": len(answers[0]), "full_ms": spent[0], "ms": spent[1]}


def _batch_row(ctx: Context, count: int, n: int) -> Facts:
    """A cell of one step of `count` sessions."""
    with ctx.shared(Full(), n + ROOM).batch(slots=count) as batch:
        sessions = [batch.session() for _ in range(count)]
        for seed, session in enumerate(sessions):
            synthesize(session, n, seed)
        took = []
        for _ in range(4 if ctx.small else STEPS):
            start = time.perf_counter()
            for session in sessions:
                batch.feed(session, 5)
            for found in batch.step().values():
                if isinstance(found, Exception):
                    raise found
            sync(ctx.device)
            took.append(time.perf_counter() - start)
    seconds = statistics.median(took[len(took) // 2 :])  # the first ones are eager, then captured
    return {"name": f"full, batch of {count}", "n": n, "test": "tg", "ms_median": 1e3 * seconds}


# ---------------------------------------------------------------- kernels


def kernels(ctx: Context) -> Facts:
    """The copies of rows from host memory, products of several rows, weights of few bits, then
    every launcher against its floor. Whether launchers are right was asked in `compile`.
    """
    sizes = gpu_kernels.SMALL if ctx.small else gpu_kernels.GPU
    found: Facts = {"speed": [], "few_bits": []}
    small = dict(shapes=((256, 256), (256, 768)), rows=70, rounds=2) if ctx.small else {}
    found["link"], found["gather"] = bench_gather.compare(ctx.device, **small)
    ctx.note(found)

    def note(kind: str, row: Facts) -> None:
        found[kind].append(row)
        ctx.note(found)

    gpu_kernels.speed(sizes, ctx.device, ctx.measured(), partial(note, "speed"))
    found["products"] = products_by_rows(ctx)
    ctx.note(found)
    read = ctx.measured().read
    checks, _ = few_bits(ctx.small, ctx.device, sizes.dtype, read, partial(note, "few_bits"))
    return {**found, "checks": checks}


def crossover(ctx: Context) -> Facts:
    """dense_below="auto" at short contexts: never slower than full attention."""
    contexts = ctx.within((4096, 16384, 32768))
    return suite(ctx, contexts, ("full", "omnikv"), dense_below="auto", verify=False)
