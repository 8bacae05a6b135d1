"""A benchmark's result as text: Markdown tables in llama-bench's spirit, CSV, JSON; every ratio
from medians of one run.
"""

import csv
import io
import json

from engine.base.figures import human
from tools.bench import gather as bench_gather
from tools.bench.allowed import allowed
from tools.bench.split import SMALL, STAGES
from tools.common.page import line


def summary(result, head, warnings):
    """The whole run as one dict, the last line of stdout."""
    return {
        "format": 1,
        "header": head,
        "model": result.model,
        "warnings": warnings,
        "failed_checks": result.failed_checks,
        "crashed": result.crashed,
        "rates_after": result.rates_after.to_dict() if result.rates_after else None,
        "peers": result.peers,
        "allowed": [
            vars(row) | {"ratio": row.ratio, "own": row.own} for row in allowed(result.cells)
        ],
        "cells": [cell.to_dict() | ratios(cell, result.cells) for cell in result.cells],
        "splits": [_split_dict(row) for row in result.splits],
        "memory": result.memory,
        "link": result.link,
        "gather": result.gather,
    }


def ratios(cell, cells):
    """How many times faster a cell is than others of the same test and depth: {"vs_full": x,
    "vs_transformers": y, ...}; "bytes_allow": how many times faster its floor is than full
    attention's.
    """
    found = {}
    if cell.seconds:
        for other in cells:
            if (
                other.test == cell.test
                and other.n == cell.n
                and other.seconds
                and other is not cell
                and other.name in ("full", "transformers", "llama.cpp")
            ):
                found[f"vs_{other.name}"] = other.median / cell.median
                if other.name == "full" and other.floor and cell.floor:
                    found["bytes_allow"] = other.floor / cell.floor
    return found


def markdown(result, head, warnings):
    """Header, tables of decode, prefill, split, gather and memory, and warnings."""
    parts = [
        _header(result, head),
        "\n".join(decode_rows(result)),
        "\n".join(allowed_rows(result.cells)),
        "\n".join(_prefill_rows(result)),
        "\n".join(_split_rows(result)),
        "\n".join(_gather_rows(result)),
        "\n".join(_memory_rows(result)),
    ]
    if warnings:
        parts.append("\n".join(f"WARNING {line}" for line in warnings))
    return "\n\n".join(part for part in parts if part)


def _header(result, head):
    packages = ", ".join(f"{name} {found}" for name, found in head["packages"].items() if found)
    m = result.model
    lines = [
        f"{head['program']} | commit {head['commit']} | {head['date']}",
        f"{head['hardware']} | load average {head['load']}",
        f"python {head['python']}, {packages}",
        f"flags: {head['flags'] or '(defaults)'} | threads: {head['threads']}",
        f"model: {m['name']}, {m['parameters'] / 1e9:.3f} B parameters, {m['dtype']}, "
        f"{human(m['weight_bytes'])}; "
        f"{m['layers']} layers, {m['heads']}/{m['kv_heads']} heads of {m['head_dim']}; "
        f"{m['kv_bytes_per_token']} B of keys and values per token; on {m['device']}",
        "measured before: "
        + ", ".join(f"{name} {value} GB/s" for name, value in head["measured"].items()),
    ]
    for name, facts in result.peers.items():
        lines.append(f"{name}: " + (facts["why"] if "why" in facts else json.dumps(facts)))
    return "\n".join(lines)


def allowed_rows(cells):
    """One row per method and depth: what its bytes allow beside OmniKV's, and how long our full
    attention takes over as many (tools/bench/allowed.py); none where the fixed part was not timed.
    """
    rows = [
        [
            row.name,
            f"tg @ d{row.n}",
            *(f"{size / 1e6:.2f}" for size in (row.read, row.choosing)),
            *(f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.allowed)),
            f"{row.ratio:.2f}",
            _number(row.alike, 1e3, ".2f"),
            _number(row.own, 1, ".2f"),
        ]
        for row in allowed(cells)
    ]
    columns = "beside omnikv's bytes|test|MB of K and V|to choose|ms/token|ms allowed|ratio|"
    columns += "ms of full's|ratio to it"
    return _table(columns.split("|"), rows) if rows else []


def _table(columns, rows):
    """Markdown table, cells padded so that it also reads as plain text; the first column to the
    left, the others to the right.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    padded = [
        [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        for row in [columns, *rows]
    ]
    lines = list(map(line, padded))
    rule = "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
    rule = f"|{rule}|"
    return [lines[0], rule, *lines[1:]]


def decode_rows(result):
    """One row per method and depth, tg = one token generated at that depth; an empty cell says why
    below the table.
    """
    cells = [c for c in result.cells if c.test == "tg"]
    if not cells:
        return []
    peers = [
        p for p in ("transformers", "llama.cpp") if any(c.name == p and c.seconds for c in cells)
    ]
    columns = "method|test|t/s|ms/token|p95|floor ms|of floor|GB/s|x full|bytes allow".split("|")
    columns += [f"x {p}" for p in peers]
    rows, notes = [], []
    for c in cells:
        test = f"tg @ d{c.n}"
        if not c.seconds:
            rows.append([c.name, test, *["-"] * (len(columns) - 2)])
            notes.append(f"{c.name} {test}: {c.why}")
            continue
        found, (mean, deviation) = ratios(c, cells), c.rate
        rows.append(
            [
                c.name,
                test,
                f"{mean:.2f} ± {deviation:.2f}",
                f"{1e3 * c.median:.2f}",
                f"{1e3 * c.p95:.2f}",
                _number(c.floor, 1e3, ".2f"),
                _percent(c.floor and c.floor / c.median),
                _number(c.needed and c.needed.floor / c.median, 1e-9, ".1f"),
                *(
                    _number(found.get(key), 1, ".2f")
                    for key in ("vs_full", "bytes_allow", *(f"vs_{p}" for p in peers))
                ),
            ]
        )
    settings = dict.fromkeys(f"{c.name}: {c.settings}" for c in cells if c.settings)
    return _table(columns, rows) + [""] * bool(notes) + notes + ["", *settings]


def _prefill_rows(result):
    cells = [c for c in result.cells if c.test != "tg"]
    rows = []
    for c in cells:
        if c.seconds:
            found = ratios(c, cells)
            rows.append(
                [
                    c.name,
                    c.test,
                    f"{c.rate[0]:.1f} ± {c.rate[1]:.1f}",
                    f"{c.median:.2f}",
                    *(
                        _number(found.get(f"vs_{name}"), 1, ".2f")
                        for name in ("transformers", "llama.cpp")
                    ),
                    _over_link(c.extra),
                ]
            )
        else:
            rows.append([c.name, c.test, c.why, "-", "-", "-", ""])
    columns = (
        "prefill|test|t/s|seconds (to first token)|x transformers|x llama.cpp|from host memory"
    )
    columns = columns.split("|")
    return _table(columns, rows) if rows else []


def _over_link(extra):
    """The past's bytes that came back from host memory, and the least time that they take over the
    link where there is one.
    """
    if "streamed_bytes" not in extra:
        return ""
    return human(extra["streamed_bytes"]) + (
        f", link {extra['link_seconds']:.2f} s" if "link_seconds" in extra else ""
    )


def _split_dict(row):
    stages = {stage: 1e3 * seconds for stage, seconds in row["stages"].items()}
    found = {"name": row["name"], "n": row["n"], "stages_ms": stages, "step_ms": 1e3 * row["step"]}
    if row.get("timed"):
        found |= {
            "timed_ms": 1e3 * row["timed"],
            "sum_over_timed": sum(stages.values()) / (1e3 * row["timed"]),
        }
    return found


def _split_rows(result):
    rows = []
    for row in result.splits:
        found = _split_dict(row)
        on_gpu = any("idle" in r["stages"] for r in result.splits)
        names = [*STAGES, SMALL, "idle"] if on_gpu else STAGES
        rows.append(
            [
                row["name"],
                f"d{row['n']}",
                *(f"{found['stages_ms'].get(stage, 0.0):.2f}" for stage in names),
                f"{sum(found['stages_ms'].values()):.2f}",
                _number(found.get("timed_ms"), 1, ".2f"),
            ]
        )
    return _table(["split of a step, ms", "at", *names, "sum", "timed"], rows) if rows else []


def _gather_rows(result):
    if not result.gather:
        return []
    note = [] if result.gather[0]["on"] == "cuda" else [bench_gather.CPU_NOTE]
    return [
        *_table(bench_gather.COLUMNS, bench_gather.table_rows(result.gather)),
        "",
        result.link,
        *note,
    ]


def _memory_rows(result):
    rows = []
    for row in result.memory:
        share = row["measured"] / row["planned"] - 1 if row["planned"] else 0.0
        at, sizes = (
            f"d{row['n']}" if row["n"] else "",
            (human(row["planned"]), human(max(0, row["measured"]))),
        )
        rows.append([row["name"], at, *sizes, f"{share:+.1%}"])
    return _table(["memory", "at", "planned", "measured", "difference"], rows) if rows else []


def _number(value, scale, form):
    return "" if value is None else format(value * scale, form)


def _percent(value):
    return "" if value is None else f"{value:.0%}"


def to_csv(result):
    """All cells, one row each, one column per figure."""
    rows = [cell.to_dict() | ratios(cell, result.cells) for cell in result.cells]
    flat = [
        {
            key: json.dumps(value) if isinstance(value, (dict, list)) else value
            for key, value in row.items()
        }
        for row in rows
    ]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue().rstrip("\n")


def render(form, result, head, warnings):
    """The run in one of the forms md, csv, json, jsonl; the last line is always one JSON object."""
    whole = summary(result, head, warnings)
    last = json.dumps(whole)
    if form == "json":
        return last
    if form == "jsonl":
        return "\n".join([*(json.dumps(cell) for cell in whole["cells"]), last])
    return f"{to_csv(result) if form == 'csv' else markdown(result, head, warnings)}\n\n{last}"
