"""The table of a comparison over other banks: bytes, accuracy in both turns, what it loses to the
same method over floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.common.page import table
from tools.common.records import Record
from tools.compare.stats import against, by_question, pooled

NOTE = """A bank's bytes are of all keys and values as a share of bfloat16, wherever they lie; the
float bank's are of the dtype that ran. "(simulated)": rows are rounded as the format rounds them
and stay floats, and the bytes are those that it would take: codes, scales, zeros, elements kept
apart, factors, and the newest 32 to 63 tokens in 16 bits. A simulated bank holds the document's
rows rounded after it was read; `int8` is the engine's own, and reads the document rounded. Both
read the questions over rounded rows. In brackets: points against the same method over floats on
the same questions, with the 95% interval."""


def over_banks(
    records: Sequence[Record], rows: Sequence[dict[str, Any]], config: dict[str, Any], length: int
) -> list[str]:
    """Lines of the section for one length; none where no bank was asked for."""
    banks: dict[str, list[str]] = {}  # {label over floats: labels over banks}
    shares = {}
    for label, by in config["variants"].items():
        facts = by.get(str(length), {})
        if facts.get("bank"):
            banks.setdefault(label[: label.rindex(" on ")], []).append(label)
            shares[label] = facts["held"]["resident"]
    lines: list[str] = []
    for plain, labels in banks.items():
        lines += [
            "",
            f"## {length:,} tokens: {plain} over other banks",
            "",
        ]
        cells = []
        own = {"float32": 2.0}.get(config["dtype"], 1.0)
        for label in [plain, *sorted(labels, key=lambda label: -shares[label])]:
            here = [r for r in rows if r["variant"] == label and r["length"] == length]
            if here:
                shown = label[len(plain) + 4 :] or config["dtype"]
                cells.append(_cells(shown, shares.get(label, own), label, plain, records, here))
        head = "bank | bytes of bfloat16 | first questions | second questions | top-1 | KL"
        lines += table(head, cells)
    return [*lines, "", NOTE] if lines else []


def _cells(
    shown: str,
    share: float,
    label: str,
    plain: str,
    records: Sequence[Record],
    here: Sequence[dict[str, Any]],
) -> tuple[str, ...]:
    """One bank."""
    length, cells = here[0]["length"], []
    asked = [r for r in records if r["length"] == length]
    for turn in (1, 2):
        found = [row for row in here if row["turn"] == turn]
        lost = against(by_question(asked, label, turn), by_question(asked, plain, turn))
        beside = "" if label == plain or lost is None else f" ({lost.points()})"
        cells.append(f"{pooled(found)['accuracy']:.3f}{beside}" if found else "")
    first = pooled([row for row in here if row["turn"] == 1])
    top1, kl = first["top1"], first["kl"]
    agreed = ("" if top1 is None else f"{top1:.3f}", "" if kl is None else f"{kl:.4f}")
    return shown, f"{share:.3f}", *cells, *agreed
