"""Time every CPU launcher and product in 16 bits against the same in float32, under every
instruction set of this machine: `python -m tools.speed.cpu_forms`.

Each set runs in a process of its own, since torch and oneDNN read their limits once:
ATEN_CPU_CAPABILITY bounds torch's kernels, ONEDNN_MAX_CPU_ISA oneDNN's. (MKL follows neither.)
Figures are thread CPU seconds of one thread, dtypes in turns, medians: other programs on the
machine move them less than wall time.

Examples:
  python -m tools.speed.cpu_forms                             all sets, ratios to float32
  python -m tools.speed.cpu_forms --sets avx2 --only filter   one set, launchers named so
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.base.errors import UsageError
from engine.methods.select.minference_patterns import line_sums
from engine.methods.select.quest import AT_ONCE, page_bounds
from kernels.attention.dense import decode_dense
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.launch.isa import SETS, isa
from kernels.layer.linear import pack_linear
from kernels.layer.store import store_step
from kernels.prefill.block_sparse import attend_blocks, block_mass
from kernels.prefill.dense import attend_rows, prefill_dense, prefill_dense_lse
from kernels.prefill.sparse import prefill_sparse
from kernels.select.column_scores import column_scores
from kernels.select.column_sums import column_sums
from kernels.select.window_scores import window_scores
from tools.common.program import say
from tools.speed import harness
from tools.speed.harness import Report, flag

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
# the bar of every 16-bit form, and of a filter layer over a dense one
LIMIT, FILTER_LIMIT = 1.2, 1.35
CHUNK, PAST = 256, 4096  # a prompt's chunk and what lies before it

Case = Callable[[], object]


def cases(dtype: torch.dtype, shape: tuple[int, int, int], rows: int) -> dict[str, Case]:
    """Make every launcher's call on random rows: {name: call}.

    shape: (K/V heads, group, head dim); rows: of the bank in a decode step.
    """
    return _decode(dtype, shape, rows) | _prefill(dtype, shape) | _products(dtype, shape)


def _decode(dtype: torch.dtype, shape: tuple[int, int, int], rows: int) -> dict[str, Case]:
    kv_heads, group, dim = shape
    heads, scale, kept = kv_heads * group, dim**-0.5, min(2048, rows // 2)
    k, v = torch.randn(2, 1, kv_heads, rows + 64, dim).to(dtype).unbind(0)
    q = torch.randn(1, 16, heads, dim).to(dtype)
    largest = ScratchShape(1, 4, heads, kv_heads, dim, rows + 64, kept, True, 16, dtype)
    scratch = make_scratch(largest, "cpu")
    scores, alpha = torch.empty(1, rows + 64), torch.ones(16)
    length, start = (torch.tensor([n], dtype=torch.int32) for n in (rows, rows - 256))
    count = torch.tensor([kept], dtype=torch.int32)
    index = torch.randperm(rows - 256)[:kept].sort().values.int().view(1, 1, -1)
    one, few = q[:, -1:].contiguous(), q[:, -4:].contiguous()
    ring, at = torch.zeros(1, 16, heads, dim, dtype=dtype), torch.tensor([[rows]])
    new_k, new_v = torch.randn(2, 1, 1, kv_heads, dim).to(dtype).unbind(0)
    return {
        "dense layer": lambda: decode_dense(one, k, v, length, scale, scratch=scratch),
        "dense layer, 4 queries": lambda: decode_dense(few, k, v, length, scale, scratch=scratch),
        "filter layer": lambda: decode_dense(
            one, k, v, length, scale, scores, "softmax", scratch=scratch
        ),
        "sparse layer": lambda: decode_sparse(
            one, k, v, index, count, start, length, scale, scratch
        ),
        "sparse layer, rows per head": lambda: decode_sparse(
            one, k, v, index.expand(1, kv_heads, kept), count, start, length, scale, scratch
        ),
        "window of 16 queries": lambda: window_scores(
            q, k, length, scale, alpha, "softmax", scores, scratch
        ),
        "store": lambda: store_step(new_k, new_v, one, k, v, ring, at),
    }


def _prefill(dtype: torch.dtype, shape: tuple[int, int, int]) -> dict[str, Case]:
    kv_heads, group, dim = shape
    heads, scale, rows = kv_heads * group, dim**-0.5, PAST + CHUNK
    k, v = torch.randn(2, 1, kv_heads, rows, dim).to(dtype).unbind(0)
    q = torch.randn(1, CHUNK, heads, dim).to(dtype)
    _, lse = prefill_dense_lse(q, k, v, PAST, scale)
    sums = torch.empty(1, 1, rows)
    index = torch.randperm(PAST - 512)[:1024].sort().values.int().view(1, 1, -1)
    keep = torch.rand(1, heads, CHUNK // 128, rows // 128) < 0.3
    return {
        "prefill chunk": lambda: prefill_dense(q, k, v, PAST, scale),
        "prefill chunk, sparse": lambda: prefill_sparse(
            q, k, v, index, [(PAST, rows, PAST - 512, 1024)], PAST, scale
        ),
        "column scores": lambda: column_scores(
            q, k, lse, [(PAST, rows, PAST - 512)], PAST, 1, scale, sums
        ),
        "column sums": lambda: column_sums(q[0, -32:], k[0], rows - 32, scale),
        "block mass": lambda: block_mass(q, k, PAST, 8, scale),
        "kept blocks": lambda: attend_blocks(q, k, v, keep, PAST, scale),
        "rows streamed back": lambda: attend_rows(q, k, v, scale),
    }


def _products(dtype: torch.dtype, shape: tuple[int, int, int]) -> dict[str, Case]:
    kv_heads, group, dim = shape
    heads, scale = kv_heads * group, dim**-0.5
    k = torch.randn(kv_heads, PAST, dim).to(dtype)
    q = torch.randn(64, heads, dim).to(dtype)
    low, high = torch.randn(2, kv_heads, AT_ONCE, dim).to(dtype).unbind(0)
    found: dict[str, Case] = {
        "Quest's page bounds": lambda: page_bounds(q[0], low, high, "max"),
        "MInference's lines": lambda: line_sums(q, k, PAST, scale),
    }
    linear = pack_linear(torch.randn(4096, 1024).to(dtype))
    for count in (1, 8, 64, 512):
        x = torch.randn(count, 1024).to(dtype)
        found[f"weights, {count} rows"] = lambda x=x: linear(x)
    return found


def measure(
    shape: tuple[int, int, int], rows: int, rounds: int, only: str
) -> dict[str, dict[str, float]]:
    """Thread CPU seconds, medians over rounds: {name: {dtype: seconds}}. Dtypes take turns."""
    calls: dict[str, dict[str, Case]] = {}
    for dtype in DTYPES:
        for name, call in cases(dtype, shape, rows).items():
            if only in name:
                calls.setdefault(name, {})[str(dtype)[6:]] = call
    seconds: dict[str, dict[str, float]] = {}
    for name, forms in calls.items():
        ways = {dtype: partial(timed, call) for dtype, call in forms.items()}
        found = harness.in_turns(ways, rounds)
        seconds[name] = {dtype: statistics.median(times) for dtype, times in found.items()}
    return seconds


def timed(call: Case, turn: int) -> float:
    """Thread CPU seconds of a call. The first round, which loads libraries, is not counted."""
    return harness.seconds(call)


def run_set(name: str, flags: Sequence[str]) -> dict[str, Any]:
    """Measure in a process limited to one instruction set; {"isa": what it said it had, ..}."""
    found = subprocess.run(
        [sys.executable, "-m", "tools.speed.cpu_forms", "--child", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", **LIMITS[name]},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise UsageError(f"--sets: {name} did not run: {found.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    if result["isa"] != name:
        raise UsageError(f"--sets: the limits of {name} left {result['isa']}")
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: milliseconds in float32, and the 16-bit forms as multiples of it."""
    names, rows = [f"{name}: float32, ms | bfloat16 | float16" for name in results], []
    for launcher in next(iter(results.values()))["seconds"]:
        cells = [launcher]
        for result in results.values():
            row = result["seconds"][launcher]
            cells.append(f"{1e3 * row['float32']:.2f}")
            for ratio in (row[dtype] / row["float32"] for dtype in ("bfloat16", "float16")):
                mark = "**" if ratio > LIMIT else ""
                cells.append(f"{mark}{ratio:.2f}{mark}")
        rows.append(cells)
    return harness.markdown(" | ".join(["launcher", *names]), rows, align="---:")


def filter_ratios(results: dict[str, dict[str, Any]]) -> str:
    """One line a set: a filter layer over a dense one, by dtype."""
    lines = []
    for name, result in results.items():
        rows = result["seconds"]
        if {"filter layer", "dense layer"} <= rows.keys():
            ratios = (
                f"{dtype} {rows['filter layer'][dtype] / rows['dense layer'][dtype]:.2f}"
                for dtype in rows["dense layer"]
            )
            lines.append(f"filter / dense layer, {name}: {', '.join(ratios)} (bar {FILTER_LIMIT})")
    return "\n".join(lines)


def work(args: argparse.Namespace) -> Report | None:
    """Measure one table; in a child process, print one set's seconds as JSON."""
    try:
        kv_heads, group, dim = (int(part) for part in args.shape.split("x"))
    except ValueError as error:
        raise UsageError(f"--shape: found {args.shape!r}, expected e.g. 8x4x64") from error
    if args.child:
        torch.set_num_threads(1)
        seconds = measure((kv_heads, group, dim), args.rows, args.rounds, args.only)
        print(json.dumps({"isa": isa(), "seconds": seconds}))
        return None
    if isa() not in SETS:
        raise UsageError("no instruction sets to emulate here: this CPU is not an x86")
    known = SETS[: SETS.index(isa()) + 1]
    wanted = tuple(args.sets.split(",")) if args.sets else known
    if set(wanted) - set(known):
        raise UsageError(f"--sets: found {args.sets!r}, expected some of {', '.join(known)}")
    flags = [f"--{name}={getattr(args, name)}" for name in ("shape", "rows", "rounds", "only")]
    results = {}
    for name in wanted:
        say(f"{name} ...")
        results[name] = run_set(name, flags)
    origin = harness.origin()
    facts = f"{origin['hardware']}; commit {origin['commit']}; shape {args.shape}, {args.rows} rows"
    tables = f"{table(results)}\n\n{filter_ratios(results)}"
    return Report(facts, tables, {"facts": facts, "results": results})


FLAGS = {
    "--sets": dict(help=f"of {','.join(SETS)} (default: all that this machine has)"),
    "--shape": dict(default="8x4x64", help="K/V heads x group x head dim"),
    "--rows": flag(16384, "of the bank"),
    "--rounds": flag(7, "turns of every dtype"),
    "--only": dict(default="", help="launchers with this in their name"),
    "--child": dict(action="store_true", help=argparse.SUPPRESS),
}
main = harness.program("cpu_forms", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
