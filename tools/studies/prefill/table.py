"""Time, predicted time left and memory of sparse prefill on this
machine.

Speed: the first chunk and the last of every length are timed over a synthetic bank, the methods
taking turns, and integrated (a chunk's time is affine in its depth once every method is sparse).
Beside every ratio of times stands the ratio that the operation count allows
(engine.plan.prefill_time.PrefillFlops: linear layers, attention, scoring), summed over all chunks.
Time left: a whole prompt is read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import OmniKV
from tools.bench.header import commit, hardware, version
from tools.bench.shapes import SHAPES, parse_size
from tools.common.arguments import add_flags, command
from tools.common.program import entry, replace_json
from tools.studies.prefill.memory import measure_memory, memory
from tools.studies.prefill.report import markdown
from tools.studies.prefill.speed import speed
from tools.studies.prefill.time_left import time_left


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.prefill.table",
        "Time, predicted time left and memory of sparse prefill.",
    )
    parser.add_argument("--shape", default="160m", choices=SHAPES, help="of random weights")
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
    parser.add_argument(
        "--block", type=int, default=OmniKV.prefill_block, help="queries per selection"
    )
    parser.add_argument(
        "--stride",
        nargs="+",
        type=int,
        default=[OmniKV.prefill_stride],
        help="every n-th query of a block scores",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    add_flags(parser, "device threads out", out=Path("bench-out") / "prefill")
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
    parser.add_argument("--measure-memory", type=parse_size, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Measure, write report.json and report.md, print the page."""
    if args.measure_memory:
        measure_memory(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if args.device == "auto" else args.device)
    about = {
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
    report: dict[str, Any] = {"about": about}
    for name, measure in (("speed", speed), ("eta", time_left), ("memory", memory)):
        if name in args.parts:
            report[name] = measure(args)
            replace_json(args.out / "report.json", report)
    page = markdown(report)
    (args.out / "report.md").write_text(page)
    print(page)


main = entry(arguments, run, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
