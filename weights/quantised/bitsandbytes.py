"""bitsandbytes: nf4 and fp4 with a table of 16 values, and int8 with a scale per row.

nf4: W = table[nibble] * absmax[element // blocksize], the high nibble first; absmax may itself be
8-bit codes of a second table. int8: W = q * SCB / 127. Source: bitsandbytes, functional.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import parse, shown
from weights.pieces import Window, divided, numbers_of
from weights.quantised.format import ALL, INPUTS, ROWS, Part, Settings
from weights.quantised.stored import Form, Stored

STATE = ".weight.quant_state.bitsandbytes__"
STATE_LIMIT = 4096  # bytes of its JSON
BLOCK, NESTED = 64, 256  # elements under one absmax, absmaxes under one of theirs


class NF4:
    """4 bits, nf4 or fp4: indices into a table of 16 floats, one absmax per block."""

    def __init__(self, settings: Settings) -> None:
        self.kind = settings.one("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self.nested = settings.flag("bnb_4bit_use_double_quant", False)
        storage = settings.data.get("bnb_4bit_quant_storage", "uint8")
        if storage != "uint8":
            settings.unsupported("bnb_4bit_quant_storage", storage, "uint8")
        self.described = f"bitsandbytes {self.kind}"

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """As Format."""
        if not has(base + ".weight.absmax"):
            return None
        rows, columns = shape
        if columns % BLOCK:
            raise UnsupportedCheckpoint(
                f"{base}: found rows of {columns}, expected a multiple of its blocks of {BLOCK} "
                "(blocks across rows are not supported)"
            )
        blocks = rows * columns // BLOCK
        found = {
            ".weight": Part(("U8",), (rows * columns // 2, 1), ((ROWS, 1), (INPUTS, 2))),
            ".weight.absmax": Part(
                ("U8",) if self.nested else ("F32",), (blocks,), ((ROWS, 1), (INPUTS, BLOCK))
            ),
            ".weight.quant_map": Part(("F32",), (16,)),
            STATE + self.kind: Part(("U8",), (-STATE_LIMIT,)),
        }
        if self.nested:
            found[".weight.nested_absmax"] = Part(("F32",), (-(-blocks // NESTED),))
            found[".weight.nested_quant_map"] = Part(("F32",), (256,))
        return found

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        return Form("int4", BLOCK, table=True)

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """As Format."""
        state = self._state(where, tensors[STATE + self.kind], window.shape)
        rows, scales = window.own[0], tensors[".weight.absmax"]
        if self.nested:
            # absmaxes are numbered through, row by row
            row, column = numbers_of(window.rows), numbers_of(divided(window.inputs, BLOCK))
            number = row[:, None] * (window.shape[1] // BLOCK) + column
            outer = tensors[".weight.nested_absmax"][number // NESTED]
            codes = tensors[".weight.nested_quant_map"][scales.view(rows, -1).long()]
            scales = codes * outer + float(state["nested_offset"])
        packed = tensors[".weight"].view(rows, -1)
        turned = (packed >> 4) | (packed << 4)
        table = tensors[".weight.quant_map"].clone()
        return Stored("int4", turned, scales.view(rows, -1).clone(), BLOCK, table=table)

    def _state(self, where: str, raw: torch.Tensor, shape: tuple[int, int]) -> dict[str, Any]:
        """The JSON of a quant_state, checked against what the shapes already said."""
        try:
            state = parse(bytes(raw.tolist()))
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict):
            raise BadCheckpoint(f"{where}: quant_state: found no JSON object")
        expected: dict[str, Any] = {"blocksize": BLOCK, "shape": list(shape)}
        expected["quant_type"] = self.kind
        if self.nested:
            expected["nested_blocksize"] = NESTED
        for key, value in expected.items():
            if state.get(key) != value:
                raise BadCheckpoint(
                    f"{where}: quant_state.{key}: found {shown(state.get(key))}, "
                    f"expected {json.dumps(value)}"
                )
        offset = state.get("nested_offset", 0.0)
        if self.nested and (not isinstance(offset, (int, float)) or not math.isfinite(offset)):
            raise BadCheckpoint(
                f"{where}: quant_state.nested_offset: found {shown(offset)}, expected a number"
            )
        return state

    def spare(self, name: str) -> bool:
        """As Format."""
        return False


class Int8:
    """LLM.int8(): whole rows; its outliers are of the activations, which stay as they are here."""

    described = "bitsandbytes int8"

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """As Format.parts."""
        if not has(base + ".SCB"):
            return None
        return {
            ".weight": Part(("I8",), shape, ((ROWS, 1), (INPUTS, 1))),
            ".SCB": Part(("F32",), (shape[0],), ((ROWS, 1), (ALL, 1))),
        }

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        return Form("int8", shape[1])

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """As Format."""
        scales = tensors[".SCB"].view(-1, 1) / 127
        return Stored("int8", tensors[".weight"], scales, window.own[1])

    def spare(self, name: str) -> bool:
        """As Format."""
        return name.endswith(".weight_format")
