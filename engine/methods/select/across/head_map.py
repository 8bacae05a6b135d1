"""Files of Kascade's anchor layers and head map: the JSON of tools/calibrate/anchors, which
names the model that it was made for, and the tables that its authors publish.

Source: microsoft/kascade, results/head_mappings/MODEL_layers_0_2_8.npy: for every layer and K/V
head the K/V head of the anchor below whose choice it reads, as numpy.save writes whole numbers; the
anchors stand in the file's name. Nothing of such a file is evaluated: its header must be the one
that numpy writes, and its sizes are held against the file's before a number is read.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.base.checks import found as shown
from engine.base.checks import is_integer
from engine.base.errors import SettingError
from engine.methods.select.across.by_logits import checked_layers
from engine.methods.tables.head_table import (
    FORMAT,
    LIMIT,
    MOST,
    Facts,
    Table,
    facts_of,
    require_folder,
    table_data,
    table_text,
)
from engine.model.config.config import ModelConfig
from weights.errors import BadCheckpoint
from weights.jsonfile import read_bytes

HeadMap = tuple[tuple[int, ...], ...]  # [layer][K/V head] -> a K/V head of the anchor below

NAME = "kascade.json"
HOW = (
    "make them in a clone: python -m tools.calibrate.anchors --model FOLDER; or take the model's "
    ".npy from microsoft/kascade"
)
MAP = Table("head_map", HOW)
MAGIC = b"\x93NUMPY"
HEADER = re.compile(
    r"\{'descr': '[<|]([iu])([1248])', 'fortran_order': (False|True), "
    r"'shape': \((\d{1,9}), (\d{1,9})\), \} *\n"
)
LONGEST = 4096  # bytes of a header: numpy's own of a table has 118
LETTERS = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def read_map(path: Path) -> tuple[HeadMap, tuple[int, ...] | None, Facts]:
    """The map of a file, its anchors (None where it names none), and the numbers of the model that
    it names. Raises SettingError where it is no such file, or lies beside another model.
    """
    if path.suffix == ".npy":
        return read_npy(path), _anchors_in(path.name), ()
    data, facts = table_data(path, table_text(path, MAP), MAP)
    require_folder(path, data, MAP)
    return checked_map(data.get("head_map")), checked_layers("anchors", data.get("anchors")), facts


def map_text(
    anchors: Sequence[int], table: HeadMap, config: ModelConfig, more: dict[str, Any]
) -> str:
    """A JSON text of what was found for a model, beside what else is to be known of it."""
    data = {"format": FORMAT, "model": dict(facts_of(config)), **more}
    return json.dumps(data | {"anchors": list(anchors), "head_map": table}, indent=1) + "\n"


def read_npy(path: Path) -> HeadMap:
    """The table [layers][K/V heads] of a .npy file of whole numbers. Raises SettingError where it
    is none, or its size is not what its header says.
    """
    try:
        data = read_bytes(path, LIMIT)
    except BadCheckpoint as error:
        raise SettingError(f"head_map: {error}; {HOW}") from None
    wide = data[6:7] != b"\1"  # the length of a header has 2 bytes in version 1, 4 in 2 and 3
    first = 12 if wide else 10
    if data[:6] != MAGIC or data[6:7] not in (b"\1", b"\2", b"\3") or len(data) < first:
        raise SettingError(f"head_map: {path}: found no .npy file; {HOW}")
    begin = first + struct.unpack("<I" if wide else "<H", data[8:first])[0]
    text = data[first : min(begin, first + LONGEST)].decode("latin-1")
    header = HEADER.fullmatch(text)
    if header is None:
        raise SettingError(
            f"head_map: {path}: found the header {shown(text.strip())}, expected a table of whole "
            f"numbers of two dimensions; {HOW}"
        )
    kind, size, turned, *shape = header.groups()
    rows, columns = map(int, shape)
    if not (0 < rows <= MOST and 0 < columns <= MOST):
        raise SettingError(
            f"head_map: {path}: found {rows} x {columns} numbers, expected at most {MOST} layers "
            f"of {MOST} K/V heads, and one"
        )
    if len(data) - begin != rows * columns * int(size):
        raise SettingError(
            f"head_map: {path}: found {len(data) - begin:,} bytes of numbers, expected "
            f"{rows * columns * int(size):,} ({rows} x {columns} of {size})"
        )
    flat = struct.unpack(f"<{rows * columns}{LETTERS[kind + size]}", data[begin:])
    if turned == "True":
        return checked_map([flat[row::rows] for row in range(rows)])
    return checked_map([flat[at : at + columns] for at in range(0, len(flat), columns)])


def checked_map(table: Any) -> HeadMap:
    """The map as tuples. Raises SettingError where it is no table [layer][K/V head] of numbers of
    K/V heads.
    """
    rows = table if isinstance(table, (list, tuple)) else ()
    if not 0 < len(rows) <= MOST or not all(isinstance(r, (list, tuple)) and r for r in rows):
        raise SettingError(
            f"head_map: found {shown(table)}, expected for every layer and K/V head the K/V head "
            "of the anchor whose choice it reads, or a file that holds them"
        )
    width = len(rows[0])
    for layer, row in enumerate(rows):
        if len(row) != width or width > MOST:
            raise SettingError(
                f"head_map: found {len(row)} K/V heads in layer {layer} and {width} in layer 0, "
                f"expected equally many, at most {MOST}"
            )
        for head, taken in enumerate(row):
            if not is_integer(taken) or not 0 <= taken < width:
                raise SettingError(
                    f"head_map: found {shown(taken)} for layer {layer}, K/V head {head}, expected "
                    f"a K/V head from 0 to {width - 1}"
                )
    return tuple(map(tuple, rows))


def _anchors_in(name: str) -> tuple[int, ...] | None:
    """The anchors that a published file's name tells."""
    told = re.search(r"_layers((?:_\d{1,4}){1,64})\.npy$", name)
    return (
        None
        if told is None
        else checked_layers("anchors", [int(n) for n in told[1].split("_")[1:]])
    )
