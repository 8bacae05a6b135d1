"""Time and operations of chunks at some depths, integrated over a prompt."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from engine import Full
from engine.plan.prefill_time import PrefillFlops
from tools.bench.shapes import short_size
from tools.common.program import progress, say
from tools.common.synthetic_bank import synthesize
from tools.studies.prefill.setup import make_llm, methods, timed_chunk, whole


def timings(args: argparse.Namespace) -> tuple[int, dict, dict]:
    """(tokens of a chunk, {(method, depth): seconds}, {method: operations of every chunk}), the
    methods taking turns.
    """
    longest, found = max(args.lengths), methods(args)
    llm = make_llm(args, longest + 1)
    chunk = llm.chunk
    depths = sorted({0, *(whole(length - chunk, chunk) for length in args.lengths)})
    seconds: dict[tuple[str, int], list[float]] = {}
    work: dict[str, list] = {}
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
            progress(f"timed at {short_size(depth)} of {short_size(longest)}")
    say("")
    return chunk, seconds, work


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """{"chunk", "records"}: per length and method the seconds and operations of the whole prompt,
    and both ratios to dense prefill.
    """
    chunk, seconds, work = timings(args)
    least = {key: min(values) for key, values in seconds.items()}
    records: list[dict[str, Any]] = []
    for length in args.lengths:
        at = sorted({depth for _, depth in seconds if depth <= length - chunk})
        for name in work:
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


def integrate(points: list[tuple[int, float]], length: int, chunk: int) -> float:
    """Sum of a quantity over the chunks of a prompt, from its values at ascending depths [(depth,
    value)], linear between them.
    """
    total = 0.0
    for first in range(0, length, chunk):
        at = min(first, points[-1][0])
        low = max((p for p in points if p[0] <= at), key=lambda p: p[0])
        high = min((p for p in points if p[0] >= at), key=lambda p: p[0])
        share = 0.0 if high[0] == low[0] else (at - low[0]) / (high[0] - low[0])
        total += (low[1] + share * (high[1] - low[1])) * min(1.0, (length - first) / chunk)
    return total
