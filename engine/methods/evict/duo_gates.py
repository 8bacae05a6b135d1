"""Files of DuoAttention's gates: the table that its authors publish per model, and the JSON of
tools/studies/duo_gates.py, which also names the model that it was made for.

Source: mit-han-lab/duo-attention, attn_patterns/*/full_attention_heads.tsv: a line per layer, a
number per K/V head, as numpy.savetxt writes them, between tabs or spaces. The last step of training
leaves some a little outside of 0 to 1; they are clipped, as its authors do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.checks import found as shown
from engine.base.checks import is_number
from engine.base.errors import SettingError
from engine.methods.tables.head_table import (
    FORMAT,
    MOST,
    Facts,
    Table,
    facts_of,
    table_data,
    table_text,
)
from engine.model.config.config import ModelConfig

Gates = tuple[tuple[float, ...], ...]  # [layer][K/V head], each in [0, 1]

STEP = 0.02  # of the published training, which clips before a step


HOW = (
    "make them in a clone: python -m tools.studies.duo_gates --model FOLDER; or take the model's "
    "full_attention_heads.tsv from mit-han-lab/duo-attention"
)
GATES = Table("gates", HOW)


def read_gates(path: Path) -> tuple[Gates, Facts]:
    """The gates of a file, and the numbers of the model that it names; none in a published table.

    Raises SettingError where it is neither.
    """
    text = table_text(path, GATES)
    if not text.lstrip().startswith("{"):
        return checked_gates([_line(path, i, line) for i, line in enumerate(_lines(text), 1)]), ()
    data, facts = table_data(path, text, GATES)
    return checked_gates(data.get("gates")), facts


def gates_text(gates: Gates, config: ModelConfig, more: dict[str, Any]) -> str:
    """A JSON text of gates that were made for a model, beside what else is to be known of them."""
    data = {"format": FORMAT, "model": dict(facts_of(config)), **more, "gates": gates}
    return json.dumps(data, indent=1) + "\n"


def checked_gates(gates: Any, table: Table = GATES) -> Gates:
    """Gates [layer][K/V head] as tuples. Raises SettingError where they are no such table of
    numbers from 0 to 1.
    """
    name = table.name
    rows = gates if isinstance(gates, (list, tuple)) else ()
    if not 0 < len(rows) <= MOST or not all(isinstance(r, (list, tuple)) and r for r in rows):
        raise SettingError(
            f"{name}: found {shown(gates)}, expected a table [layer][K/V head] of numbers from 0 "
            "to 1, or a file that holds one"
        )
    width = len(rows[0])
    for layer, row in enumerate(rows):
        if len(row) != width or width > MOST:
            raise SettingError(
                f"{name}: found {len(row)} K/V heads in layer {layer} and {width} in layer 0, "
                f"expected equally many, at most {MOST}"
            )
        for head, gate in enumerate(row):
            if not (is_number(gate) and 0 <= gate <= 1):  # NaN is refused here too
                raise SettingError(
                    f"{name}: found {shown(gate)} for layer {layer}, K/V head {head}, expected a "
                    "number from 0 to 1"
                )
    return tuple(tuple(float(gate) for gate in row) for row in rows)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _line(path: Path, number: int, line: str) -> list[float]:
    """The numbers of one layer of a published table, clipped where they are a STEP outside."""
    try:
        gates = [float(word) for word in line.split()]
        return [min(1.0, max(0.0, x)) if -STEP <= x <= 1 + STEP else x for x in gates]
    except ValueError:
        raise SettingError(
            f"gates: {path}: found {shown(line.strip())} as layer {number}, expected a number for "
            f"each K/V head; {HOW}"
        ) from None
