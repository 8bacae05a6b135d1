"""Kill ranks of a chat at random moments: every other process ends in time, and says why in a line.

python -m tests.programs.rank_kills --kills 20 --ranks 3 --seed 0

Each run is `python -m engine.chat --ranks N` over the shipped model, which starts, loads, reads its
document and writes an answer without end; at a random moment one of its processes gets SIGKILL. It
counts as survived where every other process has ended within the patience, rank 0 with a code other
than 0 and a line that names the rank, the others with a line each, and nobody printed a traceback.
Exit code 0, or 1 where a run did not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TICK = 0.02  # seconds between two looks


@dataclass
class Run:
    """What one run has shown. seconds: from the kill to the end of the last process."""

    victim: int
    moment: float
    stage: str
    seconds: float
    code: int
    lines: list[str]
    faults: list[str]


def children(pid: int) -> dict[int, int]:
    """{rank: process} of the ranks that a process has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) != pid:
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        place = next((e for e in environment if e.startswith(b"OMNIKV_RANK=")), b"")
        if b'"rank": ' in place:
            found[int(place.split(b'"rank": ')[1].split(b",")[0])] = int(folder.name)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for has ended."""
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in "ZX"
    except OSError:
        return False


def stage_of(said: str) -> str:
    """How far a chat has come, by what it printed."""
    if "tokens read in" in said:
        return "writing"
    if "loaded" in said:
        return "reading"
    return "starting" if "model pocket" not in said else "loading"


def run(ranks: int, longest: float, patience: float, draw: random.Random) -> Run:
    """Start a chat, kill one of its processes, and see the others end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "engine.chat", "--ranks", str(ranks), "--ignore-eos"]
        command += ["-p", "Tell me all that you know.", "-n", "30000"]
        chat = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors)
        until = time.monotonic() + 120
        while len(children(chat.pid)) < ranks - 1 and time.monotonic() < until:
            time.sleep(0.05)
        moment = draw.uniform(0.0, longest)
        time.sleep(moment)
        processes = {0: chat.pid, **children(chat.pid)}
        victim = draw.randrange(ranks)
        errors.seek(0)
        stage = stage_of(errors.read())
        os.kill(processes[victim], signal.SIGKILL)
        seconds, last = 0.0, time.monotonic()
        others = [pid for rank, pid in processes.items() if rank != victim]
        while any(map(alive, others)) and seconds < patience:
            chat.poll()
            time.sleep(TICK)
            now = time.monotonic()
            # where all of them were stopped for a while, so was this program
            seconds, last = seconds + min(now - last, 10 * TICK), now
        faults = [f"rank {rank} goes on" for rank, pid in processes.items() if alive(pid)]
        for pid in filter(alive, processes.values()):
            os.kill(pid, signal.SIGKILL)
        code = chat.wait()
        errors.seek(0)
        said = errors.read()
    lines = [
        line.strip()
        for line in said.replace("\r", "\n").splitlines()
        if line.startswith(("error:", "rank "))
    ]
    if "Traceback" in said:
        faults.append("a traceback")
    if victim and (code == 0 or not any(f"rank {victim}" in line for line in lines)):
        faults.append(f"code {code}, and no line names rank {victim}")
    for rank in range(1, ranks):
        own = [line for line in lines if line.startswith(f"rank {rank}:")]
        if rank != victim and len(own) > 1:
            faults.append(f"{len(own)} lines of rank {rank}")
    return Run(victim, moment, stage, seconds, code, lines, faults)


def main(arguments: list[str] | None = None) -> int:
    """Run the kills and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds before a kill")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to end in")
    args = parser.parse_args(arguments)
    draw, failed, slowest = random.Random(args.seed), 0, 0.0
    for number in range(args.kills):
        found = run(args.ranks, args.longest, args.patience, draw)
        slowest, failed = max(slowest, found.seconds), failed + bool(found.faults)
        verdict = "; ".join(found.faults) or "all ended"
        print(
            f"{number + 1:>3}. rank {found.victim} at {found.moment:5.1f} s, {found.stage}: "
            f"{verdict} in {found.seconds:.2f} s, code {found.code}; {' | '.join(found.lines)}",
            flush=True,
        )
    print(f"{args.kills - failed} of {args.kills} ended in time, the slowest in {slowest:.2f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
