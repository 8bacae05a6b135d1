"""`make check-gpu`, its sections: each a function of a Context that returns plain facts and notes
them as it goes.
"""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from engine import LLM, Full, OmniKV
from tools.bench import gather as bench_gather
from tools.bench import header as bench_header
from tools.bench.floor import best_time, sync
from tools.bench.memory import held
from tools.bench.methods import specs
from tools.bench.options import Options
from tools.bench.report import summary
from tools.bench.shapes import shape_config, shape_filters
from tools.bench.suite import Suite, sharp_stream
from tools.common.synthetic_bank import synthesize
from tools.gpu import kernels as gpu_kernels
from tools.gpu.context import READ
from tools.gpu.few_bits import few_bits
from tools.gpu.probe import probe
from tools.gpu.published import published_peers

ROOT = Path(__file__).resolve().parents[2]
COMPARED = 10  # captured steps that are compared with the reference
# largest difference of two right paths, as a share of the spread of the logits (tools.bench.run)
ROUNDING = 0.4
BUDGET = 2048  # tokens that a sparse layer reads, also in a rehearsal
WORKERS = 12  # processes of the CUDA tests: compiling their kernels takes most of the time


def facts(ctx):
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


def tests(ctx):
    """Run tests/cuda in new processes (in a rehearsal: collect only).

    About 450 kernel variants are compiled on a machine with an empty cache: by WORKERS processes
    where pytest-xdist is there. A run that is stopped is an error, so that a later call runs it
    again; what was compiled by then stays compiled.
    """
    folder = ROOT / "tests" / "cuda"
    if not list(folder.glob("test_*.py")):
        return {"summary": "no tests in tests/cuda", "ok": True}
    command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "--color=no", "--maxfail=10"]
    if importlib.util.find_spec("xdist") and not ctx.small:
        command += ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    try:
        done = subprocess.run(
            command + ["--collect-only"] * ctx.small,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=ctx.seconds,
            env={**os.environ, "TRITON_INTERPRET": "0"},
        )
    except subprocess.TimeoutExpired as error:
        text, summary = (error.stdout or b"").decode(errors="replace"), f"{ctx.seconds:.0f} s"
        stopped = f"stopped after {summary}"
        return {"summary": stopped, "error": stopped, "tail": text[-2000:]}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return {
        "summary": lines[-1] if lines else done.stderr[-300:],
        "ok": done.returncode in (0, 5),
        "tail": "\n".join(lines[-30:]),
    }


def kernels(ctx):
    """Every launcher against its reference, the copies of rows from host memory, then every
    launcher against its floor.
    """
    sizes = gpu_kernels.SMALL if ctx.small else gpu_kernels.GPU
    found = {"checks": gpu_kernels.check(sizes, ctx.device), "speed": []}
    ctx.note(found)
    small = dict(shapes=((256, 256), (256, 768)), rows=70, rounds=2) if ctx.small else {}
    found["link"], found["gather"] = bench_gather.compare(ctx.device, **small)
    ctx.note(found)

    def note(row):
        found["speed"].append(row)
        ctx.note(found)

    found["few_bits"] = []

    def note_few_bits(row):
        found["few_bits"].append(row)
        ctx.note(found)

    read = ctx.measured().read
    checks, _ = few_bits(ctx.small, ctx.device, sizes.dtype, read, note_few_bits)
    found["checks"] |= checks
    gpu_kernels.speed(sizes, ctx.device, ctx.measured(), note)
    return found


def _suite(ctx, contexts, methods, prefill=(), peers=(), **more):
    filters, budget = shape_filters(ctx.shape), BUDGET
    below, waits = more.pop("dense_below", 0), more.pop("waits", (1, 0))
    published = more.pop("published", False)
    wanted = [
        spec
        for name in methods
        for spec in specs(
            (name,), filters, budget, waits if name == "omnikv" else (1,), (0.0, 0.7, 0.9), below
        )
    ]
    chosen = Options(
        shape=ctx.shape,
        device=ctx.device,
        dtype=ctx.dtype,
        contexts=contexts,
        prefill=prefill,
        peers=peers,
        specs=tuple(wanted),
        rounds=2 if ctx.small else 3,
        steps=2 if ctx.small else 20,
        seconds=ctx.seconds,
        rates_bytes=2**24 if ctx.small else None,
        **more,
    )
    suite = Suite(chosen, say=lambda line: print(f"    {line}", file=sys.stderr, flush=True))
    suite.others = published_peers(filters, budget) if published else ()
    suite.result.rates = ctx.measured()
    suite.on_context = lambda result: ctx.note(_facts(result, suite, ctx))
    result = suite.run()
    return _facts(result, suite, ctx)


def _facts(result, suite, ctx):
    head = bench_header.header(ctx.device, [f"--shape {ctx.shape}"], result.rates)
    return summary(result, head, [])


def decode(ctx):
    """The decode table: full, OmniKV in both tiers, brutal offload; deepest last, so that a killed
    run keeps its results.
    """
    contexts = ctx.within((4096, 32768, 131072, 262144, 450000, 1048576))
    return _suite(ctx, contexts, ("full", "omnikv", "omnikv-host", "brutal"))


def crossover(ctx):
    """dense_below="auto" at short contexts: never slower than full attention."""
    contexts = ctx.within((4096, 16384, 32768))
    return _suite(ctx, contexts, ("full", "omnikv"), waits=(1,), dense_below="auto", split=False)


def prefill(ctx):
    """Whole prompts through our prefill."""
    return _suite(ctx, (), ("full",), prefill=ctx.within((4096, 32768, 131072), READ))


def peers(ctx):
    """transformers and the published OmniKV code's form of a step beside us in one run."""
    contexts = ctx.within((4096, 32768, 131072))
    return _suite(
        ctx,
        contexts,
        ("full", "omnikv"),
        prefill=(READ,) if ctx.small else (32768,),
        peers=("transformers",),
        published=True,
        waits=(1,),
        split=False,
    )


def graph(ctx):
    """Captured steps: same tokens as eager ones, no sync inside, memory flat over 100 steps,
    lengths that cross a capacity bucket.
    """
    config, n = shape_config(ctx.shape), 8150
    settings = dict(device=ctx.device, dtype=ctx.dtype, max_context=n + 400, method=Full())
    llm = LLM.from_stream(config, sharp_stream, **settings)
    method = OmniKV(
        filter_layers=shape_filters(ctx.shape),
        tokens=BUDGET,
        tail=256,
        dense_below=0,
    )
    found = {}
    for name, value in (("full", Full()), ("omnikv", method)):
        with llm.session(value) as session:
            synthesize(session, n)
            found[name] = _graph_facts(ctx, session, n, 100)
            ctx.note(found)
    return found


def _graph_facts(ctx, session, n, steps):
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


def same_ahead(session, token):
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


def same_tokens(captured, eager):
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


# seconds of each: the 540 of a call
SECTIONS = {
    "facts": (facts, 20),
    "kernels": (kernels, 60),
    "graph": (graph, 55),
    "decode": (decode, 160),
    "probe": (probe, 60),
    "peers": (peers, 60),
    "crossover": (crossover, 25),
    "prefill": (prefill, 40),
    "tests": (tests, 60),
}


def run_section(name, ctx):
    """Facts of a section, with its seconds; an exception becomes {"error": text} beside the
    facts noted before it.
    """
    noted, began = {}, time.perf_counter()
    keep, ctx.note = (
        ctx.note,
        lambda facts: (noted.update(facts), keep({**facts, "unfinished": True})),
    )
    try:
        found = SECTIONS[name][0](ctx)
    except Exception as error:
        import traceback

        last = traceback.format_exc().strip().splitlines()
        found = {
            **noted,
            "error": f"{type(error).__name__}: {re.sub(chr(10), ' ', str(error))[:400]}",
            "trace": last[-6:],
        }
    return {**found, "seconds": round(time.perf_counter() - began, 1)}
