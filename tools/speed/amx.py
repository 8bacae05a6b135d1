"""The trial of AMX: what runs in tiles with OMNIKV_AMX=1 beside what runs without it, in turns.

A prompt's attention and products of many rows, random numbers. Each piece runs in both forms, one
after the other, and the table has their medians. The last line is the verdict and the setting.
Nothing is kept: which form runs follows from the setting alone, since it changes the last bits.
With one thread the clock is its CPU time, else the wall's, so that other programs must rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from engine.base.errors import EngineError, UsageError
from kernels.launch.isa import isa
from kernels.layer.linear import pack_linear
from kernels.native import amx
from kernels.native.library import native
from kernels.prefill.dense import prefill_dense_lse
from kernels.quant.linear import pack_quantised
from kernels.quant.rounding import to_int4, to_int8
from kernels.rows.forms import FORMS
from tools.common.program import progress, say
from tools.speed import harness
from tools.speed.harness import Report, flag

SETTING = "OMNIKV_AMX"
ON, OFF = "1", "0"
GROUP = 64  # columns of int4 under one scale
Call = Callable[[], object]


@contextmanager
def asked(word: str) -> Iterator[None]:
    """Let OMNIKV_AMX be a word."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = word
    try:
        yield
    finally:
        if before is None:
            del os.environ[SETTING]
        else:
            os.environ[SETTING] = before


def require_tiles() -> None:
    """Raise EngineError, which says why, where no tiles run in this process."""
    if isa() != "amx":
        raise EngineError(f"nothing to time: this CPU has no AMX (it runs {isa()})")
    with asked(ON):
        if why := amx.refused(native()):
            raise EngineError(f"nothing to time: {why}")
        if wrong := [one.fault for one in amx.TILES if not one.usable()]:
            raise EngineError(f"nothing to time: {'; '.join(wrong)}")


def pieces(args: argparse.Namespace) -> dict[str, dict[str, Call]]:
    """Make every piece's call in both forms: {name: {word of OMNIKV_AMX: call}}."""
    found: dict[str, dict[str, Call]] = {}
    for word in (OFF, ON):
        with asked(word):
            for name, call in (_attention(args) | _products(args)).items():
                found.setdefault(name, {})[word] = call
    return found


def _attention(args: argparse.Namespace) -> dict[str, Call]:
    try:
        kv_heads, group, dim = (int(part) for part in args.shape.split("x"))
    except ValueError as error:
        raise UsageError(f"--shape: found {args.shape!r}, expected e.g. 8x4x128") from error
    chunk, past = args.chunk, harness.size(args, "past")
    k, v = torch.randn(2, 1, kv_heads, past + chunk, dim).unbind(0)
    q = torch.randn(1, chunk, kv_heads * group, dim).bfloat16()
    packed = FORMS[torch.int8]
    banks = {
        "bfloat16": (k.bfloat16(), v.bfloat16()),
        "int8": (packed.keys.pack(k), packed.values.pack(v)),
    }
    where = f"attention of {chunk} tokens behind {past}"
    return {
        f"{where}, {name} rows": partial(prefill_dense_lse, q, *rows, past, dim**-0.5)
        for name, rows in banks.items()
    }


def _products(args: argparse.Namespace) -> dict[str, Call]:
    weight = torch.randn(args.outputs, args.inputs) / args.inputs**0.5
    forms = {
        "bfloat16": pack_linear(weight.bfloat16()),
        "int8": pack_quantised(to_int8(weight, args.inputs), None, torch.bfloat16),
        "int4": pack_quantised(to_int4(weight, GROUP), None, torch.bfloat16),
    }
    found: dict[str, Call] = {}
    for name, linear in forms.items():
        for rows in args.rows:
            x = torch.randn(rows, args.inputs).bfloat16()
            found[f"{rows} rows by {name} weights"] = partial(linear, x)
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each piece: seconds in both forms, medians of turns."""
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = []
    for name, calls in pieces(args).items():
        progress(name)
        ways = {word: partial(_timed, word, call, clock) for word, call in calls.items()}
        took = harness.in_turns(ways, args.turns)
        present, tiles = (statistics.median(took[word]) for word in (OFF, ON))
        rows.append(dict(piece=name, present_s=present, tiles_s=tiles, speed=present / tiles))
    say("")
    return rows


def _timed(word: str, call: Call, clock: Callable[[], float], turn: int) -> float:
    with asked(word):
        return harness.seconds(call, clock=clock)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say whether tiles are ahead, and what to set."""
    slow = [row for row in rows if row["speed"] < 1]
    least, most = (f(row["speed"] for row in rows) for f in (min, max))
    said = f"tiles take {1 / most:.2f} to {1 / least:.2f} of the present forms' time"
    if not slow:
        return f"{said}: ahead in every piece. {SETTING}=1 turns them on."
    names = "; ".join(str(row["piece"]) for row in slow)
    return f"{said}: behind in {names}. Leave {SETTING} unset, unless the others weigh more."


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the rows, and the verdict."""
    cells = [
        (
            r["piece"],
            f"{r['present_s'] * 1e3:.2f}",
            f"{r['tiles_s'] * 1e3:.2f}",
            f"{r['speed']:.2f}",
        )
        for r in rows
    ]
    whole = harness.markdown("piece | present form, ms | tiles, ms | speed", cells, align="---:")
    return f"{whole}\n\n{verdict(rows)}"


def work(args: argparse.Namespace) -> Report:
    """Time one table."""
    harness.require(args, 1, "chunk", "outputs", "turns", "threads")
    if args.inputs < GROUP or args.inputs % GROUP:
        raise UsageError(f"--inputs: found {args.inputs}, expected a multiple of {GROUP}")
    require_tiles()
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        rows = measure(args)
    finally:
        torch.set_num_threads(before)
    facts = f"{harness.machine()}, {args.threads} threads, bfloat16, heads {args.shape}"
    return Report(facts, table(rows), {"facts": facts, "rows": rows} | harness.origin())


FLAGS = {
    "--shape": dict(default="8x4x128", help="K/V heads x group x head dim (%(default)s)"),
    "--chunk": flag(512, "tokens whose attention is timed"),
    "--past": flag("8K", "tokens before them"),
    "--rows": dict(type=int, nargs="+", default=[32, 128, 512, 2048], help="of products"),
    "--outputs": flag(4096, "of a weight"),
    "--inputs": flag(4096, "of a weight"),
    "--turns": flag(7, "of both forms, after a first"),
    "--threads": flag(1, "of each call"),
}
main = harness.program("amx", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
