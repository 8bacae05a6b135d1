"""What a process holds under a method that forgets, beside what its plan says.

Each method reads a prompt of random tokens over random weights and answers a little, in a process
of its own. `planned` is the plan's total, weights included; `peak` the rise of the process's
largest resident memory over what it held before there was a model; `after` the rise that is left
when the prompt's rows are gone; `heap` the most that lay free in glibc's heap when a chunk had been
read, which is in `peak` and in no tensor. `bank` is what the plan counts with a bank beside the
store. Linux alone: resident memory is read from /proc. What is in `--store` is not measured again,
so a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from engine.bank.pool.heap import free_in_heap
from engine.base.errors import SettingError
from engine.methods.base import Method
from engine.methods.evict.shared.settings import Evicting
from engine.methods.registry import make, methods
from engine.methods.window_recompute import WindowRecompute
from engine.model.config.config import ModelConfig
from engine.model.tensors import random_stream
from engine.plan.needs import STORES
from tools.bench.header import commit, hardware, load
from tools.bench.shapes import shape_config
from tools.common.arguments import command
from tools.common.program import guarded, say
from tools.common.resident import forget_peak, resident

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 8  # tokens: those of a method that cuts with the first step, and some more
BOUND = 0.05  # of the plan, by which a peak may differ


def evicting() -> list[str]:
    """The names of the methods that forget."""
    kinds = Evicting, WindowRecompute
    return [name for name, kind in methods().items() if issubclass(kind, kinds)]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command("python -m tools.studies.forgetting", __doc__)
    add = parser.add_argument
    add("--methods", nargs="+", default=evicting(), metavar="NAME", help="default: all that forget")
    add("--shape", default="160m", help="random weights of this shape (default 160m)")
    add("--tokens", type=int, default=32768, help="of the context (default 32768)")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=1)
    add("--store", type=Path, metavar="FILE", help="one JSON line a method; read, then added to")
    add("--known", action="store_true", help="the table of what is in --store; measure nothing")
    add("--one", help=argparse.SUPPRESS)  # the method of this process
    args = parser.parse_args(argv)
    unknown = [name for name in args.methods if name not in evicting()]
    if unknown:
        raise SettingError(
            f"--methods: found {unknown[0]}, expected some of {', '.join(evicting())}"
        )
    return args


def method_of(name: str, shape: str, forget: bool = True) -> Method:
    """A method, with gates or scores for a model of this shape where it needs some: every second
    head's. forget: whether it does, where it has the choice.
    """
    config = shape_config(shape)
    table = (tuple(float(i % 2) for i in range(config.num_kv_heads)),) * config.num_layers
    by_head = {"duo": {"gates": table}, "razor": {"heads": (table, table), "induction": 0.5}}
    choice = {"forget": forget} if issubclass(methods()[name], Evicting) else {}
    return make(name, choice | by_head.get(name, {}))


def opened(args: argparse.Namespace, shape: str, tokens: int) -> LLM:
    """Random weights of a shape under the method of this process."""
    return LLM.from_stream(
        shape_config(shape),
        partial(random_stream, seed=0),
        method=method_of(args.one, shape, forget=True),
        device="cpu",
        dtype=args.dtype,
        threads=args.threads,
        max_context=tokens,
    )


def ends(
    method: Method, config: ModelConfig, tokens: int, chunk: int, itemsize: int = 2
) -> tuple[int, int, int]:
    """Ends of three prompts with which the peak is what is planned, where the stores of two of them
    are kept. The first two end a chunk before the third, and before that, where these stores are
    what is large; early, at their budget, where the rows are that wait for the third one's cut.
    """
    waits = method.waiting(tokens) if isinstance(method, Evicting) else 0
    # a segment that has begun, in the last of them too
    last = chunk if waits >= tokens else max(chunk, waits)
    late = max(1, tokens - last - chunk), max(2, tokens - last), tokens
    if waits < tokens:
        return late  # cut as it is read, or a text alone
    assert isinstance(method, Evicting)
    rows = tokens * len(config.keeping_layers) * config.kv_bytes(itemsize)
    point = method.point_bytes(method.plan(config), config, itemsize, tokens)
    if (STORES + 1) * point > rows:
        return late
    # the rows that wait are fewer by this
    first = min(method.tokens or 0, tokens // 2) + 1
    return first, first + 1, tokens


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One method, in this process: three prompts that fill the context but for the answer. The
    stores of the first two are kept to go back to as the third is read.
    """
    with opened(args, "tiny", 256).session() as small:  # loads the kernels and torch's libraries
        small.prefill(list(range(200)))
        small.decode(1)
    before = resident("VmRSS")
    forget_peak()
    llm = opened(args, args.shape, args.tokens)
    plan, beside = llm.plan(), llm.plan(method=method_of(args.one, args.shape, forget=False))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(llm.config.vocab_size, (args.tokens,), generator=generator).tolist()
    with llm.session() as session:
        size = getattr(torch, args.dtype).itemsize
        stops = ends(session.method, llm.config, args.tokens - ANSWER, plan.chunk, size)
        free: list[int] = []
        for first, stop in zip((0, *stops), stops):
            session.prefill(ids[first:stop], progress=lambda _: free.append(free_in_heap()))
        for token in ids[-ANSWER:]:
            session.decode(token)
        peak, after = resident("VmHWM") - before, resident("VmRSS") - before
        held = session.stats.store_bytes
    return {
        "method": args.one,
        "planned": plan.total,
        "peak": peak,
        "after": after,
        "heap": max(free),
        "store": held,
        "bank": beside.total,
    }


def row(found: dict[str, Any]) -> str:
    """A method's line of the table, in MB."""
    mb = {key: f"{value / 1e6:.1f}" for key, value in found.items() if key != "method"}
    ratio = found["peak"] / found["planned"]
    return (
        f"| `{found['method']}` | {mb['bank']} | {mb['planned']} | {mb['peak']} | {ratio:.2f} "
        f"| {mb['heap']} | {mb['after']} | {mb['store']} |"
    )


def stored(path: Path | None) -> dict[str, dict[str, Any]]:
    """What was measured before, by method."""
    if path is None or not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["method"]: each for each in found}


def alone(args: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """Measure a method in a process of its own, and store it; None where that one fails."""
    say(f"{name}: reading {args.tokens:,} tokens")
    flags = ["--shape", args.shape, "--tokens", str(args.tokens), "--dtype", args.dtype]
    command = [sys.executable, "-m", "tools.studies.forgetting", "--one", name, *flags]
    done = subprocess.run(
        [*command, "--threads", str(args.threads)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        return None
    line = done.stdout.splitlines()[-1]
    if args.store is not None:
        with args.store.open("a") as file:
            print(line, file=file)
    found: dict[str, Any] = json.loads(line)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a peak is further from its plan than BOUND, or not known."""
    args = arguments(argv)
    if args.one:
        print(json.dumps(measure(args)))
        return 0
    when = "" if args.known else f"; load {load()}; commit {commit()}"
    print(f"{args.shape}, {args.dtype}, {args.tokens:,} tokens; {hardware(torch.device('cpu'))};")
    print(f"threads: {args.threads}{when}. MB, weights included.\n")
    print("| method | planned with a bank | planned | peak | of the plan | heap | after | store |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    inside, over, missing, known = 0, [], [], stored(args.store)
    for name in args.methods:
        found = known.get(name) or (None if args.known else alone(args, name))
        if found is None:
            missing.append(name)
            continue
        print(row(found), flush=True)
        off = found["peak"] / found["planned"] - 1
        inside += abs(off) <= BOUND
        over += [f"{name} {off:+.1%}"] if abs(off) > BOUND else []
    print(f"\n{inside} of {inside + len(over)} within {BOUND:.0%} of the plan")
    for word, names in (("outside", over), ("not measured", missing)):
        if names:
            print(f"{word}: {', '.join(names)}")
    return 1 if over or missing else 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
