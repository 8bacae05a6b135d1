"""The measurements of sparse prefill as a page."""

from __future__ import annotations

from typing import Any

from tools.bench.shapes import short_size
from tools.common.page import table


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = ["# Prefill", "", *(f"- {key}: {value}" for key, value in about.items())]
    for part, lines_of in (("speed", _speed_table), ("eta", _eta_table), ("memory", _memory_table)):
        lines += lines_of(report[part]) if part in report else []
    return "\n".join(lines) + "\n"


def _speed_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Time and operations",
        "",
        f"Chunks of {found['chunk']} tokens, integrated over the prompt. "
        "allowed: the operation count's ratio to dense; share: measured / allowed.",
        "",
    ]
    rows = [
        (
            short_size(r["length"]),
            r["method"],
            f"{r['seconds']:.1f}",
            f"{r['length'] / r['seconds']:.0f}",
            f"{(r['linear'] + r['attention']) / 1e15:.4f}",
            f"{r['rate'] / 1e9:.0f}",
            f"{r['measured']:.2f}",
            f"{r['allowed']:.2f}",
            f"{100 * r['measured'] / r['allowed']:.0f}%",
        )
        for r in found["records"]
    ]
    head = "tokens | method | seconds | tokens/s | PFLOP | GFLOP/s | measured x | allowed x | share"
    return lines + table(head, rows)


def _eta_table(records: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            r["method"],
            short_size(r["length"]),
            *(f"{100 * r[what]:.0f}%" for what in ("work", "tokens")),
            *(f"{r[what]:.1f}" for what in ("predicted", "actual")),
            f"{100 * r['error']:+.1f}%",
        )
        for r in records
    ]
    head = "method | tokens | work done | tokens done | predicted s | actual s | error"
    return ["", "## Time left", "", *table(head, rows)]


def _memory_table(records: list[dict[str, Any]]) -> list[str]:
    about = (
        "Deepest chunk over a synthetic bank; activations = peak - resident before the bank - bank."
    )
    sizes = "bank", "selection", "peak", "activations"
    rows = [
        (r["method"], short_size(r["length"]), *(f"{r[key] / 1e6:.1f}" for key in sizes))
        for r in records
    ]
    head = "method | tokens | bank MB | selection MB | peak MB | activations MB"
    return ["", "## Memory", "", about, "", *table(head, rows)]
