"""Calibration by loss: read search and held-out texts, search, print KL by number of full layers,
and choose the knee.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from engine.base.errors import UsageError
from engine.calibration.passages import Choose, Lend, MaxOverHeads, Passage
from engine.calibration.score import Passages, bytes_share, worth
from engine.calibration.search import Found, Layers, Search, filters_of, seeing
from engine.plan.filter_layers import cache_file
from tools.calibrate.state import State
from tools.calibrate.texts import pieces_of
from tools.common import page
from tools.common.documents import texts as real_texts
from tools.common.program import progress, say
from weights.fingerprint import fingerprint

Texts = Sequence[tuple[str, list[int]]]


def passage_of(
    llm: LLM,
    ids: Sequence[int],
    positions: int,
    share: float,
    tail: int,
    choose: Choose | None = None,
    lend: Lend | None = None,
) -> Passage:
    """Read a text but for its last `positions`, which become a passage. choose: default OmniKV's
    own, with `share` of the text as its budget. The passage keeps the session's bank.
    """
    session = llm.session(max_context=len(ids))
    head = len(ids) - positions
    session.prefill(ids[:head])
    choose = choose or MaxOverHeads(max(1, round(share * len(ids))))
    return Passage(
        session.runner.model,
        llm.rotary,
        session.bank,
        list(ids),
        head,
        len(ids),
        tail,
        choose,
        lend,
    )


@dataclass(frozen=True)
class Row:
    """One number of full layers: its set, KL in nats on both splits, and the share of held-out
    positions at which the most likely token is full attention's.
    """

    full: Layers
    search: float
    held: float
    same: float
    numbers: Layers = ()  # of the layers that see everything, where others do not

    @property
    def filters(self) -> Layers:
        """Its filter layers, as the model numbers them."""
        found = filters_of(self.full)
        return tuple(self.numbers[i] for i in found) if self.numbers else found


def knee(rows: Sequence[Row], layers: int, share: float) -> Row:
    """The row from which more full layers cost more than they bring: the least product of search KL
    and bytes read. Of equal ones the fewer layers.
    """
    return min(rows, key=lambda row: worth(row.search, len(row.full), layers, share))


def read(
    llm: LLM, texts: Texts, args: argparse.Namespace, what: str, done: Callable[[Passage], None]
) -> None:
    """Read texts one after the other and hand each passage to `done`; says how long that takes."""
    began = time.perf_counter()
    for number, (name, ids) in enumerate(texts, 1):
        done(passage_of(llm, ids, args.positions, args.share, args.tail))
        left = (time.perf_counter() - began) / number * (len(texts) - number)
        say(f"{what} text {number}/{len(texts)} {name}: {len(ids)} tokens, {left:.0f} s left")


def texts_of(llm: LLM, args: argparse.Namespace, length: int) -> tuple[Texts, Texts]:
    """(search texts, held-out texts): real ones of four kinds, or pieces of the user's."""
    if args.text:
        return pieces_of(llm, args.text, length)
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise UsageError(f"{llm.name}: found no tokenizer, expected one to read texts with")
    found = []
    for split in ("search", "held-out"):
        made = real_texts(tokenizer, split, length, args.texts, end=args.positions)
        found.append([(text.title, list(text.ids)) for text in made])
    return found[0], found[1]


def settings_of(llm: LLM, args: argparse.Namespace, both: tuple[Texts, Texts]) -> dict[str, Any]:
    """What measured costs depend on."""
    llm.load()
    model = llm.model
    assert model is not None and llm.folder is not None
    weights, last = hashlib.sha256(), model.layers[-1]
    model.place(len(model.layers) - 1)
    first = model.embedded(torch.arange(64, device=model.device))
    for tensor in (first, last.norms[-1], last.o.weight[:64]):
        weights.update(str(tensor.double().flatten().tolist()).encode())
    return {
        "fingerprint": fingerprint(llm.folder),
        "weights": weights.hexdigest(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": llm.device.type,
        "positions": args.positions,
        "share": args.share,
        "tail": args.tail,
        "texts": [
            hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]
            for texts in both
            for _, ids in texts
        ],
    }


def state_path(llm: LLM, out: str | None) -> Path:
    """Where a search is kept: beside --out, else in the user's cache."""
    if out:
        return Path(out).with_suffix(".search.json")
    return cache_file(fingerprint(llm.folder)).with_suffix(".search.json")


def searched(
    args: argparse.Namespace, state: State, score: Passages, texts: int, layers: int, most: int
) -> dict[int, Found]:
    """The best set of every number of full layers; the progress line says how long it takes."""
    began, last = time.perf_counter(), 0.0

    def tell(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < 1:
            return
        last = now
        state.save()
        left = search.measurements_left() * score.seconds / max(1, score.measured)
        progress(f"{what}: {done}/{total}, {now - began:.0f} s, about {left:.0f} s left")

    search = Search(layers, score, texts, tell, state.costs)
    try:
        if args.start == "nothing":
            search.up(most)
        else:
            search.down(most)
        return search.known(most)
    finally:
        state.save()
        say("")


def bound(args: argparse.Namespace, layers: int) -> int:
    """The most full layers that are searched."""
    # shallow models need as many
    most = args.most_full or max(layers // 3, min(4, layers - 1))
    if args.full_layers is not None:
        most = max(most, args.full_layers)
    if not 2 <= most < layers or args.full_layers is not None and args.full_layers < 2:
        raise UsageError(
            f"--most-full, --full-layers: found {args.full_layers or most}, expected from 2 to "
            f"{layers - 1} (the model has {layers} layers)"
        )
    return most


def run_by_loss(llm: LLM, args: argparse.Namespace, length: int) -> tuple[Row, list[str], int]:
    """(the chosen row, lines of the report, k of a text)."""
    local, recurrent = llm.config.local_layers, llm.config.recurrent_layers
    layers = llm.config.num_layers - len(local) - len(recurrent)
    most = bound(args, layers)
    both = texts_of(llm, args, length)
    state = State(state_path(llm, args.out), settings_of(llm, args, both), layers, args.fresh)

    def passages() -> list[Passage]:
        made: list[Passage] = []
        read(llm, both[0], args, "search", made.append)
        return made

    score = Passages(passages, layers, local, recurrent)
    found = searched(args, state, score, len(both[0]), layers, most)
    missing = [f.full for f in found.values() if f.full not in state.held]
    held: dict[Layers, list[tuple[float, float]]] = {full: [] for full in missing}

    def measure(passage: Passage) -> None:
        for full, figures in held.items():
            trace = passage.run(score.plan_of(full))
            figures.append((float(trace.kl.mean()), float(trace.same.float().mean())))

    if missing:
        read(llm, both[1], args, "held-out", measure)
    for full, figures in held.items():
        kl, same = (sum(column) / len(figures) for column in zip(*figures))
        state.held[full] = kl, same
    state.save()
    numbers = tuple(seeing(llm.config.num_layers, (*local, *recurrent)))
    rows = [
        Row(found[n].full, found[n].cost, *state.held[found[n].full], numbers)
        for n in sorted(found)
    ]
    at = knee(rows, layers, args.share)
    chosen = at
    if args.full_layers is not None:
        chosen = next(row for row in rows if len(row.full) == args.full_layers)
    k = max(1, round(args.share * length))
    return chosen, table(rows, at, chosen, layers, args, length, k), k


def table(
    rows: Sequence[Row],
    at: Row,
    chosen: Row,
    layers: int,
    args: argparse.Namespace,
    length: int,
    k: int,
) -> list[str]:
    """The report: a Markdown table by number of full layers."""
    lines = [
        f"{layers} layers; {length} tokens, k = {k} and a tail of {args.tail} to {args.tail + 63}, "
        f"{args.positions} positions a text; KL(full || sparse) in nats",
        "",
    ]
    cells = []
    for row in rows:
        mark = " (knee)" if row is at else ""
        mark += " (chosen)" if row is chosen else ""
        kept = ",".join(map(str, row.filters)), f"{row.search:.4f}", f"{row.held:.4f}"
        read = f"{bytes_share(len(row.full), layers, args.share):.3f}"
        cells.append((f"{len(row.full)}{mark}", *kept, f"{100 * row.same:.1f}%", read))
    head = "full layers | filter layers | KL search | KL held-out | same token held-out | bytes"
    lines += page.table(head, cells)
    lines += [
        "",
        "bytes: KV read in a step as a share of full attention's, the tail left out. knee: the "
        "least product of KL search and bytes. For another row: --full-layers N.",
    ]
    return lines
