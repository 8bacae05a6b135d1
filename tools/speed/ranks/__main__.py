"""Ranks of one model on cores of their own, beside threads of one process.

Random weights of a shape, in a folder that every way reads. Each way is a process that reads the
same prompt and then waits; the ways take turns (A B A B), and the table has the median of the
clock's seconds for a decode step. Both ranks and both threads are bound to the same cores. With
--gpus N a rank on each of N GPUs stands beside one process on the first; where there are fewer, a
line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine import LLM, Full, OmniKV, RankedLLM
from engine.base.device import synchronize
from engine.base.errors import UsageError
from engine.model.config.config import ModelConfig
from engine.model.share.divide import MOST_RANKS
from engine.model.tensors import targets
from engine.ranks.collectives.cards import here
from engine.ranks.collectives.segment import Segment, new_segment
from engine.ranks.group import Ranks
from engine.ranks.place import allowed_cores
from kernels.ranks.join import usable
from tools.bench.shapes import shape_config, shape_filters
from tools.bench.suite import sharp_stream
from tools.speed import harness
from tools.speed.harness import ROOM, SHAPED, Report, flag

METHODS = ("full", "omnikv")
WAYS = ("one thread", "threads", "ranks")
ON_GPUS = ("one GPU", "GPUs")
NAN = float("nan")
Ask = Callable[[str], list[float]]  # a way, by a line of its input
SUMS = 300  # of each kind
CHILD = "OMNIKV_SPEED_RANKS"  # what a child measures, as JSON


def write_folder(args: argparse.Namespace, folder: Path) -> None:
    """Write a shape's random weights as a model folder."""
    from safetensors.torch import save_file

    config = shape_config(args.shape)
    dtype = getattr(torch, args.dtype)
    held = dict(sharp_stream(config, dtype, torch.device("cpu")))
    stored: dict[str, torch.Tensor] = {}
    for target in targets(config):
        rows = [shape[0] for _, shape in target.parts]
        for (name, _), part in zip(target.parts, held[target.name].split(rows), strict=True):
            stored[name] = part.contiguous()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_fields(config, args.dtype)))


def _fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
    }


def methods_of(args: argparse.Namespace) -> dict[str, Any]:
    """The methods that are measured."""
    filters = shape_filters(args.shape)
    return {"full": Full(), "omnikv": OmniKV(filter_layers=filters, dense_below=0)}


def child(given: dict[str, Any]) -> int:
    """One way: read the prompt, then take steps for every line of standard input, which names a
    method and how many; a line of seconds for each.
    """
    args = argparse.Namespace(**given)
    settings: dict[str, Any] = dict(max_context=args.context + ROOM, method=Full())
    if args.way == "ranks":
        llm: LLM = RankedLLM(args.folder, args.count, device="cpu", chunk=512, **settings)
    elif args.way == "GPUs" and args.count > 1:
        llm = RankedLLM(args.folder, gpus=args.count, **settings)
    elif args.way == "GPUs":
        llm = LLM(args.folder, device="cuda:0", **settings)
    else:
        settings |= dict(device="cpu", chunk=512)
        os.sched_setaffinity(0, allowed_cores()[: args.count])
        llm = LLM(args.folder, threads=args.count, **settings)
    methods, generator = methods_of(args), torch.Generator().manual_seed(1)
    ids = torch.randint(5, llm.config.vocab_size, (args.context,), generator=generator).tolist()
    session = llm.session()
    began = time.perf_counter()
    session.prefill(ids)
    synchronize(llm.device)
    print(json.dumps([time.perf_counter() - began]), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        session.set_method(methods[name])
        found = []
        for number in range(int(count)):
            began = time.perf_counter()
            session.decode(5 + number)
            synchronize(llm.device)
            found.append(time.perf_counter() - began)
        session.truncate(args.context)
        print(json.dumps(found), flush=True)
    session.close()
    if isinstance(llm, RankedLLM):
        llm.close()
    return 0


def sums(given: dict[str, Any]) -> int:
    """One rank of a group that does nothing but add: rank 0 prints the median seconds of a sum of
    `count` numbers, by Gloo and through shared memory.
    """
    rank, size, folder = given["rank"], given["size"], Path(given["folder"])
    cores = allowed_cores()
    os.sched_setaffinity(0, [cores[rank % len(cores)]])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    usable()  # compiles first where it must
    ranks = Ranks(rank, size, dist.FileStore(str(folder / "store"), size))
    held = Segment(given["segment"], rank, size, ranks.timeout)
    x = torch.ones(given["count"]).to(getattr(torch, given["dtype"]))
    found: list[float] = []
    for segment in (None, held):
        taken = []
        ranks.segment = segment
        for _ in range(SUMS):
            began = time.perf_counter()
            ranks.add(x)
            taken.append(time.perf_counter() - began)
        found.append(statistics.median(taken))
    if rank == 0:
        print(json.dumps(found), flush=True)
    return 0


def measure_sums(args: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Seconds of a sum of a hidden vector: (Gloo, shared memory)."""
    count, size = shape_config(args.shape).hidden_size, args.ranks
    segment = new_segment(size, str(folder))
    given = dict(folder=str(folder), segment=segment, size=size, count=count, dtype=args.dtype)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.speed.ranks"],
            env={**os.environ, CHILD: json.dumps({**given, "rank": rank})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = running[0].communicate()[0]
    for process in running[1:]:
        process.communicate()
    os.unlink(segment)
    gloo, shared = json.loads(said)
    return gloo, shared


@contextmanager
def way(
    args: argparse.Namespace, folder: Path, context: int, name: str, count: int
) -> Iterator[Ask]:
    """A child that measures a way."""
    given = dict(folder=str(folder), context=context, way=name, count=count, shape=args.shape)
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.speed.ranks"],
        env={**os.environ, CHILD: json.dumps(given)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    out, back = process.stdin, process.stdout

    def ask(line: str) -> list[float]:
        if line:
            out.write(line + "\n")
            out.flush()
        return json.loads(back.readline())

    try:
        yield ask
    finally:
        out.close()
        process.wait(30)


def asked_ways(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """{way: (what its child runs, how many threads, ranks or GPUs it has)}."""
    if args.gpus:
        return {"one GPU": ("GPUs", 1), "GPUs": ("GPUs", args.gpus)}
    known = {"one thread": ("threads", 1), "threads": ("threads", args.ranks)}
    known["ranks"] = "ranks", args.ranks
    return {name: known[name] for name in args.ways.split(",")}


def measure(args: argparse.Namespace, folder: Path, context: int) -> list[dict[str, Any]]:
    """A row for each method at one context."""
    ways = dict[str, Ask]()
    with ExitStack() as open_ways:
        for name, given in asked_ways(args).items():
            ways[name] = open_ways.enter_context(way(args, folder, context, *given))
            ways[name]("")
        rows = []
        for method in METHODS:
            line = f"{method} {args.steps}"
            asked: dict[str, Callable[[int], list[float]]]
            asked = {name: partial(_told, ask, line) for name, ask in ways.items()}
            found: dict[str, list[list[float]]] = harness.in_turns(asked, args.turns)
            taken = {
                name: statistics.median(s for turn in mine for s in turn)
                for name, mine in found.items()
            }
            rows.append(dict(method=method, context=context, seconds=taken))
    return rows


def _told(ask: Ask, line: str, turn: int) -> list[float]:
    return ask(line)


def on_gpus(args: argparse.Namespace) -> Report | None:
    """Measure ranks on GPUs beside one GPU; None, after a line, where this machine has too few."""
    harness.require(args, 2, "gpus", most=MOST_RANKS)
    found = here()
    if found < args.gpus:
        print(f"not measured: needs {args.gpus} GPUs, found {found}")
        return None
    rows, lines = measured_rows(args), []
    for row in rows:
        one, several = (1000 * row["seconds"][name] for name in ON_GPUS)
        figures = f"{one:.2f}", f"{several:.2f}", f"{one / several:.2f}"
        lines.append((row["method"], row["context"], *figures))
    facts = f"{args.shape}, {args.dtype}, {args.gpus} GPUs against one; {harness.machine()}"
    names = "method | tokens | one GPU, ms | GPUs, ms | gain"
    data = {"rows": rows, "gpus": args.gpus, **harness.shape_facts(args), **harness.origin()}
    return Report(facts, harness.markdown(names, lines), data)


def measured_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every context, over a folder of random weights that goes with them."""
    memory, rows = Path("/dev/shm"), []
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        write_folder(args, Path(folder))
        for context in harness.sizes(args, "context"):
            rows += measure(args, Path(folder), context)
    return rows


def work(args: argparse.Namespace) -> Report | None:
    """Measure every context."""
    harness.require(args, 1, "steps", "turns")
    if args.gpus:
        return on_gpus(args)
    harness.require(args, 2, "ranks", most=len(allowed_cores()))
    for name in args.ways.split(","):
        if name not in WAYS:
            raise UsageError(f"--ways: found {name!r}, expected some of {','.join(WAYS)}")
    with tempfile.TemporaryDirectory() as folder:
        gloo, shared = measure_sums(args, Path(folder))
    rows, lines = measured_rows(args), []
    for row in rows:
        one, threads, ranks = (1000 * row["seconds"].get(n, NAN) for n in WAYS)
        lines.append(
            (row["method"], row["context"], f"{one:.2f}", f"{threads:.2f}", f"{ranks:.2f}")
            + (f"{one / threads:.2f}", f"{one / ranks:.2f}", f"{threads / ranks:.2f}")
        )
    names = "method | tokens | one thread, ms | threads, ms | ranks, ms | threads' gain"
    names += " | ranks' gain | ranks over threads"
    facts = (
        f"{args.shape}, {args.dtype}, {args.ranks} ranks against {args.ranks} threads; a sum of a "
        f"hidden vector takes {1e6 * gloo:.0f} us by Gloo, {1e6 * shared:.1f} us in shared memory; "
    )
    data = {
        "rows": rows,
        "gloo": gloo,
        "shared": shared,
        **harness.shape_facts(args),
        **harness.origin(),
    }
    return Report(facts + harness.machine(), harness.markdown(names, lines), data)


FLAGS: dict[str, dict[str, Any]] = {
    **SHAPED,
    "--context": flag("2K", "tokens in the session, or several such sizes"),
    "--ranks": flag(2, "ranks, and threads beside them"),
    "--gpus": flag(0, "ranks on so many GPUs instead, beside one GPU"),
    "--ways": dict(default=",".join(WAYS), metavar="WAY,..", help="what to measure (%(default)s)"),
    "--steps": flag(12, "decode steps of a turn"),
    "--turns": flag(4, "turns of each way after a first"),
}
main = harness.program("ranks", __doc__, FLAGS, work)


def start(argv: Sequence[str] | None = None) -> int:
    """The program, or one of its ways."""
    if CHILD in os.environ:
        given = json.loads(os.environ.pop(CHILD))
        return child(given) if "way" in given else sums(given)
    return main(argv)


if __name__ == "__main__":
    sys.exit(start())
