"""Kill ranks of a chat at random moments: every other process ends in time, and says why in a line.

python -m tests.programs.rank_kills --kills 20 --ranks 3 --seed 0

Each run is `python -m engine.chat --ranks N` over the shipped model, which starts, loads, reads its
document and writes an answer without end; at a random moment one of its processes gets SIGKILL. It
counts as survived where every other process has ended within the patience, rank 0 with a code other
than 0 and a line that names the rank, the others with a line each, and nobody printed a traceback.
Exit code 0, or 1 where a run did not.

--saves: each run saves one session over and over to the same file. What is on the disk after the
kill must be the last save that was reported, or the one under way, to the bit; and the next save
leaves no file but its own.
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

from engine import RankedLLM
from engine.base.errors import EngineError
from tests.builders import POCKET
from tools.common.program import guarded

ROOT = Path(__file__).resolve().parents[2]
TICK = 0.02  # seconds between two looks


@dataclass
class Run:
    """What one run has shown. seconds: from the kill to the end of the last process. said: what
    rank 0 printed.
    """

    victim: int
    moment: float
    stage: str
    seconds: float
    code: int
    lines: list[str]
    faults: list[str]
    said: str = ""


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


def chatting(ranks: int) -> list[str]:
    """The command of a chat that writes without end."""
    command = [sys.executable, "-m", "engine.chat", "--ranks", str(ranks), "--ignore-eos"]
    return [*command, "-p", "Tell me all that you know.", "-n", "30000"]


def run(
    command: list[str],
    ranks: int,
    longest: float,
    patience: float,
    draw: random.Random,
    begun: str = "",
) -> Run:
    """Start a program, kill one of its processes, and see the others end. begun: what it prints
    before the time to the kill begins.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        chat = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            out.seek(0)
            if len(children(chat.pid)) >= ranks - 1 and begun in out.read():
                break
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
        out.seek(0)
        printed = out.read()
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
    return Run(victim, moment, stage, seconds, code, lines, faults, printed)


# ---------------------------------------------------------------- saves

SETTINGS = dict(max_context=2048, chunk=256, dtype="float32", device="cpu", threads=1)
DOCUMENT = list(range(5, 1505))  # token ids, 23 MB of rows


def save_on(path: str, ranks: int) -> int:
    """Save a session of as many ranks over and over, a token longer each time."""
    llm = RankedLLM(POCKET, ranks, **SETTINGS)
    with llm.session() as session:
        session.prefill(DOCUMENT)
        for number in range(1, 500):
            session.decode(4 + number)
            session.save(path)
            print(f"saved {number}", flush=True)
    return 0


class Saves:
    """Looks at what a killed program has left on the disk, with ranks of its own."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._llm = RankedLLM(POCKET, ranks, **SETTINGS)

    def run(self, longest: float, patience: float, draw: random.Random) -> Run:
        """Kill a rank of a program that saves; the last whole save must be there to the bit."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "talk.omnikv"
            command = [sys.executable, "-m", "tests.programs.rank_kills"]
            command += ["--ranks", str(self._ranks), "--save-on", str(path)]
            found = run(command, self._ranks, longest, patience, draw, "saved 1")
            found.stage = "saving"
            found.faults += self._faults(path, len(found.said.split("saved ")) - 1)
            return found

    def _faults(self, path: Path, whole: int) -> list[str]:
        """What is wrong with a file after so many whole saves, and with the folder once it has been
        saved again.
        """
        try:
            session, _ = self._llm.restore(path)
        except EngineError as error:
            return [f"after {whole} saves: {error}"]
        with session:
            made = len(session) - len(DOCUMENT)
            if made not in (whole, whole + 1):
                return [f"found {made} saved tokens, expected {whole} or {whole + 1}"]
            with self._llm.session() as other:
                other.prefill(DOCUMENT)
                for number in range(1, made + 1):
                    other.decode(4 + number)
                if other.ids != session.ids or not other.decode(9).equal(session.decode(9)):
                    return [f"another session than the {made}. that was saved"]
            session.save(path)
        left = sorted(file.name for file in path.parent.iterdir())
        return [f"left behind: {left}"] if len(left) != self._ranks + 1 else []

    def close(self) -> None:
        """End the ranks that look."""
        self._llm.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the kills and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds before a kill")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to end in")
    parser.add_argument("--saves", action="store_true", help="kill programs that save a session")
    parser.add_argument("--save-on", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.save_on:
        return guarded(lambda: save_on(args.save_on, args.ranks))
    draw, failed, slowest = random.Random(args.seed), 0, 0.0
    given = args.longest, args.patience, draw
    saves = Saves(args.ranks) if args.saves else None
    for number in range(args.kills):
        found = saves.run(*given) if saves else run(chatting(args.ranks), args.ranks, *given)
        slowest, failed = max(slowest, found.seconds), failed + bool(found.faults)
        verdict = "; ".join(found.faults) or "all ended"
        print(
            f"{number + 1:>3}. rank {found.victim} at {found.moment:5.1f} s, {found.stage}: "
            f"{verdict} in {found.seconds:.2f} s, code {found.code}; {' | '.join(found.lines)}",
            flush=True,
        )
    if saves:
        saves.close()
    print(f"{args.kills - failed} of {args.kills} ended in time, the slowest in {slowest:.2f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
