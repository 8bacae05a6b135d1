"""Streams without end on real text: loss, milliseconds and bytes, thousand tokens by thousand.

A text's tokens are fed one by one (`--by steps`: teacher forcing) or in chunks (`--by prompts`,
which is many times as fast and reads what steps read), and the loss of each next one is noted. Each
line of the comparison runs in a process of its own, whose resident bytes are therefore its own; its
rows go to OUT/LINE-BY.jsonl as they come. `--report` makes the table and the plot of what is there.

Texts differ in difficulty from page to page, so the same tokens are also scored by streams that
began only two windows before a part of the text ("fresh"): what a long past costs is the
difference between the two, not the level.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from engine import LLM, Full, InfLLM, LMInfinite, StreamingLLM, Window
from engine.base.errors import UsageError
from engine.plan.free_memory import resident_bytes
from engine.session.session import Session
from tools.bench.header import commit, hardware, load
from tools.calibrate.texts import read_text, texts_for
from tools.common import page
from tools.common.arguments import add_flags, command
from tools.common.program import POCKET, guarded, model_label, replace_text, say

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 64  # tokens of a block of InfLLM


def infllm(tokens: int) -> InfLLM:
    """InfLLM whose steps read at most `tokens` rows, half of them the window, and which keeps four
    times as many in blocks.
    """
    local, most = tokens // 2, 4 * tokens // BLOCK
    topk = max(1, local // BLOCK - 2)  # with the first tokens and what is in no block yet
    sizes = dict(block=BLOCK, init=BLOCK, local=local, topk=topk, cached=topk, blocks=most)
    return InfLLM(**sizes, chunk=min(512, local))


STREAMS = {
    "streaming_llm": lambda tokens: StreamingLLM(tokens=tokens),
    "lm_infinite": lambda tokens: LMInfinite(tokens=tokens),
    "window": lambda tokens: Window(tokens=tokens),
    "infllm": infllm,
}
LINES = (*STREAMS, "fresh", "full")
REFERENCE = "streaming_llm-prompts"  # the line and feed that others are compared with
SMOOTH = 2  # rows on either side of one that the plot takes the mean of
APART = 0.055  # of a panel's height, between two names
PAGE = 1024  # tokens of a made document
PIECE = 256  # tokens whose logits are computed at once


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.stream",
        "Loss, time and bytes of streams without end on real text.",
    )
    add = parser.add_argument
    add_flags(parser, "model dtype device threads", threads=1)
    add(
        "--text",
        action="append",
        default=[],
        help="a file (repeatable; default: pages of this project, or of the shipped model's kind)",
    )
    add("--tokens", type=int, default=20_000, help="tokens of the stream")
    add("--every", type=int, default=1000, help="tokens of a row")
    add("--keep", type=int, default=2048, help="tokens that a stream keeps")
    add("--restart", type=int, default=10_000, help="tokens of one stream of the line fresh")
    add("--first", type=int, default=0, help="where the line fresh begins: tokens of the text")
    add("--lines", nargs="+", choices=LINES, default=list(LINES), help="what is compared")
    add("--out", type=Path, required=True, help="a folder for rows, table and plot")
    add("--by", choices=("steps", "prompts"), default="steps", help="how tokens are fed")
    add("--line", choices=LINES, help=argparse.SUPPRESS)  # the process of one line
    add("--flat", action="store_true", help="only time steps of a young and an old stream in turn")
    add("--report", action="store_true", help="only write table and plot of what is there")
    return parser.parse_args(argv)


def text_of(args: argparse.Namespace, llm: LLM) -> list[int]:
    """Token ids of the text: the user's files, or this project's own pages; of the shipped model,
    which knows no other texts, made documents with a question and its answer each.
    """
    if args.model == str(POCKET) and not args.text:
        made = texts_for(llm, [], -(-args.tokens // PAGE) + 8, PAGE, 0)
        ids = [token for _, page in made for token in page]
    else:
        files = args.text or ["README.md", *sorted(map(str, (ROOT / "docs").glob("*.md")))]
        ids = llm.encode("\n\n".join(read_text(str(ROOT / file)) for file in files))
    if len(ids) <= args.tokens:
        raise UsageError(
            f"--tokens: found {args.tokens}, expected fewer than the text's {len(ids)}"
        )
    return ids[: args.tokens + 1]


# ---------------------------------------------------------------- one line


def opened(args: argparse.Namespace, base: LLM) -> LLM:
    """The LLM of a line: a stream, or full attention with room for all."""
    if args.line == "full":
        return LLM.sharing(base, method=Full(), max_context=args.tokens + 64, beyond=True)
    name = "streaming_llm" if args.line == "fresh" else args.line
    return LLM.sharing(base, method=STREAMS[name](args.keep), forever=True)


def by_steps(session: Session, ids: list[int], first: int, stop: int) -> float:
    """Feed tokens first .. stop-1; the sum of the losses of those behind each."""
    loss = 0.0
    for at in range(first, stop):
        loss -= float(torch.log_softmax(session.decode(ids[at]), -1)[ids[at + 1]])
    return loss


def by_prompts(session: Session, ids: list[int], first: int, stop: int) -> float:
    """As `by_steps`, chunk by chunk."""
    found: list[float] = []

    def take(x: torch.Tensor, start: int) -> None:
        at = first + start - begun
        for piece in range(0, x.shape[1], PIECE):
            logits = session.loaded.model.logits(x[0, piece : piece + PIECE])
            wanted = torch.tensor(ids[at + piece + 1 : at + piece + 1 + len(logits)])
            found.append(float(F.cross_entropy(logits.float(), wanted, reduction="sum")))

    begun = len(session)
    session.prefill(ids[first:stop], every=take)
    return sum(found)


def sessions(
    args: argparse.Namespace, llm: LLM, ids: list[int]
) -> Callable[[int, Session], Session]:
    """What gives the session that goes on at a position: the same, but for the line fresh."""

    def at(position: int, session: Session) -> Session:
        begins = position == args.first or position % args.restart == 0
        if args.line != "fresh" or not (position and begins):
            return session
        session.close()
        begun = llm.session()
        begun.prefill(ids[max(0, position - 2 * args.keep) : position])  # its window is full again
        return begun

    return at


def run_line(args: argparse.Namespace) -> None:
    """Run one line and write its rows."""
    given = dict(dtype=args.dtype, device=args.device, threads=args.threads)
    base = LLM(args.model, method=Full(), max_context=4096, **given)
    ids, llm = text_of(args, base), opened(args, base)
    feed = by_steps if args.by == "steps" else by_prompts
    facts = {
        "line": args.line,
        "by": args.by,
        "method": repr(llm.method),
        "model": model_label(args.model),
        "positions": base.config.max_positions,
        "keep": args.keep,
        "tokens": args.tokens,
        "planned": llm.plan().total,
        "commit": commit(),
        "hardware": hardware(llm.device),
        "load": load(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    with (args.out / f"{args.line}-{args.by}.jsonl").open("w", encoding="utf-8") as file:
        put = partial(print, file=file, flush=True)
        put(json.dumps(facts))
        session, go_on = llm.session(), sessions(args, llm, ids)
        begins = args.first if args.line == "fresh" else 0
        for first in range(begins, args.tokens - args.every + 1, args.every):
            session = go_on(first, session)
            began = time.perf_counter()
            loss = feed(session, ids, first, first + args.every) / args.every
            row = measured(session, loss, 1000 * (time.perf_counter() - began) / args.every)
            put(json.dumps({"tokens": first + args.every, **row}))
            say(f"{args.line} {first + args.every:,} {loss:.3f} nats {row['ms']:.2f} ms")


def measured(session: Session, loss: float, ms: float) -> dict[str, Any]:
    """What a row says: nats and milliseconds a token, bytes of the process and of the session, rows
    of a layer.
    """
    stats = session.stats
    held = stats.bank_bytes + stats.store_bytes + stats.snapshot_bytes + stats.ring_bytes
    held += stats.selection_bytes
    return {
        "loss": round(loss, 5),
        "ms": round(ms, 4),
        "resident": resident_bytes(),
        "held": held,
        "rows": session.runtime.rows_read(len(session))[0],
        "load": load()[0],
    }


ROUNDS, STEPS = 12, 25  # of the two streams in turn


def flat(args: argparse.Namespace) -> int:
    """Time steps of a stream that has just begun to forget and of one of `--tokens` tokens, in turn
    in one process: medians of this thread's processor time, and the bytes of both. The line is the
    first of `--lines`.
    """
    base = LLM(args.model, method=Full(), max_context=4096, threads=args.threads)
    ids, args.line = text_of(args, base), args.lines[0]
    llm = opened(args, base)
    begun = llm.planner.max_context + llm.planner.chunk  # of whatever a stream holds
    young, old = llm.session(), llm.session()
    young.prefill(ids[:begun])
    old.prefill(ids[: args.tokens])
    spent: dict[str, list[float]] = {"young": [], "old": []}
    for _ in range(ROUNDS):
        for name, session in (("young", young), ("old", old)):
            began = time.thread_time()
            for token in ids[:STEPS]:
                session.decode(token)
            spent[name].append(1000 * (time.thread_time() - began) / STEPS)
    for name, session in (("young", young), ("old", old)):
        print(
            f"{name}: {len(session):,} tokens, {median(spent[name]):.3f} ms of processor time a "
            f"step (least {min(spent[name]):.3f}), {measured(session, 0.0, 0.0)['held']:,} bytes"
        )
    print(f"{hardware(llm.device)}; load {load()}; commit {commit()}")
    return 0


# ---------------------------------------------------------------- the report


def read_rows(out: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """{line-by: (facts, rows)} of a folder."""
    found = {}
    for path in sorted(out.glob("*.jsonl")):
        facts, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if rows:
            found[path.stem] = facts, rows
    return found


def mean(rows: Sequence[dict[str, Any]], what: str) -> float:
    """The mean of a figure over rows."""
    return sum(row[what] for row in rows) / len(rows)


def tenths(rows: list[dict[str, Any]], keep: int) -> tuple[list[dict], list[dict]]:
    """The first rows in which something was forgotten and the last ones: a tenth of the tokens."""
    full = [row for row in rows if row["tokens"] > 2 * keep] or rows
    last = rows[-1]["tokens"]
    count = max(1, sum(row["tokens"] > last - last // 10 for row in rows))
    return full[:count], rows[-count:]


def table(found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]) -> str:
    """The report as Markdown."""
    facts = next(iter(found.values()))[0]
    lines = [
        f"# Streams of {facts['model']}, which is made for {facts['positions']:,} positions",
        "",
        f"{facts['hardware']}, {facts['threads']} thread. A stream keeps {facts['keep']:,} tokens.",
        "Early: the first tenth after twice as many. Late: the last tenth. Ratio: of the late loss",
        f"to that of {REFERENCE} on the same tokens, since texts differ in difficulty. MB: of the",
        "process. Load: mean of what else ran on the machine, which times depend on.",
        "",
    ]
    cells = []
    reference = {row["tokens"]: row["loss"] for row in found.get(REFERENCE, ({}, []))[1]}
    for facts, rows in found.values():
        early, late = tenths(rows, facts["keep"])
        there = [reference[row["tokens"]] for row in late if row["tokens"] in reference]
        ratio = f"{mean(late, 'loss') * len(there) / sum(there):.3f}" if there else ""
        nats, *others = [
            f"{mean(early, what) / unit:,.{digits}f}, {mean(late, what) / unit:,.{digits}f}"
            for what, unit, digits in (
                ("loss", 1, 3),
                ("rows", 1, 0),
                ("resident", 1e6, 1),
                ("ms", 1, 2),
            )
        ]
        last = f"{rows[-1]['tokens']:,}", nats, ratio, *others, f"{mean(rows, 'load'):.1f}"
        cells.append((facts["line"], facts["by"], *last, facts["commit"]))
    head = (
        "line | fed by | tokens | nats, early, late | ratio | rows, early, late | MB, early, late "
    )
    lines += page.table(head + "| ms a token, early, late | load | commit", cells)
    return "\n".join(lines) + "\n"


def smooth(rows: list[dict[str, Any]], what: str, unit: float) -> list[float]:
    """A figure of every row, the mean of it and its neighbours."""
    return [mean(rows[max(0, i - SMOOTH) : i + SMOOTH + 1], what) / unit for i in range(len(rows))]


def name_ends(axis: Any, lines: list[tuple[float, float, str, str]]) -> None:
    """Put a name (y, x, text, colour) at the end of each line, none over another."""
    low, high = axis.get_ylim()
    below: dict[float, float] = {}  # by x: where the last name stands
    for y, x, text, colour in sorted(lines):
        below[x] = y = max(y, below.get(x, low - (high - low)) + (high - low) * APART)
        axis.text(x, y, text, color=colour, fontsize=7, verticalalignment="center")


def plot(found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]], path: Path) -> None:
    """Three panels over the tokens of the stream: the reference's loss, that of others beyond it,
    and bytes of the process. Needs matplotlib.
    """
    plt = page.pyplot()
    if plt is None:
        say("no plot: it needs matplotlib")
        return
    reference = {row["tokens"]: row["loss"] for row in found.get(REFERENCE, ({}, []))[1]}
    figure, axes = plt.subplots(3, 1, figsize=(8.5, 9.5), sharex=True)
    ends: dict[Any, list[tuple[float, float, str, str]]] = {axis: [] for axis in axes}
    for number, (name, (facts, rows)) in enumerate(found.items()):
        known = [row for row in rows if row["tokens"] in reference]
        beside = [{**row, "more": row["loss"] - reference[row["tokens"]]} for row in known]
        panels = [(rows, "resident", 1e6), (beside, "more", 1)]
        if name == REFERENCE:
            panels[1] = rows, "loss", 1
        for some, what, unit in panels:
            axis = axes[("loss", "more", "resident").index(what)]
            values = smooth(some, what, unit)
            at = [row["tokens"] for row in some]
            axis.plot(at, values, color=f"C{number}", linewidth=1.2)
            if some:
                label = f" {facts['line']}, {facts['by']}"
                ends[axis].append((values[-1], at[-1], label, f"C{number}"))
    labels = "nats a token", f"nats more than {REFERENCE}", "MB of the process"
    for axis, label in zip(axes, labels):
        axis.axvline(facts["positions"], color="grey", linestyle=":", linewidth=1)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.margins(x=0.2)
    axes[0].set_ylim(bottom=0)
    axes[2].set_ylim(bottom=0)
    for axis, lines in ends.items():
        name_ends(axis, lines)
    axes[2].set_xlabel(f"tokens of the stream; dotted: {facts['positions']:,}, the model's own")
    kept = f"{facts['model']}, {facts['keep']:,} tokens kept; means of {2 * SMOOTH + 1} rows"
    axes[0].set_title(kept, fontsize=10)
    figure.tight_layout()
    page.saved(figure, path)


def report(out: Path) -> int:
    """Write stream.md and, with matplotlib, stream.png of the rows in a folder."""
    found = read_rows(out)
    if not found:
        raise UsageError(f"--out: found no rows in {out}, expected a run before --report")
    replace_text(out / "stream.md", table(found))
    print(table(found))
    plot(found, out / "stream.png")
    return 0


def work(args: argparse.Namespace) -> int:
    """Run what the flags say; the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.flat:
        return flat(args)
    if args.line:
        run_line(args)
        return 0
    for line in () if args.report else args.lines:
        child = [sys.executable, "-m", "tools.studies.stream", *sys.argv[1:], "--line", line]
        if code := subprocess.run(child, cwd=ROOT, env=os.environ).returncode:
            return code
    return report(args.out)


if __name__ == "__main__":
    raise SystemExit(guarded(lambda: work(arguments()), "stopped; --report shows what is there"))
