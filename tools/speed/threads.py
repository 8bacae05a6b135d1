"""Where a decode step stops gaining from more threads: its calls are timed on one thread, the
pieces that each shares are counted, and a schedule for 1 to 64 threads is made of both.

A step is what Python and the kernels before and behind shared work take, which no thread shortens,
and its calls, whose pieces go to whoever is free. Memory is taken to keep up with all threads; the
line above the table says what two of them read here beside one. The last column is a step with as
many threads as this machine has cores, measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine import Full
from engine.forward.native_layer import multiply, natively
from engine.session.session import Session
from kernels.attention.native import SPLIT, attend
from kernels.native import team
from tools.bench.run import engine_bytes
from tools.common.program import progress
from tools.common.synthetic_bank import synthesize
from tools.speed.harness import (
    READ,
    ROOM,
    SHAPED,
    Report,
    flag,
    machine,
    markdown,
    origin,
    program,
    read_rate,
    require,
    shape_facts,
    shape_llm,
    sizes,
)

TEAMS = (1, 2, 4, 8, 16, 32, 64)
HEAD = "head"
Work = Callable[[int], object]  # a call of a layer


@dataclass(frozen=True)
class Call:
    """A call of a step: how often it is made, its seconds on one thread, its pieces and bytes."""

    times: int
    seconds: float
    pieces: int
    bytes: int


def schedule(calls: Mapping[str, Call], rest: float, join: float, threads: int) -> float:
    """Seconds of a step on so many threads. rest: seconds that are not shared; join: seconds that a
    call takes more where a team shares it. Pieces of a call take equally long.
    """
    shared = sum(
        call.times
        * (call.seconds * -(-call.pieces // threads) / call.pieces + (join if threads > 1 else 0))
        for call in calls.values()
    )
    return rest + shared


def bend(calls: Mapping[str, Call], rest: float, join: float) -> int:
    """The largest team of TEAMS whose last doubling still took a quarter off a step."""
    best = 1
    for few, many in zip(TEAMS, TEAMS[1:]):
        if schedule(calls, rest, join, many) > 0.75 * schedule(calls, rest, join, few):
            break
        best = many
    return best


def _timed(works: Mapping[str, Work], layers: int, rounds: int) -> dict[str, float]:
    """Median seconds of each call, in a step's order: weights and rows have left the caches."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for layer in range(layers):
            for name, work in works.items():
                if name == HEAD and layer + 1 < layers:
                    continue
                began = time.perf_counter()
                work(layer)
                if turn:
                    found[name].append(time.perf_counter() - began)
    return {name: statistics.median(mine) for name, mine in found.items()}


def _pieces(work: Work) -> int:
    """The pieces that a call shares."""
    torch.set_num_threads(2)
    team.marks(2, 2, 1)
    work(0)
    found = sum(team.last()[0])
    torch.set_num_threads(1)
    return found


def calls_of(session: Session, n: int, rounds: int) -> dict[str, Call]:
    """The shared calls of a step of a session of n tokens."""
    model, config = session.loaded.model, session.loaded.config
    assert model is not None and natively(model), "shapes run on the C++ kernels"
    layers, eps, size = model.layers, config.rms_norm_eps, model.dtype.itemsize
    draw = lambda width: torch.randn(1, 1, width, dtype=model.dtype)  # noqa: E731
    x, wide = draw(config.hidden_size), draw(config.intermediate_size)
    q = draw(config.num_heads * config.head_dim)
    heads = q.view(1, config.num_heads, config.head_dim)

    def attention(layer: int) -> object:
        k, v = session.bank.kv(layer, n)
        return attend(heads, k[0], v[0], config.head_dim**-0.5, narrow=True)

    works: dict[str, Work] = {
        "q, k, v": lambda i: multiply(x, layers[i].qkv, norm=layers[i].input_norm, eps=eps),
        "attention": attention,
        "output": lambda i: multiply(q, layers[i].o, residual=x),
        "gate, up": lambda i: multiply(
            x, layers[i].gate_up, norm=layers[i].post_norm, eps=eps, gated=True
        ),
        "down": lambda i: multiply(wide, layers[i].down, residual=x),
        HEAD: lambda i: multiply(x, model.lm_head, norm=model.norm, eps=eps, wide=True),
    }
    inputs, inner = config.hidden_size, config.intermediate_size
    rows = config.num_heads * config.head_dim
    read = {
        "q, k, v": (rows + 2 * config.num_kv_heads * config.head_dim) * inputs * size,
        "attention": n * config.kv_bytes(size),
        "output": rows * inputs * size,
        "gate, up": 2 * inner * inputs * size,
        "down": inner * inputs * size,
        HEAD: config.vocab_size * inputs * size,
    }
    with torch.inference_mode():
        took = _timed(works, len(layers), rounds)
        pieces = {name: _pieces(work) for name, work in works.items()}
        pieces["attention"] = config.num_kv_heads * -(-n // SPLIT)  # its last call merges them
        return {
            name: Call(1 if name == HEAD else len(layers), took[name], pieces[name], read[name])
            for name, work in works.items()
        }


def _step(session: Session, threads: int, rounds: int) -> float:
    torch.set_num_threads(threads)
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        session.decode(session.ids[-1])
        found.append(time.perf_counter() - began)
    torch.set_num_threads(1)
    return statistics.median(found[1:])


def _join() -> float:
    """Seconds that a call of two pieces without work takes."""
    found = []
    for _ in range(500):
        began = time.perf_counter()
        team.marks(2, 2, 1)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _read(threads: int) -> float:
    memory = torch.ones(READ // 4)
    torch.set_num_threads(threads)
    rate = read_rate(memory)
    torch.set_num_threads(1)
    return rate


def measure(args: argparse.Namespace) -> Report:
    """Time, count and schedule."""
    require(args, 1, "rounds")
    depths = sizes(args, "contexts")
    torch.set_num_threads(1)
    llm = shape_llm(args, max(depths) + ROOM, method=Full())
    cores = os.cpu_count() or 1
    reads = {threads: _read(threads) for threads in sorted({1, min(2, cores)})}
    join, table, profile, data = _join(), [], [], []
    for n in depths:
        with llm.session() as session:
            synthesize(session, n)
            progress(f"{args.shape} {args.dtype}, {n} tokens")
            calls = calls_of(session, n, args.rounds)
            alone, together = (_step(session, t, 3 * args.rounds) for t in (1, cores))
        shared = sum(call.times * call.seconds for call in calls.values())
        rest = max(0.0, alone - shared)
        simulated = {t: schedule(calls, rest, join, t) for t in TEAMS}
        share = engine_bytes(llm, n, n).floor / alone / reads[1]
        table.append(
            [n, *(f"{1e3 * simulated[t]:.2f}" for t in TEAMS), bend(calls, rest, join)]
            + [f"{1e3 * together:.2f}"]
        )
        profile += [
            [n, name, call.times, f"{1e6 * call.seconds:.0f}", call.pieces]
            + [f"{call.bytes / call.seconds / 1e9:.1f}", f"{call.times * call.seconds / alone:.0%}"]
            for name, call in calls.items()
        ]
        profile.append([n, "the rest", 1, f"{1e6 * rest:.0f}", "", "", f"{rest / alone:.0%}"])
        data.append(_row(n, calls, rest, alone, together, simulated, share))
    facts = f"{args.shape}, {args.dtype}, full attention, {machine()}, wall time; " + ", ".join(
        f"{t} thread{'s' * (t > 1)} read {rate / 1e9:.1f} GB/s" for t, rate in reads.items()
    )
    shares = ", ".join(f"{row['share_of_bandwidth']:.2f} at {row['context']}" for row in data)
    facts += f"\nof one thread's bandwidth a step on one thread takes {shares}"
    names = " | ".join(f"{t} threads" for t in TEAMS)
    text = "\n\n".join(
        (
            markdown(f"ms a step at | {names} | bends at | {cores} measured", table),
            markdown("tokens | call | times | us | pieces | GB/s | of a step", profile),
        )
    )
    figures = {"reads": reads, "join": join, "rows": data}
    return Report(facts, text, {**shape_facts(args), **origin(), **figures})


def _row(
    n: int,
    calls: Mapping[str, Call],
    rest: float,
    alone: float,
    together: float,
    simulated: Mapping[int, float],
    share: float,
) -> dict[str, Any]:
    return {
        "context": n,
        "seconds": {"one thread": alone, "all cores": together, "not shared": rest},
        "share_of_bandwidth": share,
        "calls": {name: vars(call) for name, call in calls.items()},
        "simulated": dict(simulated),
    }


main = program(
    "threads",
    __doc__,
    {
        **SHAPED,
        "--contexts": flag("2K,32K", "tokens"),
        "--rounds": flag(5, "times that every layer's calls are timed"),
    },
    measure,
)

if __name__ == "__main__":
    sys.exit(main())
