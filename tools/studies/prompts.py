"""Prompts that choose what they read: what it costs a text and what it saves of the time to the
first token, the methods in one table.

Each text is read under every method, in turn, and its next tokens are scored by steps of full
attention over the bank that this left. So what a method loses here its prompt has lost. KL is of
these steps from dense prefill's. Two controls: QuoKA with keys drawn by chance, and with one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full, MInference, OmniKV, QuoKA, XAttention
from engine.methods.base import Method
from engine.methods.prompts import quoka
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.isa import isa
from tools.bench.header import commit
from tools.common import page
from tools.common.arguments import add_flags, command, loaded
from tools.common.documents import texts
from tools.common.intervals import Interval, over_texts
from tools.common.program import guarded, progress, replace_text, say

NEVER = 2**40  # dense_below: every decode step reads everything
CHANCE = "quoka by chance"
STRIDES = (8, 16)  # XAttention's


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.prompts",
        "Loss and time of prompts that choose what they read, method by method.",
    )
    add_flags(parser, "model threads", threads=1)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--texts", type=int, default=4, help="held-out texts")
    parser.add_argument("--scored", type=int, default=32, help="tokens scored behind each")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[0.06, 0.12, 0.25], help="of the prompt, read"
    )
    parser.add_argument(
        "--thresholds",
        nargs="+",
        type=float,
        default=[0.9],
        help="parts of the attention that XAttention reads, by its estimate",
    )
    parser.add_argument("--block", type=int, default=128, help="queries that choose together")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    return parser.parse_args(argv)


def entries(llm: LLM, args: argparse.Namespace) -> dict[str, Method]:
    """{name: method}, dense first, the controls last."""
    found: dict[str, Method] = {"dense": Full()}
    block, capacity = args.block, args.length
    own, _ = llm.resolve_method(OmniKV(dense_below=NEVER))
    for share in args.shares:
        tokens = max(1, round(share * capacity))
        ratio = max(1, round(tokens / block))
        if isinstance(own, OmniKV):
            given = dict(prefill_ratio=ratio, prefill_block=block, prefill_dense_end=block)
            sparse = OmniKV(filter_layers=own.filter_layers, dense_below=NEVER, **given)
            found[f"omnikv prefill r={ratio}"] = sparse
        found[f"minference {share:.0%}"] = MInference(share=share)
        found[f"quoka {share:.0%}"] = QuoKA(tokens=tokens, block=block)
    for threshold in args.thresholds:
        for stride in STRIDES:
            name = f"xattention {threshold:.0%} by {stride}"
            found[name] = XAttention(threshold=threshold, stride=stride, block=block)
    found[CHANCE] = QuoKA(tokens=max(1, round(args.shares[-1] * capacity)), block=block)
    found["quoka, one key"] = QuoKA(tokens=1, block=block)
    return found


@contextmanager
def drawn(name: str) -> Iterator[None]:
    """Let the control by chance rank keys by numbers of a fixed seed."""
    plain, draw = quoka.cosines, torch.Generator().manual_seed(0)
    if name == CHANCE:
        quoka.cosines = lambda _, k: torch.rand(k.shape[:2], generator=draw)
    try:
        yield
    finally:
        quoka.cosines = plain


def read(llm: LLM, method: Method, ids: Sequence[int], scored: int) -> dict[str, Any]:
    """Read all but the last `scored` of the ids, and score those: seconds of the thread to the
    first logits, log-probabilities float32 [scored, vocab], operations.
    """
    prompt, rest = list(ids[:-scored]), list(ids[-scored:])
    with llm.session(method) as session:
        began = time.thread_time()
        rows = [session.prefill(prompt)]
        seconds = time.thread_time() - began
        # afterwards: what XAttention reads depends on the text
        flops = session.runtime.prompt_flops(PrefillFlops.of(llm.config), 0, len(prompt))
        rows += [session.decode(token) for token in rest[:-1]]
        if session.stats.sparse_steps:
            raise AssertionError(f"{method.name}: a step was not full attention")
    return dict(seconds=seconds, logs=torch.stack(rows).log_softmax(-1), flops=sum(flops))


def measured(llm: LLM, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """{method: [of each text: name, seconds, flops, loss and KL of every scored token]}."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    methods = entries(llm, args)
    held = texts(llm.tokenizer, "held-out", args.length + args.scored, args.texts)
    for number, text in enumerate(held, 1):
        next_ids = torch.tensor(text.ids[-args.scored :])
        full: torch.Tensor | None = None
        for name, method in methods.items():
            progress(f"text {number} of {len(held)}: {name}")
            with drawn(name):
                one = read(llm, method, text.ids, args.scored)
            logs = one.pop("logs")
            full = logs if full is None else full
            one["loss"] = -logs.gather(1, next_ids.unsqueeze(1)).flatten()
            one["kl"] = (full.exp() * (full - logs)).sum(-1)
            found[name].append({"text": text.name, **one})
    say("")
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One row a method: time and operations beside dense prefill's, loss above it and KL."""
    dense = found["dense"]
    lines = []

    def mean(rows: list[dict[str, Any]], of: Callable[[int, dict], torch.Tensor]) -> Interval:
        each = ((r["text"], float(of(i, r).sum()), len(r["loss"])) for i, r in enumerate(rows))
        interval = over_texts(each)
        assert interval is not None
        return interval

    for name, rows in found.items():
        times = [r["seconds"] / d["seconds"] for r, d in zip(rows, dense)]
        loss = mean(rows, lambda _, r: r["loss"])
        above = mean(rows, lambda i, r: r["loss"] - dense[i]["loss"])
        kl = mean(rows, lambda _, r: r["kl"])
        cells = (
            name,
            f"{statistics.median(r['seconds'] for r in rows):.2f}",
            f"{statistics.median(times):.2f}",
            f"{rows[0]['flops'] / dense[0]['flops']:.2f}",
            f"{loss.mean:.3f}",
            above.shown("+.3f"),
            kl.shown(".4f"),
        )
        lines.append(cells)
    head = "prompt | seconds | of dense | operations, of dense | nats a token | above dense | KL"
    return page.table(head, lines, "---:")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the page."""
    args = arguments(argv)

    def work() -> None:
        more = args.length + args.scored
        llm = loaded(args, max_context=more, device="cpu")
        found = measured(llm, args)
        lines = [
            "# Prompts that choose",
            "",
            f"{Path(llm.name).name}, {llm.dtype}, {args.length:,} tokens, {args.texts} held-out "
            f"texts, {args.scored} tokens scored behind each by full attention; {isa()}, "
            f"{args.threads} thread, its own seconds; commit {commit()}. 95% intervals over texts.",
            "",
            *table(found),
        ]
        text = "\n".join(lines) + "\n"
        print(text, end="")
        if args.out:
            replace_text(args.out, text)

    return guarded(work, "stopped; nothing is kept")


if __name__ == "__main__":
    sys.exit(main())
