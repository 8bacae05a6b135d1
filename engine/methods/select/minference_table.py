"""Files of MInference's patterns: the tables that its authors publish, and those of
tools/calibrate/minference.py.

Source: microsoft/MInference (minference/configs/*_best_pattern*.json, read in
minference_forward.py): a list with an object per layer, {"head": [kind, size, size, score]}. Its
kinds are "vertical_and_slash" (columns, diagonals), "stream_llm" (sink, window) and "block_sparse",
for which its kernel reads 100 blocks whatever the sizes say. Heads that a layer does not name have
the default pattern.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.base.errors import SettingError
from engine.methods.select.minference_patterns import DEFAULT, Pattern, checked
from weights.errors import BadCheckpoint
from weights.jsonfile import read_json

KINDS = {"vertical_and_slash": "vertical_slash", "stream_llm": "a_shape"}
BLOCKS = ("block_sparse", 100)
MOST = 4096  # layers, and heads of a layer


def read_table(path: Path) -> tuple[tuple[Pattern, ...], ...]:
    """Patterns [layer][query head] of a JSON file: a published table, or what the search wrote.

    Raises SettingError where it is neither.
    """
    try:
        found = read_json(path)
    except BadCheckpoint as error:
        raise SettingError(f"patterns: {error}") from None
    if isinstance(found, dict):
        return _searched(path, found.get("patterns"))
    if not isinstance(found, list) or not 0 < len(found) <= MOST:
        raise _unknown(path, "expected a list with an object per layer")
    layers = [_heads(path, number, layer) for number, layer in enumerate(found)]
    count = 1 + max((head for layer in layers for head in layer), default=-1)
    if not count:
        raise _unknown(path, "found no head in any layer")
    return tuple(tuple(layer.get(head, DEFAULT) for head in range(count)) for layer in layers)


def _heads(path: Path, number: int, layer: Any) -> dict[int, Pattern]:
    """{head: pattern} of one layer of a published table."""
    if not isinstance(layer, dict):
        raise _unknown(path, f"expected an object for layer {number}")
    heads: dict[int, Pattern] = {}
    for name, entry in layer.items():
        if not (len(name) < 5 and name.isascii() and name.isdigit() and int(name) < MOST):
            raise _unknown(path, f"layer {number}: found head {name[:20]!r}, expected its number")
        if not isinstance(entry, list) or len(entry) not in (3, 4):
            raise _unknown(path, f"layer {number}, head {name}: expected [kind, size, size, score]")
        kind, *given = entry[:3]
        if kind == BLOCKS[0]:
            heads[int(name)] = BLOCKS
        elif isinstance(kind, str) and kind in KINDS:
            heads[int(name)] = checked((KINDS[kind], *given))
        else:
            raise _unknown(
                path,
                f"layer {number}, head {name}: found the kind {str(kind)[:40]!r}, expected one of "
                f"{', '.join((*KINDS, BLOCKS[0]))}",
            )
    return heads


def _searched(path: Path, rows: Any) -> tuple[tuple[Pattern, ...], ...]:
    """The table of tools/calibrate/minference.py."""
    if not (isinstance(rows, list) and rows and all(isinstance(r, list) and r for r in rows)):
        raise _unknown(path, 'expected "patterns", a list of heads per layer')
    if len(rows) > MOST or max(map(len, rows)) > MOST:
        raise _unknown(path, f"found more than {MOST} layers or heads")
    return tuple(tuple(map(checked, row)) for row in rows)


def _unknown(path: Path, what: str) -> SettingError:
    return SettingError(
        f"patterns: {path} is no table of MInference: {what}; make one with "
        "python -m tools.calibrate.minference, or take one from microsoft/MInference"
    )
