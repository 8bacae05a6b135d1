"""Files of DuoAttention's gates: the table that its authors publish per model, and the JSON of
tools/studies/duo_gates.py, which also names the model that it was made for.

Source: mit-han-lab/duo-attention, attn_patterns/*/full_attention_heads.tsv: a line per layer, a
number per K/V head, as numpy.savetxt writes them, between tabs or spaces. The last step of training
leaves some a little outside of 0 to 1; they are clipped, as its authors do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.base.checks import found as shown
from engine.base.checks import is_number
from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from weights.errors import BadCheckpoint
from weights.jsonfile import parse, read_text

Gates = tuple[tuple[float, ...], ...]  # [layer][K/V head], each in [0, 1]
Facts = tuple[tuple[str, Any], ...]  # (name, value) of a model's numbers

FORMAT = 1
LIMIT = 4 << 20  # bytes; 128 layers of 128 heads at 25 characters a gate take 410 KB
STEP = 0.02  # of the published training, which clips before a step
MOST = 4096  # layers, and K/V heads of a layer


class Table(NamedTuple):
    """How errors speak of a table. name: the setting's; how: to get one."""

    name: str
    how: str


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


def table_text(path: Path, table: Table) -> str:
    """The text of a file. Raises SettingError where it cannot be read."""
    try:
        return read_text(path, LIMIT)
    except BadCheckpoint as error:
        raise SettingError(f"{table.name}: {error}; {table.how}") from None


def table_data(path: Path, text: str, table: Table) -> tuple[dict[str, Any], Facts]:
    """(what a JSON text holds, the numbers of the model that it names). Raises SettingError where
    it is of another kind.
    """
    name, how = table.name, table.how
    try:
        data = parse(text.encode())
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{name}: {path}: not valid JSON: {shown(str(error))}; {how}") from None
    facts = data.get("model")
    if data.get("format") != FORMAT or not isinstance(facts, dict):
        raise SettingError(
            f"{name}: {path} is no file of {name}: expected format {FORMAT} and the model's "
            f"numbers; {how}"
        )
    return data, checked_facts(tuple(sorted(facts.items())))


def gates_text(gates: Gates, config: ModelConfig, more: dict[str, Any]) -> str:
    """A JSON text of gates that were made for a model, beside what else is to be known of them."""
    data = {"format": FORMAT, "model": dict(facts_of(config)), **more, "gates": gates}
    return json.dumps(data, indent=1) + "\n"


def facts_of(config: ModelConfig) -> Facts:
    """What a file of gates says of its model: the numbers that tell models of one shape of gates
    apart.
    """
    return (
        ("head_dim", config.head_dim),
        ("heads", config.num_heads),
        ("hidden_size", config.hidden_size),
        ("kv_heads", config.num_kv_heads),
        ("layers", config.num_layers),
        ("model_type", config.model_type),
        ("vocab_size", config.vocab_size),
    )


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


def checked_facts(facts: Any) -> Facts:
    """Pairs of a name and a number or text. Raises SettingError where they are none."""
    pairs = facts if isinstance(facts, (list, tuple)) and len(facts) < 100 else (None,)
    for pair in pairs:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise SettingError(
                f"made_for: found {shown(facts)}, expected pairs of a name and a value"
            )
        if isinstance(pair[1], bool) or not isinstance(pair[1], (int, str)):
            raise SettingError(f"made_for: found {shown(pair)}, expected a whole number or a text")
    return tuple((name, value) for name, value in pairs)


def require_model(gates: Gates, facts: Facts, config: ModelConfig, table: Table = GATES) -> None:
    """Raise SettingError where gates are another model's."""
    name, how = table.name, table.how
    mine = config.num_layers, config.num_kv_heads
    theirs = len(gates), len(gates[0])
    if theirs != mine:
        raise SettingError(
            f"{name}: found those of a model with {theirs[0]} layers of {theirs[1]} K/V heads, "
            f"expected {mine[0]} layers of {mine[1]}, as this model has ({config.family}); {how}"
        )
    known = dict(facts_of(config))
    for fact, value in facts:
        if fact in known and known[fact] != value:
            raise SettingError(
                f"{name}: found those of a model with {fact} {shown(value)}, expected "
                f"{shown(known[fact])}, as this model has ({config.family}); {how}"
            )


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
