"""Prefill on this machine: `python -m tools.prefill_table` (speed against the operation count, time
left against the truth, memory).

Speed: the first chunk and the last of every length are timed over a synthetic bank, the methods
taking turns, and integrated (a chunk's time is affine in its depth once every method is sparse).
Beside every ratio of times stands the ratio that the operation count allows
(engine.prefill_eta.PrefillFlops: linear layers, attention, scoring), summed over all chunks. ETA: a
whole prompt is read.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from engine import LLM, Full, OmniKV
from engine.errors import EngineError
from engine.model.llama import random_stream
from engine.prefill import run_chunk
from engine.prefill_eta import PrefillFlops
from tools.bench.header import commit, hardware, version
from tools.bench.shapes import SHAPES, parse_size, shape_config, shape_filters, short_size
from tools.synthetic_bank import synthesize

MARKS = (0.10, 0.25, 0.50)  # of the work, where the predicted time is compared
FAR = 2**40  # a prompt's length whose dense end no timed chunk reaches


def arguments(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.prefill_table", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--shape", default="160m", choices=SHAPES)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=parse_size,
        default=[4096, 8192, 16384, 32768, 65536],
        help="such as 4K 32K",
    )
    parser.add_argument(
        "--ratios", nargs="+", type=int, default=[1, 2, 4, 8], help="r of OmniKV-prefill"
    )
    parser.add_argument("--block", type=int, default=OmniKV.prefill_block)
    parser.add_argument(
        "--stride",
        nargs="+",
        type=int,
        default=[OmniKV.prefill_stride],
        help="every n-th query of a block scores",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--chunk", type=int, help="tokens per chunk (default: the plan's)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="timings of each chunk; the least counts"
    )
    parser.add_argument(
        "--eta",
        type=parse_size,
        default=8192,
        help="length of the prompt whose time left is checked",
    )
    parser.add_argument(
        "--parts", nargs="+", default=["speed", "eta", "memory"], choices=("speed", "eta", "memory")
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out") / "prefill")
    parser.add_argument("--measure-memory", type=parse_size, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def make_llm(args, context):
    """Random weights of the shape."""
    return LLM.from_stream(
        shape_config(args.shape),
        partial(random_stream, seed=0),
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        chunk=args.chunk,
        max_context=context,
        method=Full(),
    )


def methods(args):
    """{name: method}, dense first."""
    found = {"dense": Full()}
    for stride in args.stride:
        for ratio in args.ratios:
            found[f"r={ratio}" + (f", 1/{stride} scoring" if stride > 1 else "")] = OmniKV(
                filter_layers=shape_filters(args.shape),
                tokens=2048,
                dense_below=0,
                prefill_ratio=ratio,
                prefill_block=args.block,
                prefill_stride=stride,
            )
    return found


# ------------------------------------------------------------------ speed


def timed_chunk(session, first, count):
    """Seconds of one chunk of `count` random tokens at position `first` of a session whose rows are
    there.

    On a CPU with one thread these are the thread's own seconds: what other programs took is left
    out.
    """
    llm, runtime = session.llm, session.runtime
    runtime.begin_prompt(first, FAR)
    tokens = torch.randint(llm.config.vocab_size, (1, count), device=llm.model.device)
    _wait(llm)
    clock = (
        time.thread_time
        if llm.device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter
    )
    began = clock()
    with torch.inference_mode():
        run_chunk(llm.model, llm.rotary, runtime, session.bank, tokens, first, FAR)
    _wait(llm)
    return clock() - began


def _wait(llm):
    if llm.device.type == "cuda":
        torch.cuda.synchronize()


def speed(args):
    """One record per (length, method): seconds and operations of the whole prompt, and both ratios
    to dense.
    """
    longest, found = max(args.lengths), methods(args)
    llm = make_llm(args, longest + 1)
    chunk = llm.chunk
    depths = sorted({0, *(_whole(length - chunk, chunk) for length in args.lengths)})
    seconds, work = {}, {}
    with llm.session(Full()) as dense, llm.session(found[list(found)[-1]]) as sparse:
        for session in (dense, sparse):
            synthesize(session, longest)
        for depth in depths:
            for _ in range(args.repeats + (depth == 0)):  # the very first one warms up
                for name, method in found.items():
                    session = dense if isinstance(method, Full) else sparse
                    if session is sparse:
                        session.set_method(method)
                    seconds.setdefault((name, depth), []).append(timed_chunk(session, depth, chunk))
                    if name not in work:
                        count = partial(session.runtime.prompt_flops, PrefillFlops.of(llm.config))
                        work[name] = [
                            count(first, first + chunk) for first in range(0, longest, chunk)
                        ]
            print(
                f"\rtimed at {short_size(depth)} of {short_size(longest)}   ",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    least = {key: min(values) for key, values in seconds.items()}
    records = []
    for length in args.lengths:
        at = [depth for depth in depths if depth <= length - chunk]
        for name in found:
            total = integrate([(depth, least[name, depth]) for depth in at], length, chunk)
            linear, attention = (
                sum(parts[i] for parts in work[name][: length // chunk]) for i in (0, 1)
            )
            records.append(
                {
                    "length": length,
                    "method": name,
                    "seconds": total,
                    "linear": linear,
                    "attention": attention,
                    "chunks": {str(depth): seconds[name, depth] for depth in at},
                }
            )
    dense = {r["length"]: r for r in records if r["method"] == "dense"}
    for r in records:
        base = dense[r["length"]]
        r["measured"] = base["seconds"] / r["seconds"]
        r["allowed"] = (base["linear"] + base["attention"]) / (r["linear"] + r["attention"])
        r["rate"] = (r["linear"] + r["attention"]) / r["seconds"]
    return {"chunk": chunk, "records": records}


def _whole(position, chunk):
    return int(position) // chunk * chunk


def integrate(points, length, chunk):
    """Sum of a quantity over the chunks of a prompt, from its values at some depths [(depth,
    value)], ascending: linear between them.
    """
    total = 0.0
    for first in range(0, length, chunk):
        at = min(first, points[-1][0])
        low = max((p for p in points if p[0] <= at), key=lambda p: p[0])
        high = min((p for p in points if p[0] >= at), key=lambda p: p[0])
        share = 0.0 if high[0] == low[0] else (at - low[0]) / (high[0] - low[0])
        total += (low[1] + share * (high[1] - low[1])) * min(1.0, (length - first) / chunk)
    return total


# ------------------------------------------------------------------ time left


def time_left(args):
    """Predicted against actual seconds of a whole prompt at the marks, dense and r = 2 (or the
    first ratio given).
    """
    ratio = 2 if 2 in args.ratios else args.ratios[0]
    found = methods(
        argparse.Namespace(**{**vars(args), "ratios": [ratio], "stride": args.stride[-1:]})
    )
    llm, records = make_llm(args, args.eta), []
    ids = torch.randint(
        llm.config.vocab_size, (args.eta,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    for name, method in found.items():
        seen = []
        with llm.session(method) as session:
            began = time.perf_counter()
            session.prefill(ids, progress=seen.append)
            actual = time.perf_counter() - began
        for mark in MARKS:
            progress = next(p for p in seen if p.work >= mark)
            predicted = progress.seconds + progress.eta
            records.append(
                {
                    "method": name,
                    "length": args.eta,
                    "work": progress.work,
                    "tokens": progress.done / progress.total,
                    "predicted": predicted,
                    "actual": actual,
                    "error": predicted / actual - 1,
                }
            )
    return records


# ------------------------------------------------------------------ memory


def memory(args):
    """Peak memory at several lengths, each in a process of its own: what is left after weights and
    bank is a chunk's activations.
    """
    records = []
    for length in (8192, 32768, 65536):
        command = [
            sys.executable,
            "-m",
            "tools.prefill_table",
            "--measure-memory",
            str(length),
            "--shape",
            args.shape,
            "--dtype",
            args.dtype,
            "--device",
            args.device,
            "--block",
            str(args.block),
            "--stride",
            str(args.stride[-1]),
        ]
        for name, value in (("--threads", args.threads), ("--chunk", args.chunk)):
            command += [name, str(value)] if value else []
        done = subprocess.run(
            command, cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        records += json.loads(done.stdout.splitlines()[-1])
    return records


def measure_memory(args):
    """The deepest chunk of a prompt over a synthetic bank, dense then r = 2; in bytes. Prints a
    JSON list.
    """
    length = args.measure_memory
    llm, records = make_llm(args, length), []
    for name, method in methods(argparse.Namespace(**{**vars(args), "ratios": [2]})).items():
        with llm.session(method) as session:
            before = _resident(llm)
            synthesize(session, length)
            bank = session.bank.nbytes
            for _ in range(2):
                timed_chunk(session, _whole(length - llm.chunk, llm.chunk), llm.chunk)
            records.append(
                {
                    "method": name,
                    "length": length,
                    "bank": bank,
                    "selection": session.stats.selection_bytes,
                    "before": before,
                    "peak": _peak(llm),
                    "activations": _peak(llm) - before - bank,
                }
            )
        _reset(llm)
    print(json.dumps(records))


def _status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} here")


def _resident(llm):
    _reset(llm)
    return torch.cuda.memory_allocated() if llm.device.type == "cuda" else _status("VmRSS")


def _peak(llm):
    return torch.cuda.max_memory_allocated() if llm.device.type == "cuda" else _status("VmHWM")


def _reset(llm):
    if llm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        # Linux: the peak starts again from what is resident now
        Path("/proc/self/clear_refs").write_text("5")


# ------------------------------------------------------------------ report


def markdown(report):
    """The report as a page."""
    about = report["about"]
    lines = ["# Prefill", "", *(f"- {key}: {value}" for key, value in about.items())]
    for part, table in (("speed", _speed_table), ("eta", _eta_table), ("memory", _memory_table)):
        lines += table(report[part]) if part in report else []
    return "\n".join(lines) + "\n"


def _speed_table(found):
    lines = [
        "",
        "## Time and operations",
        "",
        f"Chunks of {found['chunk']} tokens, integrated over the prompt. "
        "allowed: the operation count's ratio to dense; share: measured / allowed.",
        "",
        "| tokens | method | seconds | tokens/s | PFLOP | GFLOP/s | measured x | allowed x | "
        "share |",
        "|---" * 9 + "|",
    ]
    for r in found["records"]:
        cells = (
            short_size(r["length"]),
            r["method"],
            f"{r['seconds']:.1f}",
            f"{r['length'] / r['seconds']:.0f}",
            f"{(r['linear'] + r['attention']) / 1e15:.4f}",
            f"{r['rate'] / 1e9:.0f}",
            f"{r['measured']:.2f}",
            f"{r['allowed']:.2f}",
            f"{100 * r['measured'] / r['allowed']:.0f}%",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _eta_table(records):
    lines = [
        "",
        "## Time left",
        "",
        "| method | tokens | work done | tokens done | predicted s | actual s | error |",
        "|---" * 7 + "|",
    ]
    for r in records:
        cells = (
            r["method"],
            short_size(r["length"]),
            f"{100 * r['work']:.0f}%",
            f"{100 * r['tokens']:.0f}%",
            f"{r['predicted']:.1f}",
            f"{r['actual']:.1f}",
            f"{100 * r['error']:+.1f}%",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _memory_table(records):
    lines = [
        "",
        "## Memory",
        "",
        "Deepest chunk over a synthetic bank; activations = peak - resident before the bank - "
        "bank.",
        "",
        "| method | tokens | bank MB | selection MB | peak MB | activations MB |",
        "|---" * 6 + "|",
    ]
    for r in records:
        sizes = [f"{r[key] / 1e6:.1f}" for key in ("bank", "selection", "peak", "activations")]
        lines.append("| " + " | ".join([r["method"], short_size(r["length"]), *sizes]) + " |")
    return lines


def main(argv=None):
    """Measure, write report.json and report.md, print the page; returns the exit code."""
    args = arguments(argv)
    warnings.simplefilter("ignore", UserWarning)
    if args.measure_memory:
        measure_memory(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        device = torch.device("cpu" if args.device == "auto" else args.device)
        report = {
            "about": {
                "hardware": hardware(device),
                "commit": commit(),
                "torch": version("torch"),
                "shape": args.shape,
                "dtype": args.dtype,
                "threads": args.threads or torch.get_num_threads(),
                "block": args.block,
                "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
                "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            }
        }
        for name, measure in (("speed", speed), ("eta", time_left), ("memory", memory)):
            if name in args.parts:
                report[name] = measure(args)
                (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    page = markdown(report)
    (args.out / "report.md").write_text(page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
