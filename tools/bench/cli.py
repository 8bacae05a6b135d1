"""Time per token by context, every method side by side, with the bytes that each step
had to read, and other engines beside them.

Examples:
  python -m tools.bench                                            this machine, in a few minutes
  python -m tools.bench --shape llama-3-8b --contexts 128K,256K    random weights, no download
  python -m tools.bench --model ./my-model --peers none -o json    a folder or an alias
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import UsageError
from tools.bench import header as bench_header
from tools.bench.allowed import SHALLOW
from tools.bench.methods import specs
from tools.bench.options import Options, Result
from tools.bench.peers import PEERS
from tools.bench.report import render, summary
from tools.bench.shapes import SHAPES, parse_size, shape_filters, short_size
from tools.bench.suite import Suite
from tools.common.arguments import add_flags, command
from tools.common.program import guarded, replace_text, say
from weights.resolve import resolve

# default budget of a run without a GPU; `make bench` promises 6 minutes with its start-up
CPU_SECONDS = 300


def sizes(text: str) -> tuple[int, ...]:
    """ "4K,8K" -> (4096, 8192), ascending and without repeats; "none" -> ()."""
    if text == "none":
        return ()
    try:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Parser of comma-separated numbers."""

    def parse(text: str) -> tuple:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"found {text!r}, expected numbers separated by commas"
            ) from error

    return parse


def words(text: str) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b"); "none" -> ()."""
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command("python -m tools.bench", __doc__)
    _model_flags(p)
    _method_flags(p)
    _run_flags(p)
    return p


def _model_flags(p: argparse.ArgumentParser) -> None:
    what = p.add_mutually_exclusive_group()
    what.add_argument(
        "--shape",
        choices=SHAPES,
        help="random weights of this shape (default: 160m on a CPU, llama-3-8b on a GPU)",
    )
    what.add_argument(
        "--model", help="a folder in Hugging Face layout or an alias, instead of a shape"
    )
    add_flags(p, "device dtype")
    p.add_argument("-t", "--threads", type=int, help="CPU threads, ours and the peers'")
    p.add_argument(
        "-d",
        "--contexts",
        type=sizes,
        help="depths, e.g. 4K,32K,128K (default: doubling from 4K as far as time allows)",
    )
    p.add_argument(
        "-p",
        "--prefill",
        type=sizes,
        help="whole prompts that are read, e.g. 512,8K (none: only 512 tokens per depth)",
    )


def _method_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--methods",
        nargs="+",
        type=words,
        metavar="NAME",
        help="full, omnikv, omnikv-host, brutal or another method, with commas or spaces between "
        "(default: full,omnikv; GPU: all)",
    )
    p.add_argument(
        "--peers",
        type=words,
        help=f"{','.join(PEERS)} or none (default: all; one that is missing says so)",
    )
    p.add_argument(
        "--filter-layers",
        type=numbers(int),
        help="OmniKV's filter layers (default: the shape's, or the model's own)",
    )
    p.add_argument("--tokens", type=int, default=2048, help="OmniKV's budget k (default 2048)")
    p.add_argument(
        "--wait-layers",
        type=numbers(int),
        default=(1, 0),
        help="OmniKV's wait layers, a row of the table each (default 1,0)",
    )
    p.add_argument(
        "--dense-below",
        default="0",
        help="OmniKV's crossover: 0 (default: sparse at every depth), auto or tokens",
    )
    p.add_argument(
        "--reuse",
        type=numbers(float),
        default=(0.0, 0.7, 0.9),
        help="planted shares of tokens that stay chosen from step to step, for methods in host "
        "memory (default 0,0.7,0.9)",
    )


def _run_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "-r",
        "--rounds",
        type=int,
        default=3,
        help="turns of every method at every depth (default 3)",
    )
    p.add_argument("-n", "--steps", type=int, default=5, help="timed steps in a turn (default 5)")
    p.add_argument(
        "--seconds",
        type=float,
        help=f"budget of the run; the report names what is left out (default {CPU_SECONDS} on a "
        "CPU)",
    )
    p.add_argument(
        "--cpu-time",
        action="store_true",
        help="time decode steps by this process's CPU time: on a CPU that other programs use, with "
        "one thread",
    )
    p.add_argument(
        "--no-append",
        action="store_true",
        help="leave out the tokens that are read onto every depth, which take longer than the "
        "steps on a CPU",
    )
    p.add_argument(
        "--allowed",
        action="store_true",
        help=f"also time full attention at {SHALLOW} tokens, a step's fixed part, and at parts of "
        "every depth, and print what each method's bytes of K and V allow: beside omnikv's (needs "
        "omnikv among --methods), and as our full attention reads as many",
    )
    p.add_argument("--no-split", action="store_true", help="leave out the split of a step")
    p.add_argument(
        "--no-gather",
        action="store_true",
        help="leave out the comparison of copies from host memory",
    )
    p.add_argument(
        "--no-verify",
        action="store_true",
        help="time without comparing with the reference path first",
    )
    p.add_argument(
        "-o",
        "--output",
        choices=("md", "csv", "json", "jsonl"),
        default="md",
        help="form on stdout; its last line is JSON",
    )
    p.add_argument("--save", type=Path, metavar="FILE", help="also write the JSON to a file")
    p.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="write latency, speed-up and memory plots (needs matplotlib)",
    )


def options(args: argparse.Namespace) -> Options:
    """Options of a parsed command line, with the defaults that fit this machine."""
    gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    shape = None if args.model else args.shape or ("llama-3-8b" if gpu else "160m")
    deepest = 1048576 if gpu else 32768
    contexts = (
        args.contexts
        if args.contexts is not None
        else tuple(4096 * 2**i for i in range(9) if 4096 * 2**i <= deepest)
    )
    prefill = (
        args.prefill if args.prefill is not None else ((4096, 32768, 131072) if gpu else (2048,))
    )
    methods = tuple(itertools.chain(*args.methods or ())) or (
        ("full", "omnikv", "omnikv-host", "brutal") if gpu else ("full", "omnikv")
    )
    filters = args.filter_layers or (shape_filters(shape) if shape else None)
    below = "auto" if args.dense_below == "auto" else int(args.dense_below)
    return Options(
        shape=shape,
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        contexts=contexts,
        specs=tuple(
            specs(
                methods,
                filters,
                args.tokens,
                args.wait_layers,
                args.reuse,
                below,
                folder=resolve(args.model).folder if args.model else None,
            )
        ),
        peers=PEERS if args.peers is None else args.peers,
        prefill=prefill,
        rounds=max(1, args.rounds),
        steps=max(1, args.steps),
        seconds=args.seconds if args.seconds is not None else (None if gpu else CPU_SECONDS),
        split=not args.no_split,
        verify=not args.no_verify,
        append=not args.no_append,
        gather=not args.no_gather,
        cpu_time=args.cpu_time,
        allowed=args.allowed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the run or a method failed, or a timed path was wrong), 2 (usage), 130."""
    args = parser().parse_args(argv)
    flags = argv if argv is not None else sys.argv[1:]
    return guarded(lambda: run(args, flags))


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure and print; 1 where a timed path was wrong or a method ended in a fault."""
    try:
        chosen = options(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    depths = ", ".join(short_size(n) for n in chosen.contexts)
    say(
        f"{chosen.model or chosen.shape} at {depths or 'no depth'}; "
        f"peers: {', '.join(chosen.peers) or 'none'}"
    )
    clocks = bench_header.clocks()
    suite = Suite(chosen, say=lambda line: say(f"  {line}"))
    result = suite.run()
    head = bench_header.header(suite.device, flags, result.rates)
    found = bench_header.warnings(
        suite.device, result.cells, result.rates, result.rates_after, clocks, bench_header.clocks()
    )
    _files(args, result, head, found)
    print(render(args.output, result, head, found))
    return 1 if result.failed_checks or result.crashed else 0


def _files(
    args: argparse.Namespace, result: Result, head: dict[str, Any], found: list[str]
) -> None:
    whole = summary(result, head, found)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        replace_text(args.save, json.dumps(whole, indent=1) + "\n")
    if args.plot:
        try:
            from tools.bench.plot import plots

            say("plots: " + ", ".join(map(str, plots(whole, args.plot))))
        except ImportError:
            say("no plots: matplotlib is not installed (pip install matplotlib)")
