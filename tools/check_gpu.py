"""One call that says in at most nine minutes what this GPU does with the engine,
and what to attack next.

Needs no network and no checkpoint. Every section runs in a new process, so that a fault in one
leaves the others standing; results.json and results.md are rewritten after each piece of news, and
a later call goes on with the sections that are not done. --cpu-rehearsal runs the same sections on
a CPU with a small model, at the GPU's budget and dtype and up to 32,768 tokens, so that what would
fail on the GPU fails there.
"""

from __future__ import annotations

import argparse
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
from tools.common.program import guarded, replace_text, say
from tools.gpu import verdict as gpu_verdict
from tools.gpu.context import Context
from tools.gpu.sections import SECTIONS, run_section

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 540
# seconds left under which no section is begun: less than its imports and its model take
LEAST = 12


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m tools.check_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--out",
        type=Path,
        default=ROOT / "benchmarks" / "results" / "check-gpu",
        help="folder of results.json and results.md",
    )
    p.add_argument(
        "--sections",
        default=",".join(SECTIONS),
        help=f"which, in this order (default {','.join(SECTIONS)})",
    )
    p.add_argument(
        "--fresh",
        action="store_true",
        help="forget earlier results instead of going on with what is not done",
    )
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
    p.add_argument("--section", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (a section failed or a kernel is wrong), 2 (usage, no GPU), 130 (Ctrl-C)."""
    args = parser().parse_args(argv)
    return guarded(
        lambda: _one(args) if args.section else run(args),
        f"stopped; the same command goes on from {args.out / 'results.json'}",
    )


def run(args: argparse.Namespace) -> int:
    """Run the sections that are not done, write and print what they found."""
    names = [name for name in args.sections.split(",") if name]
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
    results = {} if args.fresh else _earlier(args.out)
    began = time.perf_counter()
    for name in names:
        left = args.seconds - (time.perf_counter() - began)
        if _done(results.get(name)):
            say(f"{name}: done before")
            continue
        if left < LEAST:
            say(f"{name}: left for another call, {left:.0f} s of {args.seconds:.0f} s left")
            continue
        say(f"{name} ...")
        share = SECTIONS[name][1] * args.seconds / SECONDS * 1.25
        results[name] = _section(args, name, min(share, left))
        write(args.out, results, bench_header.commit())
        found = results[name]
        say(f"{name}: {found.get('error', 'done')} ({found.get('seconds', '?')} s)")
    write(args.out, results, bench_header.commit())
    print(gpu_verdict.markdown(results))
    failed = [name for name in names if not _done(results.get(name))]
    verdicts = [vars(v) for v in gpu_verdict.verdicts(results)]
    print(json.dumps({"failed_sections": failed, "verdicts": verdicts}))
    return 1 if failed or gpu_verdict.wrong(results) else 0


def _has_gpu() -> bool:
    """Whether torch sees a GPU. Another process asks, so that this one never holds a CUDA context
    beside its sections.
    """
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)",
        ],
        cwd=ROOT,
    )
    return found.returncode == 0


def _done(found: dict[str, Any] | None) -> bool:
    return (
        found is not None and bool(found) and "error" not in found and not found.get("unfinished")
    )


def _earlier(folder: Path) -> dict[str, Any]:
    """Results of an earlier call of the same commit, or {}."""
    try:
        kept = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError):
        return {}
    return kept["sections"] if kept.get("commit") == bench_header.commit() else {}


def write(folder: Path, results: dict[str, Any], commit: str) -> None:
    """results.json and results.md, each replaced in one move so that a killed run leaves whole
    files.
    """
    facts = {"format": 1, "commit": commit, "sections": results}
    replace_text(folder / "results.json", json.dumps(facts, indent=1))
    replace_text(folder / "results.md", gpu_verdict.markdown(results))


def _context(args: argparse.Namespace, seconds: float, note: Callable) -> Context:
    return Context("cpu" if args.cpu_rehearsal else "cuda", args.cpu_rehearsal, seconds, note)


def _section(args: argparse.Namespace, name: str, seconds: float) -> dict[str, Any]:
    """Facts of one section, run in this process or in a new one that is stopped 10 s after
    `seconds`.
    """
    part = args.out / f"{name}.part.json"
    part.unlink(missing_ok=True)
    if args.in_process:
        return run_section(name, _context(args, seconds, lambda facts: None))
    command = [
        sys.executable,
        "-m",
        "tools.check_gpu",
        "--section",
        name,
        "--out",
        str(args.out),
        "--seconds",
        str(seconds),
    ]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command + ["--cpu-rehearsal"] * args.cpu_rehearsal, cwd=ROOT, timeout=seconds + 10
        )
        ended = f"its process ended with status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        ended = f"stopped after {seconds + 10:.0f} s"
    try:
        found = json.loads(part.read_text())
        part.unlink()
    except (OSError, ValueError):
        found = {}
    if ended:
        found["error"] = ended
    return {"seconds": round(time.perf_counter() - began, 1), **found}


def _one(args: argparse.Namespace) -> int:
    """Run one section in this process, its facts written to a part file as they come."""
    if args.section not in SECTIONS:
        raise UsageError(f"--section: found {args.section}, expected one of {', '.join(SECTIONS)}")
    part = args.out / f"{args.section}.part.json"

    def note(facts: dict[str, Any]) -> None:
        part.write_text(json.dumps(facts))

    note(run_section(args.section, _context(args, args.seconds, note)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
