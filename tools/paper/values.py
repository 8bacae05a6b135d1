"""What a run says of a table: a figure for every method and column, with its interval."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.shapes import short_size
from tools.common.intervals import wilson
from tools.common.records import AnswerFile, Record
from tools.compare.comparison import key_of
from tools.compare.stats import cells, pooled, reads
from tools.paper.programs import TIMED
from tools.paper.suites import column_of, means_of
from tools.paper.table import Command, Table


@dataclass(frozen=True)
class Value:
    """One figure of ours. low, high: its 95% interval; count: of answers, texts or timings; note:
    what a sparse layer read, or nothing.
    """

    method: str
    column: str
    value: float
    low: float | None = None
    high: float | None = None
    count: int = 0
    note: str = ""


def values_of(table: Table, command: Command, folder: Path) -> list[Value]:
    """The figures of a command's folder; none where it has not run."""
    if command.program in ("compare", "suites"):
        return _scores(table, command, folder)
    name = TIMED[command.program]
    if not (folder / name).is_file():
        return []
    found = json.loads((folder / name).read_text(encoding="utf-8"))
    if command.program == "ranks":
        return _ranks(found, table.unit)
    return _prefill(found) if command.program == "prefill" else _timings(found)


def _scores(table: Table, command: Command, folder: Path) -> list[Value]:
    """Scores in per cent by task, of first questions; milliseconds a token where the paper has
    them.
    """
    file = AnswerFile(folder, key_of)
    if file.load() is None:
        return []
    rows = cells([r for r in file.records if r["turn"] == 1])
    several = not table.suite and len({row["length"] for row in rows}) > 1
    timed = any("ms" in row for model in table.figures.values() for row in model.values())
    out = []
    for row in rows:
        method = f"{command.label} {row['variant']}".strip()
        column = f"{row['task']} at {row['length']:,}" if several else column_of(row["task"])
        score, low, high = (100 * row[name] for name in ("accuracy", "low", "high"))
        out.append(Value(method, column, score, low, high, row["asked"], reads(row)))
    for method in dict.fromkeys(v.method for v in out) if table.suite else ():
        scores = {v.column: v.value for v in out if v.method == method}
        out += [Value(method, name, mean) for name, mean in means_of(table.suite, scores).items()]
    for variant in dict.fromkeys(row["variant"] for row in rows) if timed else ():
        own = [row for row in rows if row["variant"] == variant]
        if (ms := pooled(own)["ms"]) is not None:
            asked = sum(row["asked"] for row in own)
            out.append(Value(f"{command.label} {variant}".strip(), "ms", ms, count=asked))
    return out


def _timings(found: Record) -> list[Value]:
    """Tokens a second by context, of tools.bench."""
    return [
        Value(
            cell["name"],
            f"tokens/s at {short_size(cell['n'])}",
            1000 / cell["ms_median"],
            1000 / cell["ms_p95"],
            1000 / cell["ms_min"],
            cell["samples"],
        )
        for cell in found["cells"]
        if cell["test"] == "tg" and cell["ms_median"]
    ]


def _prefill(found: Record) -> list[Value]:
    """Seconds of a prompt by length, of tools.studies.prefill.table."""
    return [
        Value(r["method"], f"seconds at {short_size(r['length'])}", r["seconds"])
        for r in found["speed"]["records"]
    ]


def _ranks(found: Record, unit: str) -> list[Value]:
    """Milliseconds of a step, or tokens a second, of one sequence over ranks, of tools.speed.ranks;
    both with the size of the batch in their column.
    """
    out = []
    for row in found["rows"]:
        ms = 1000 * row["seconds"]["ranks"]
        value = ms if unit == "ms" else 1000 / ms
        out.append(Value(row["method"], f"{unit} at {short_size(row['context'])} x 1", value))
    return out


def means(records: Sequence[dict[str, Any]], scored: bool = False) -> list[Value]:
    """The mean over texts of every (method, column) of a line's records, with its interval by the
    spread of the texts, within [0, 1]; none of one text alone. scored: every value is 100 or 0,
    right or wrong.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    for record in records:
        groups.setdefault((record["method"], record["column"]), []).append(record["value"])
    out = []
    for (method, column), found in groups.items():
        mean, count = sum(found) / len(found), len(found)
        if scored:
            ends = wilson(round(sum(found) / 100), count)
            out.append(Value(method, column, mean, 100 * ends[0], 100 * ends[1], count))
            continue
        half = None
        if count > 1:
            half = 1.96 * math.sqrt(sum((v - mean) ** 2 for v in found) / (count - 1) / count)
        low, high = (None, None) if half is None else (max(0.0, mean - half), min(1.0, mean + half))
        out.append(Value(method, column, mean, low, high, count))
    return out
