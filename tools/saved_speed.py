"""`python -m tools.saved_speed`: what was read comes back from disk, beside plain reading of the
same files.

A session of random rows (tools/synthetic_bank.py) is saved to one file and to blocks of a cache.
Then three take turns: reading the bytes into one buffer and doing nothing with them, restoring
the session, filling an empty one from the blocks; once with the files dropped from the system's
memory before ("cold") and once held in it ("warm"). Clock: medians, and the least, which other
programs on the machine disturb less. CPU: seconds of all threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import LLM
from engine.errors import UsageError
from engine.saved.cache import BlockCache
from kernels.isa import isa
from tools.bench.header import commit, hardware
from tools.bench.shapes import SHAPES, parse_size, shape_config
from tools.bench.suite import sharp_stream
from tools.program import guarded, replace_json, require_writable
from tools.synthetic_bank import synthesize

BUFFER = 1 << 20  # bytes of one plain read


def read_plain(paths: Sequence[Path]) -> None:
    """Read files from beginning to end into one buffer."""
    buffer = bytearray(BUFFER)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Sequence[Path]) -> None:
    """Have the system forget the files' bytes, after they are on the disk."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def seconds(
    ways: dict[str, Callable[[], None]], before: Callable[[], None], turns: int
) -> dict[str, dict[str, float]]:
    """Seconds of each way, in turns, each after `before`; a first turn is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, work in ways.items():
            before()
            began, used = time.perf_counter(), time.process_time()
            work()
            if turn:
                found[name].append((time.perf_counter() - began, time.process_time() - used))
    return {
        name: {
            "median": statistics.median(clock for clock, _ in times),
            "least": min(clock for clock, _ in times),
            "cpu": statistics.median(cpu for _, cpu in times),
        }
        for name, times in found.items()
    }


def measure(llm: LLM, tokens: int, folder: Path, turns: int) -> list[dict[str, Any]]:
    """One row for the file and one for the blocks, cold and warm."""
    path, cache = folder / "session", BlockCache(folder / "blocks")
    with llm.session() as session:
        synthesize(session, tokens)
        ids = session.ids
        session.save(path)
        cache.store(session)

    def restore() -> None:
        llm.restore(path)[0].close()

    def fill() -> None:
        with llm.session() as session:
            if cache.fill(session, ids) < tokens - 256:
                raise UsageError("--tokens: the blocks were not found again")

    rows = []
    blocks = sorted(cache.folder.glob("*/*.block"))
    for what, paths, work in (("session", [path], restore), ("cache", blocks, fill)):
        size = sum(p.stat().st_size for p in paths)
        ways = {"plain": lambda p=paths: read_plain(p), "engine": work}
        for state, before in (("cold", lambda p=paths: drop(p)), ("warm", lambda: None)):
            found = seconds(ways, before, turns)
            rows.append(
                {
                    "what": what,
                    "state": state,
                    "tokens": tokens,
                    "bytes": size,
                    **found,
                    "ratio": found["plain"]["median"] / found["engine"]["median"],
                    "ratio_of_least": found["plain"]["least"] / found["engine"]["least"],
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    lines = [
        "| what | files | size | plain reading | the engine | its CPU | ratio | least of each |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain, mine = (row[way]["median"] * 1e3 for way in ("plain", "engine"))
        least = " and ".join(f"{row[way]['least'] * 1e3:.0f}" for way in ("plain", "engine"))
        lines.append(
            f"| {row['what']} | {row['state']} | {row['bytes'] / 1e6:.0f} MB | {plain:.0f} ms | "
            f"{mine:.0f} ms | {row['engine']['cpu'] * 1e3:.0f} ms | {row['ratio']:.2f} | "
            f"{least} ms: {row['ratio_of_least']:.2f} |"
        )
    return "\n".join(lines)


def sha_instructions() -> str:
    """Whether the processor has instructions for sha256, as far as the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return "yes" if " sha_ni" in text or " sha2" in text else "no"


def run(args: argparse.Namespace) -> None:
    """Measure and print one table."""
    if args.json:
        require_writable("--json", args.json)
    try:
        tokens = parse_size(args.tokens)
    except ValueError as error:
        raise UsageError(f"--tokens: {error}") from error
    if tokens < 512 or args.turns < 1:
        raise UsageError("--tokens: expected 512 or more; --turns: expected 1 or more")
    if not hasattr(os, "posix_fadvise"):
        raise UsageError("this system has no posix_fadvise, so no file can be read cold")
    llm = LLM.from_stream(
        shape_config(args.shape),
        sharp_stream,
        name=args.shape,
        device="cpu",
        dtype=args.dtype,
        max_context=tokens + 64,
    )
    folder = Path(tempfile.mkdtemp(prefix="saved-speed-", dir=args.folder))
    try:
        rows = measure(llm, tokens, folder, args.turns)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    load = os.getloadavg()[0]
    facts = f"{os.cpu_count()} cores, {isa()}, sha256 instructions: {sha_instructions()}"
    print(f"{args.shape}, {args.dtype}, {tokens} tokens, {facts}, load {load:.1f}\n")
    print(table(rows))
    if args.json:
        report = {"commit": commit(), "hardware": hardware("cpu"), "facts": facts, "load": load}
        replace_json(args.json, {**report, "rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the disk is full) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m tools.saved_speed", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="160m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--tokens", default="8K", metavar="N", help="tokens of the session")
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="timed, of each way")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to be measured")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
