"""What the programs of this folder share: flags, a model of random weights, ways that take turns,
and a table that is printed and kept as JSON.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine import LLM
from engine.base.errors import UsageError
from engine.session.session import Session
from kernels.launch.isa import isa
from tools.bench.header import commit, hardware
from tools.bench.shapes import SHAPES, parse_size, shape_config
from tools.bench.suite import sharp_stream
from tools.common.program import guarded, replace_json, require_writable

ROOM = 256  # tokens of a session beyond its depth
READ = 256 << 20  # bytes that a read of memory reads
K, T = TypeVar("K"), TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What a program prints, `facts` above its table, and what --json keeps."""

    facts: str
    table: str
    data: Any


def flag(default: Any, help: str) -> dict[str, Any]:
    """A flag of a number, or of a size such as 8K where the default is a text."""
    return dict(default=default, type=type(default), metavar="N", help=f"{help} (%(default)s)")


SHAPED: dict[str, dict[str, Any]] = {
    "--shape": dict(choices=SHAPES, default="160m"),
    "--dtype": dict(choices=("float32", "bfloat16", "float16"), default="bfloat16"),
}


def program(
    name: str,
    doc: str | None,
    flags: Mapping[str, Mapping[str, Any]],
    work: Callable[[argparse.Namespace], Report | None],
) -> Callable[[Sequence[str] | None], int]:
    """The `main` of tools.speed.NAME: takes arguments, runs `work` and returns an exit code, 0, 1
    (what is measured does not fit, or fails) or 2 (usage).
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tools.speed.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for word, options in flags.items():
        parser.add_argument(word, **options)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")

    def run(args: argparse.Namespace) -> None:
        if args.json:
            require_writable("--json", args.json)
        report = work(args)
        if report is not None:
            print(f"{report.facts}\n\n{report.table}")
            if args.json:
                replace_json(args.json, report.data)

    def main(argv: Sequence[str] | None = None) -> int:
        args = parser.parse_args(argv)
        return guarded(lambda: run(args))

    return main


def require(args: argparse.Namespace, least: int, *names: str, most: float = math.inf) -> None:
    """Raise UsageError where one of these flags is below `least` or above `most`."""
    expected = f"{least} or more" if most == math.inf else f"{least} to {most}"
    for name in names:
        if not least <= getattr(args, name) <= most:
            raise UsageError(f"--{name}: found {getattr(args, name)}, expected {expected}")


def size(args: argparse.Namespace, name: str) -> int:
    """The size of a flag, such as 8K. Raises UsageError."""
    try:
        return parse_size(getattr(args, name))
    except ValueError as error:
        raise UsageError(f"--{name}: {error}") from error


def sizes(args: argparse.Namespace, name: str) -> list[int]:
    """The sizes of a flag, such as 8K,32K. Raises UsageError."""
    texts = getattr(args, name).split(",")
    return [size(argparse.Namespace(**{name: text}), name) for text in texts]


def shape_llm(args: argparse.Namespace, max_context: int, **options: Any) -> LLM:
    """Random weights of the flags' shape and dtype on the CPU."""
    where = dict(name=args.shape, device="cpu", dtype=args.dtype, max_context=max_context)
    return LLM.from_stream(shape_config(args.shape), sharp_stream, **where, **options)


def shape_facts(args: argparse.Namespace) -> dict[str, Any]:
    """What a row says of the flags' model and of this machine."""
    return {"shape": args.shape, "dtype": args.dtype, "instructions": isa()}


def in_turns(ways: Mapping[K, Callable[[int], T]], turns: int) -> dict[K, list[T]]:
    """What each way returns of the number of its turn; a first turn is not counted."""
    found: dict[K, list[T]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            result = way(turn)
            if turn:
                found[name].append(result)
    return found


def on_threads(threads: int, work: Callable[[], T], _turn: int) -> T:
    """What work returns where torch, and with it every kernel, has so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return work()
    finally:
        torch.set_num_threads(before)


def seconds(
    work: Callable[..., object], *arguments: Any, clock: Callable[[], float] = time.thread_time
) -> float:
    """How long a call takes, in seconds of thread CPU time."""
    began = clock()
    work(*arguments)
    return clock() - began


def steps(sessions: Sequence[Session], count: int) -> list[float]:
    """Median seconds of a decode step of each session, `count` steps in turns after a first."""
    ways = {n: partial(seconds, session.decode) for n, session in enumerate(sessions)}
    return [statistics.median(mine) for mine in in_turns(ways, count).values()]


def read_rate(memory: torch.Tensor) -> float:
    """Bytes per second of a plain sum."""
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - began)
    return memory.nbytes / best


def markdown(names: str, rows: Iterable[Sequence[object]], align: str = "---") -> str:
    """A Markdown table. names: of its columns, " | " between them."""
    head = f"| {names} |\n|---|" + f"{align}|" * names.count(" | ")
    return "\n".join([head, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def one_thread(args: argparse.Namespace) -> str:
    """The line above a table of thread CPU time."""
    return f"{args.shape}, {args.dtype}, one thread, {isa()}, thread CPU time"


def machine() -> str:
    """This machine, and how busy it is."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{isa()}, {os.cpu_count()} cores, load {load:.1f}"


def origin() -> dict[str, Any]:
    """Where figures come from, for --json."""
    return {"commit": commit(), "hardware": hardware("cpu")}
