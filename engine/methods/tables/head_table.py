"""What files of tables [layer][K/V head] have in common: JSON texts of the tools that make them,
which name the model that they were made for by its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.base.checks import found as shown
from engine.base.errors import EngineError, SettingError
from engine.model.config.config import ModelConfig
from weights.errors import BadCheckpoint
from weights.fingerprint import fingerprint
from weights.jsonfile import parse, present, read_text

Facts = tuple[tuple[str, Any], ...]  # (name, value) of a model's numbers

FORMAT = 1
LIMIT = 4 << 20  # bytes; 128 layers of 128 heads at 25 characters a gate take 410 KB
MOST = 4096  # layers, and K/V heads of a layer


class Table(NamedTuple):
    """How errors speak of a table. name: the setting's; how: to get one."""

    name: str
    how: str


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


def facts_of(config: ModelConfig) -> Facts:
    """What a table's file says of its model: the numbers that tell models of one shape apart."""
    return (
        ("head_dim", config.head_dim),
        ("heads", config.num_heads),
        ("hidden_size", config.hidden_size),
        ("kv_heads", config.num_kv_heads),
        ("layers", config.num_layers),
        ("model_type", config.model_type),
        ("vocab_size", config.vocab_size),
    )


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


def require_folder(path: Path, data: dict[str, Any], table: Table) -> None:
    """Raise SettingError where a file names the weights that it was made for and lies beside
    others.
    """
    made_for = data.get("fingerprint")
    if made_for is None or not present(path.parent / "config.json"):
        return
    mine = _fingerprint(path.parent)
    if mine and made_for != mine:
        raise SettingError(
            f"{table.name}: {path}: made for a model with fingerprint {shown(made_for)[:14]}, "
            f"beside one with {mine[:12]}; {table.how}"
        )


def _fingerprint(folder: Path) -> str:
    """The fingerprint of a model's folder; "" where its tensors do not lie there."""
    try:
        return fingerprint(folder)
    except (EngineError, OSError):
        return ""


def require_model(
    rows: Sequence[Sequence[Any]], facts: Facts, config: ModelConfig, table: Table
) -> None:
    """Raise SettingError where a table [layer][K/V head] is another model's."""
    name, how = table.name, table.how
    mine = config.num_layers, config.num_kv_heads
    theirs = len(rows), len(rows[0])
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
