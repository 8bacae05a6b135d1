"""The tables of docs/EXACT.md on a real model, cell by cell: a record per cell in a file of JSON
lines; a cell whose record is there is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine import LLM, Full, OmniKV, SamplingParams
from engine.plan.layers import Role
from tools.common.documents import texts
from tools.studies.exact.coupling import coupling
from tools.studies.exact.frozen import FrozenDrafts
from tools.studies.exact.starts import Starts, accepted, answer, looked_up, own_drafts

KINDS = ("prose", "code", "key-value")
# how a draft's selection is made: as exact mode does, or by verification
# (tools/studies/exact/frozen.py)
CHOICES = {
    "first draft": own_drafts,
    "verified, every layer": FrozenDrafts(*Role),
    "verified, filter layers": FrozenDrafts(Role.FILTER),
    "verified, full and filter layers": FrozenDrafts(Role.FULL, Role.FILTER),
    "verified, filter layers, of three": FrozenDrafts(Role.FILTER, among=3),
    "verified, full and filter layers, of three": FrozenDrafts(Role.FULL, Role.FILTER, among=3),
    "verified, filter layers, 4 tokens old": FrozenDrafts(Role.FILTER, old=4),
    "by chance": FrozenDrafts(Role.FILTER, chance=True),
}


class Records:
    """Records of a file by key; what is noted is on disk at once."""

    def __init__(self, path: Path):
        self.path, self.rows = path, {}  # type: ignore[var-annotated]
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["key"]] = row

    def note(self, key: str, row: dict[str, Any]) -> None:
        """Append a record."""
        self.rows[key] = {"key": key, **row}
        with self.path.open("a") as out:
            out.write(json.dumps(self.rows[key]) + "\n")


def method_of(filters: str, share: float) -> OmniKV:
    """OmniKV with filter layers "2,8,17", sparse at every length."""
    return OmniKV(filter_layers=tuple(map(int, filters.split(","))), share=share, dense_below=0)


def run_starts(
    llm: LLM,
    records: Records,
    lengths: Sequence[int],
    cells: Sequence[tuple[str, float, str]],
    tokens: int,
    kinds: Sequence[str],
    say: Callable[[str], None],
    number: int = 1,
) -> None:
    """Greedy drafts from every token of an answer. cells: (filter layers, share, choice)."""
    for length in lengths:
        for kind, ids in _prompts(llm, length, kinds, number):
            keys = {cell: " ".join(map(str, (kind, length, *cell))) for cell in cells}
            todo = [cell for cell in cells if keys[cell] not in records.rows]
            if not todo:
                continue
            with llm.session(Full()) as session:
                written = answer(session, ids, tokens)
                copies = looked_up(ids, written)
                for cell in todo:
                    filters, share, choice = cell
                    method = method_of(filters, share)
                    right = accepted(session, method, written, CHOICES[choice])
                    dtype = str(llm.dtype)[6:]
                    row = Starts(kind, length, filters, share, choice, dtype, right, copies)
                    records.note(keys[cell], row.to_dict())
                    say(f"{keys[cell]}: {sum(right) / len(right):.2f} of 7 from any token")


def run_coupling(
    llm: LLM,
    records: Records,
    length: int,
    method: OmniKV,
    settings: Sequence[tuple[float, float]],
    tokens: int,
    draft: int,
    kinds: Sequence[str],
    say: Callable[[str], None],
    number: int = 1,
) -> None:
    """Probabilities of acceptance in sampled answers. settings: (temperature, top-p)."""
    for kind, ids in _prompts(llm, length, kinds, number):
        keys = {pair: f"{kind} {length} {pair[0]} {pair[1]}" for pair in settings}
        todo = [pair for pair in settings if keys[pair] not in records.rows]
        if not todo:
            continue
        with llm.session(Full()) as session:
            session.prefill(ids)
            for pair in todo:
                params = SamplingParams(temperature=pair[0], top_p=pair[1], seed=1)
                row = coupling(session, method, ids, tokens, draft, kind, params)
                records.note(keys[pair], row.to_dict())
                say(f"{keys[pair]}: {len(row.cycles['number'])} cycles")


def _prompts(
    llm: LLM, length: int, kinds: Sequence[str], number: int
) -> Iterator[tuple[str, list[int]]]:
    assert llm.tokenizer is not None
    for text in texts(llm.tokenizer, "held-out", length, number * len(kinds), kinds):
        yield text.kind, list(text.ids)
