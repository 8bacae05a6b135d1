"""What all cores gain over one, in decode steps and in prompts, beside what memory gains: one core
and all of them in turns, a read of memory before every step's turn. What other machines on the host
leave of its memory changes from minute to minute, so a gain says little without memory's own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine import Full, OmniKV
from engine.base.cores.free_cores import free_cores
from engine.session.session import Session
from tools.bench.shapes import shape_filters
from tools.common.program import progress
from tools.common.synthetic_bank import synthesize
from tools.speed.harness import (
    READ,
    ROOM,
    SHAPED,
    Report,
    flag,
    in_turns,
    machine,
    markdown,
    on_threads,
    origin,
    program,
    read_rate,
    require,
    shape_facts,
    shape_llm,
    sizes,
)

STEPS = 8  # of a turn; the first is not timed


def _steps(session: Session) -> float:
    """Median seconds of a step."""
    found = []
    for _ in range(STEPS):
        began = time.perf_counter()
        session.decode(session.ids[-1])
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _prompt(session: Session, ids: list[int]) -> float:
    session.truncate(0)
    began = time.perf_counter()
    session.prefill(ids)
    return time.perf_counter() - began


def _gained(what: str, works: dict[str, Callable[[], float]], args: argparse.Namespace) -> dict:
    """Time works on one thread and on all: {name of a work: seconds on one, on all, and the medians
    of all over one turn by turn}.
    """
    progress(what)
    cores = free_cores()
    ways = {
        (name, t): partial(on_threads, t, work) for name, work in works.items() for t in (1, cores)
    }
    found = in_turns(ways, args.rounds)
    rows = {}
    for name in works:
        one, both = found[name, 1], found[name, cores]
        gains = [a / b for a, b in zip(one, both)]
        rows[name] = {
            "one": statistics.median(one),
            "all": statistics.median(both),
            "gain": statistics.median(gains),
            "least": min(gains),
            "most": max(gains),
        }
    return rows


def measure(args: argparse.Namespace) -> Report:
    """Decode steps of full attention and OmniKV at each depth, then prompts."""
    require(args, 1, "rounds")
    depths, prompts = sizes(args, "contexts"), sizes(args, "prompts")
    layers = shape_filters(args.shape)
    methods = {"full": Full(), "omnikv": OmniKV(filter_layers=layers, dense_below=0)}
    llm = shape_llm(args, max(depths + prompts) + ROOM, method=Full())
    memory, data = torch.ones(READ // 4), list[dict[str, Any]]()
    reads = {f"memory, {READ >> 20} MiB": lambda: READ / read_rate(memory)}
    for n in depths:
        with llm.session() as session:
            synthesize(session, n)
            works: dict[str, Callable[[], float]] = dict(reads)
            for name, method in methods.items():
                works[name] = partial(_switched, session, method, n)
            data += _rows(f"a step at {n}", _gained(f"{n} tokens", works, args))
    for n in prompts:
        ids = torch.randint(10, llm.config.vocab_size - 10, (n,)).tolist()
        with llm.session() as session:
            found = _gained(f"a prompt of {n}", {"full": partial(_prompt, session, ids)}, args)
        data += _rows(f"a prompt of {n}", found)
    table = [
        [row["what"], row["name"], *(f"{1e3 * row[key]:.2f}" for key in ("one", "all"))]
        + [f"{row['gain']:.2f} ({row['least']:.2f} to {row['most']:.2f})"]
        for row in data
    ]
    cores = free_cores()
    facts = f"{args.shape}, {args.dtype}, {machine()}, medians of {args.rounds} turns, wall time"
    names = f"what | method | ms on one thread | ms on {cores} | gain (least to most)"
    return Report(facts, markdown(names, table), {**shape_facts(args), **origin(), "rows": data})


def _switched(session: Session, method: Any, n: int) -> float:
    session.set_method(method)
    took = _steps(session)
    session.truncate(n)
    return took


def _rows(what: str, found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"what": what, "name": name, **row} for name, row in found.items()]


main = program(
    "gain",
    __doc__,
    {
        **SHAPED,
        "--contexts": flag("2K,32K", "tokens"),
        "--prompts": flag("2K", "tokens of prompts that are read whole"),
        "--rounds": flag(5, "turns of one thread and all"),
    },
    measure,
)

if __name__ == "__main__":
    sys.exit(main())
