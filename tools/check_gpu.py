"""What this GPU does with the engine, and what to attack next: three commands, each within nine
minutes, and a fourth for machines with two GPUs.

    python3 -m tools.check_gpu --out DIR               every verdict once, the most valuable first
    python3 -m tools.check_gpu --out DIR --command 2   depth, rivals, where a step's time goes
    python3 -m tools.check_gpu --out DIR --command 3   CUDA tests, NVIDIA's tools, whole sessions
    python3 -m tools.check_gpu --out DIR --command 4   a model's heads split over two GPUs

Needs no network and no checkpoint. The sections run one after the other in a worker process that
keeps one model; after a crash or a stop a new one takes over. results.json and results.md are
rewritten after each section. A later call goes on with the sections that are not done, with the
results of the same sources: --resume FILE takes them from a results.json that was carried here.
--cpu-rehearsal runs the same sections on a CPU with a small model, at the GPU's budget and dtype
and up to 32,768 tokens, so that what would fail on the GPU fails there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import UsageError
from tools.bench import header as bench_header
from tools.common.arguments import add_flags, command
from tools.common.program import ended, guarded, replace_text, say
from tools.gpu import depth, jobs, sections
from tools.gpu import verdict as gpu_verdict
from tools.gpu.context import Context, run_section
from tools.gpu.probe import probe

Facts = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 540
# seconds left under which no section is begun: less than its imports take
LEAST = 12
AFTER = 10.0  # seconds that a section may be late before its process is ended
POLL = 0.05
# what results depend on
SOURCES = ("engine", "kernels", "weights", "tools", "tests/cuda", "tests/kernels/support")
# the sections of each command in their order, and the seconds planned for them
COMMANDS: dict[int, dict[str, tuple[Callable[[Context], Facts], int]]] = {
    1: {
        "facts": (sections.facts, 20),
        "compile": (jobs.compile_forms, 70),
        "step": (sections.step, 150),
        "prefill": (sections.prefill, 75),
        "forms": (sections.forms, 100),
        "kernels": (sections.kernels, 80),
        "crossover": (sections.crossover, 35),
    },
    2: {
        "depth": (depth.depth, 210),
        "rivals": (depth.rivals, 130),
        "split": (depth.split, 80),
        "mixtures": (depth.mixtures, 30),
        "probe": (probe, 90),
    },
    3: {
        "tests": (jobs.tests, 270),
        "start": (jobs.start, 40),
        "whole": (depth.whole, 100),
        "sanitize": (jobs.sanitize, 70),
        "profiles": (jobs.profiles, 60),
    },
    4: {
        "ranks": (jobs.ranks, 400),
    },
}
SECTIONS = {name: section for command in COMMANDS.values() for name, section in command.items()}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command("python -m tools.check_gpu", __doc__)
    add_flags(p, "out fresh", out=ROOT / "benchmarks" / "results" / "check-gpu")
    p.add_argument("--command", type=int, choices=list(COMMANDS), default=1, help="default 1")
    p.add_argument("--sections", help="which, in this order, instead of a command's")
    p.add_argument("--resume", type=Path, metavar="FILE", help="take the results of this file too")
    p.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"budget of the whole call (default {SECONDS})",
    )
    p.add_argument(
        "--cpu-rehearsal",
        action="store_true",
        help="a small model on the CPU: does every path run?",
    )
    p.add_argument(
        "--in-process",
        action="store_true",
        help="run all sections in this process (quicker; a fault ends the call)",
    )
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (a section failed or a kernel is wrong), 2 (usage, no GPU), 130 (Ctrl-C)."""
    args = parser().parse_args(argv)
    return guarded(
        lambda: work_off(args) if args.worker else run(args),
        f"stopped; the same command goes on from {args.out / 'results.json'}",
    )


def run(args: argparse.Namespace) -> int:
    """Run the sections that are not done, write and print what they found."""
    names = [name for name in (args.sections or "").split(",") if name] or [*COMMANDS[args.command]]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise UsageError(
            f"--sections: found {', '.join(unknown)}, expected some of {', '.join(SECTIONS)}"
        )
    if not args.cpu_rehearsal and not _has_gpu():
        raise UsageError(
            f"this torch ({torch.__version__}) sees no CUDA device; "
            "--cpu-rehearsal runs the same paths on a CPU"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    results = _earlier(args)
    worker = InProcess(args) if args.in_process else Worker(args)
    began = time.perf_counter()
    try:
        for name in names:
            left = args.seconds - (time.perf_counter() - began)
            if _done(results.get(name)):
                say(f"{name}: done before")
                continue
            if left < LEAST:
                say(f"{name}: left for another call, {left:.0f} of {args.seconds:.0f} s left")
                continue
            say(f"{name} ...")
            share = SECTIONS[name][1] * args.seconds / SECONDS * 1.25
            found = results[name] = worker.run(name, min(share, left), results)
            found["sources"] = sources()
            write(args.out, results)
            say(f"{name}: {found.get('error', 'done')} ({found.get('seconds', '?')} s)")
    finally:
        worker.end()
    write(args.out, results)
    print(gpu_verdict.markdown(results))
    failed = [name for name in names if not _done(results.get(name))]
    verdicts = [vars(v) for v in gpu_verdict.verdicts(results)]
    print(json.dumps({"failed_sections": failed, "verdicts": verdicts}))
    return 1 if failed or gpu_verdict.wrong(results) else 0


def _has_gpu() -> bool:
    """Whether torch sees a GPU. Another process asks, so that this one never holds a CUDA context
    beside its sections.
    """
    code = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
    return not ended(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT), 60)


# ---------------------------------------------------------------- results


@functools.cache
def sources(root: Path = ROOT) -> str:
    """The hash of everything that results depend on. A machine that is lent has no git, and an
    uncommitted change counts too.
    """
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                found.update(f"\n{path.relative_to(root)}\n".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _done(found: Facts | None) -> bool:
    return bool(found) and "error" not in found and not found.get("unfinished")


def _earlier(args: argparse.Namespace) -> Facts:
    """Results of earlier calls with the same sources: of --resume's file, then of this folder."""
    results: Facts = {}
    if args.resume is not None:
        if (carried := _read(args.resume)) is None:
            raise UsageError(
                f"--resume: found no results in {args.resume}, expected a results.json"
            )
        results |= carried
    if not args.fresh:
        results |= _read(args.out / "results.json") or {}
    same = {name: f for name, f in results.items() if f.get("sources") == sources()}
    if gone := [name for name in results if name not in same]:
        say(f"of other sources, and run again: {', '.join(gone)}")
    return same


def _read(path: Path) -> Facts | None:
    """The sections of a results file; None without one."""
    try:
        kept = json.loads(path.read_text())["sections"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if isinstance(kept, dict) else None


def write(folder: Path, results: Facts) -> None:
    """results.json and results.md, each replaced in one move so that a killed run leaves whole
    files.
    """
    facts = {"format": 2, "commit": bench_header.commit(), "sources": sources()}
    replace_text(folder / "results.json", json.dumps({**facts, "sections": results}, indent=1))
    replace_text(folder / "results.md", gpu_verdict.markdown(results))


# ---------------------------------------------------------------- who runs the sections


def _context(args: argparse.Namespace) -> Context:
    return Context("cpu" if args.cpu_rehearsal else "cuda", args.cpu_rehearsal, args.seconds)


class InProcess:
    """Runs sections in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._ctx = _context(args)

    def run(self, name: str, seconds: float, results: Facts) -> Facts:
        """Facts of a section that may take `seconds`. results: those of the ones before it."""
        self._ctx.seconds, self._ctx.results = seconds, results
        return run_section(SECTIONS[name][0], self._ctx)

    def end(self) -> None:
        """Nothing is held."""


class Worker:
    """A process that keeps one model through the sections that it is told to run, and its
    successors where one dies or is late.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._process: subprocess.Popen | None = None

    def run(self, name: str, seconds: float, results: Facts) -> Facts:
        """As InProcess.run. A section that is late is ended; what it noted until then stays."""
        began = time.perf_counter()
        part = _part(self._args.out, name)
        part.unlink(missing_ok=True)
        process = self._process or self._start()
        order = {"name": name, "seconds": seconds, "forms": (results.get("compile") or {})}
        how = self._send(process, json.dumps(order))
        while not how and not (found := _whole(part)):
            if process.poll() is not None:
                how = ended(process, 0) or "its process ended"
            elif time.perf_counter() - began > seconds + AFTER:
                how = ended(process, 0)
            else:
                time.sleep(POLL)
        if not how:
            part.unlink()
            return found
        self._process = None
        noted = _json(part)
        part.unlink(missing_ok=True)
        took = round(time.perf_counter() - began, 1)
        how = how.replace("after 0 s", f"after {took:.0f} s")
        return {
            **{k: v for k, v in noted.items() if k != "unfinished"},
            "error": how,
            "seconds": took,
        }

    def _start(self) -> subprocess.Popen:
        line = [sys.executable, "-m", "tools.check_gpu", "--worker", "--out", str(self._args.out)]
        line += ["--cpu-rehearsal"] * self._args.cpu_rehearsal
        self._process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, text=True)
        return self._process

    def _send(self, process: subprocess.Popen, order: str) -> str:
        """Give an order; how the process ended where it is gone."""
        assert process.stdin is not None
        try:
            print(order, file=process.stdin, flush=True)
        except OSError:
            return ended(process, 1) or "its process ended"
        return ""

    def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            ended(process, 20)


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part.json"


def _json(path: Path) -> Facts:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _whole(path: Path) -> Facts:
    """Facts of a section that has ended; {} before that."""
    found = _json(path)
    return {} if found.get("unfinished") else found


def work_off(args: argparse.Namespace) -> int:
    """The worker: run the sections that come in, a line of JSON each, over one context."""
    ctx = _context(args)
    for line in sys.stdin:
        order = json.loads(line)
        name = order["name"]
        ctx.seconds, ctx.results = order["seconds"], {"compile": order["forms"]}
        ctx.note = lambda facts, name=name: note(args.out, name, facts)  # type: ignore[misc]
        note(args.out, name, run_section(SECTIONS[name][0], ctx))
    return 0


def note(folder: Path, name: str, facts: Facts) -> None:
    """Write what a section knows so far."""
    replace_text(_part(folder, name), json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main())
