"""What was read comes back from disk, beside plain reading of the
same files.

A session of random rows (tools/common/synthetic_bank.py) is saved to one file and to blocks of a
cache. Then three take turns: reading the bytes into one buffer and doing nothing with them,
restoring the session, filling an empty one from the blocks; once with the files dropped from the
system's memory before ("cold") and once held in it ("warm"). Clock: medians, and the least, which
other programs on the machine disturb less. CPU: seconds of all threads.
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
from functools import partial
from pathlib import Path
from typing import Any

from engine import LLM
from engine.bank.row_origins import FULL
from engine.base.errors import UsageError
from engine.saved.cache import BlockCache
from tools.common.synthetic_bank import synthesize
from tools.speed import harness
from tools.speed.harness import SHAPED, Report, flag

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


def timed(before: Callable[[], None], work: Callable[[], None], turn: int) -> tuple[float, float]:
    """(seconds of the clock, of all threads' CPU) of `work`, after `before`."""
    before()
    used = time.process_time()
    clock = harness.seconds(work, clock=time.perf_counter)
    return clock, time.process_time() - used


def figures(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """One way's medians, and the least of the clock."""
    clock, cpu = zip(*times)
    median = statistics.median
    return {"median": median(clock), "least": min(clock), "cpu": median(cpu)}


def measure(llm: LLM, tokens: int, folder: Path, turns: int) -> list[dict[str, Any]]:
    """One row for the file and one for the blocks, cold and warm."""
    path, cache = folder / "session", BlockCache(folder / "blocks")
    with llm.session() as session:
        synthesize(session, tokens)
        # as if read by full attention: of random rows the cache would keep none
        session.origins.add(0, [(tokens, FULL)])
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
        for state, before in (("cold", partial(drop, paths)), ("warm", lambda: None)):
            ways = {"plain": partial(read_plain, paths), "engine": work}
            turned = {name: partial(timed, before, way) for name, way in ways.items()}
            found = {k: figures(v) for k, v in harness.in_turns(turned, turns).items()}
            row = dict(what=what, state=state, tokens=tokens, bytes=size, **found)
            for name, figure in (("ratio", "median"), ("ratio_of_least", "least")):
                row[name] = found["plain"][figure] / found["engine"][figure]
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    cells = []
    for row in rows:
        plain, mine = row["plain"], row["engine"]
        took = [f"{s * 1e3:.0f} ms" for s in (plain["median"], mine["median"], mine["cpu"])]
        least = f"{plain['least'] * 1e3:.0f} and {mine['least'] * 1e3:.0f} ms"
        what = row["what"], row["state"], f"{row['bytes'] / 1e6:.0f} MB"
        cells.append((*what, *took, f"{row['ratio']:.2f}", f"{least}: {row['ratio_of_least']:.2f}"))
    names = "what | files | size | plain reading | the engine | its CPU | ratio | least of each"
    return harness.markdown(names, cells)


def sha_instructions() -> str:
    """Whether the processor has instructions for sha256, as far as the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return "yes" if " sha_ni" in text or " sha2" in text else "no"


def work(args: argparse.Namespace) -> Report:
    """Measure one table."""
    tokens = harness.size(args, "tokens")
    if tokens < 512:
        raise UsageError(f"--tokens: found {tokens}, expected 512 or more")
    harness.require(args, 1, "turns")
    if not hasattr(os, "posix_fadvise"):
        raise UsageError("this system has no posix_fadvise, so no file can be read cold")
    llm = harness.shape_llm(args, tokens + 64)
    folder = Path(tempfile.mkdtemp(prefix="saved-speed-", dir=args.folder))
    try:
        rows = measure(llm, tokens, folder, args.turns)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = f"{harness.machine()}, sha256 instructions: {sha_instructions()}"
    data = {**harness.origin(), "facts": machine, "load": os.getloadavg()[0], "rows": rows}
    return Report(f"{args.shape}, {args.dtype}, {tokens} tokens, {machine}", table(rows), data)


FLAGS = SHAPED | {
    "--tokens": flag("8K", "tokens of the session"),
    "--turns": flag(9, "timed, of each way"),
    "--folder": dict(type=Path, metavar="DIR", help="on the disk to be measured"),
}
main = harness.program("saved", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
