"""`make check-gpu`: one call that says in at most nine minutes what this GPU does with the engine,
and what to attack next.

Needs no network and no checkpoint. Every section runs in a process of its own, so that a fault in
one leaves the others standing; results.json and results.md are rewritten after each piece of news,
and a later call goes on with the sections that are not done. --cpu-rehearsal runs the same sections
on a CPU in a small form, so that nothing fails on the GPU for a typo.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from tools.bench import header as bench_header
from tools.gpu import verdict as gpu_verdict
from tools.gpu.sections import SECTIONS, Context, run_section

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 540
# seconds left under which no section is begun: less than its imports and its model take
LEAST = 12


def parser():
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
        "--cpu-rehearsal", action="store_true", help="small shapes on the CPU: does every path run?"
    )
    p.add_argument(
        "--in-process",
        action="store_true",
        help="no process per section (quicker; a fault ends the call)",
    )
    p.add_argument("--section", help=argparse.SUPPRESS)
    return p


def main(argv=None):
    """Exit code 0, 1 (a section failed, or a verdict about correctness), 2 (usage, no GPU)."""
    args = parser().parse_args(argv)
    names = [name for name in args.sections.split(",") if name]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or (args.section and args.section not in SECTIONS):
        print(
            f"error: sections: found {', '.join(unknown) or args.section}, expected "
            f"{', '.join(SECTIONS)}",
            file=sys.stderr,
        )
        return 2
    if args.section:
        return _one(args)
    if not args.cpu_rehearsal and not _has_gpu():
        print(
            f"error: this torch ({torch.__version__}) sees no CUDA device; --cpu-rehearsal runs "
            "the same paths on a CPU",
            file=sys.stderr,
        )
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = {} if args.fresh else _earlier(args.out)
    began = time.perf_counter()
    for name in names:
        left = args.seconds - (time.perf_counter() - began)
        if _done(results.get(name)):
            print(f"{name}: done before", file=sys.stderr)
            continue
        if left < LEAST:
            print(
                f"{name}: left for another call, {left:.0f} s of {args.seconds:.0f} s left",
                file=sys.stderr,
            )
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = _section(
            args, name, min(SECTIONS[name][1] * args.seconds / SECONDS * 1.25, left)
        )
        write(args.out, results, bench_header.commit())
        print(
            f"{name}: {results[name].get('error', 'done')} ({results[name].get('seconds', '?')} s)",
            file=sys.stderr,
            flush=True,
        )
    write(args.out, results, bench_header.commit())
    print(gpu_verdict.markdown(results))
    failed = [name for name in names if not _done(results.get(name))]
    wrong = [v for v in gpu_verdict._correct(results) if v.status == "FAIL"]
    print(
        json.dumps(
            {
                "failed_sections": failed,
                "verdicts": [vars(v) for v in gpu_verdict.verdicts(results)],
            }
        )
    )
    return 1 if failed or wrong else 0


def _has_gpu():
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


def _done(found):
    return bool(found) and "error" not in found and not found.get("unfinished")


def _earlier(folder):
    """Results of an earlier call of the same commit, or {}."""
    try:
        kept = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError):
        return {}
    return kept["sections"] if kept.get("commit") == bench_header.commit() else {}


def write(folder, results, commit):
    """results.json and results.md, each replaced in one move so that a killed run leaves whole
    files.
    """
    for name, text in (
        (
            "results.json",
            json.dumps({"format": 1, "commit": commit, "sections": results}, indent=1),
        ),
        ("results.md", gpu_verdict.markdown(results)),
    ):
        fresh = folder / (name + ".new")
        fresh.write_text(text)
        fresh.replace(folder / name)


def _context(args, seconds, note):
    return Context("cpu" if args.cpu_rehearsal else "cuda", args.cpu_rehearsal, seconds, note)


def _section(args, name, seconds):
    """Facts of one section, run in this process or in one of its own that may not outlive `seconds`
    by much.
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


def _one(args):
    """A section in this process, its facts written to a part file as they come."""
    part = args.out / f"{args.section}.part.json"

    def note(facts):
        part.write_text(json.dumps(facts))

    note(run_section(args.section, _context(args, args.seconds, note)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
