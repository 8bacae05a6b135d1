"""The measurements of sparse prefill as a page."""

from __future__ import annotations

from typing import Any

from tools.bench.shapes import short_size


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = ["# Prefill", "", *(f"- {key}: {value}" for key, value in about.items())]
    for part, table in (("speed", _speed_table), ("eta", _eta_table), ("memory", _memory_table)):
        lines += table(report[part]) if part in report else []
    return "\n".join(lines) + "\n"


def _speed_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Time and operations",
        "",
        f"Chunks of {found['chunk']} tokens, integrated over the prompt. "
        "allowed: the operation count's ratio to dense; share: measured / allowed.",
        "",
        "| tokens | method | seconds | tokens/s | PFLOP | GFLOP/s | measured x | allowed x | "
        "share |",
        "|---" * 9 + "|",
    ]
    for r in found["records"]:
        cells = (
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
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _eta_table(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Time left",
        "",
        "| method | tokens | work done | tokens done | predicted s | actual s | error |",
        "|---" * 7 + "|",
    ]
    for r in records:
        cells = (
            r["method"],
            short_size(r["length"]),
            f"{100 * r['work']:.0f}%",
            f"{100 * r['tokens']:.0f}%",
            f"{r['predicted']:.1f}",
            f"{r['actual']:.1f}",
            f"{100 * r['error']:+.1f}%",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _memory_table(records: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Memory",
        "",
        "Deepest chunk over a synthetic bank; activations = peak - resident before the bank - "
        "bank.",
        "",
        "| method | tokens | bank MB | selection MB | peak MB | activations MB |",
        "|---" * 6 + "|",
    ]
    for r in records:
        sizes = [f"{r[key] / 1e6:.1f}" for key in ("bank", "selection", "peak", "activations")]
        lines.append("| " + " | ".join([r["method"], short_size(r["length"]), *sizes]) + " |")
    return lines
