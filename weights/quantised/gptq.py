"""GPTQ: words packed along the inputs, zeros along the outputs, act-order in g_idx.

W[o, i] = scales[g(i), o] * (q[i, o] - z[g(i), o]); version 1 of the format stores z - 1. Source:
GPTQModel, qlinear/__init__.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weights.errors import BadCheckpoint
from weights.pieces import Window, places_in
from weights.quantised.format import (
    ALL,
    FLOATS,
    GROUPS,
    INPUTS,
    ROWS,
    Part,
    Settings,
    groups_of,
    unpacked,
)
from weights.quantised.stored import Form, Stored, packed_nibbles


class GPTQ:
    """4 and 8 bits, symmetric or not, groups or whole columns, act-order."""

    def __init__(self, settings: Settings) -> None:
        self.bits = settings.one("bits", (4, 8))
        self.group = settings.group()
        # the columns of one group have no order
        self.permuted = settings.flag("desc_act", False) and self.group != -1
        self.symmetric = settings.flag("sym", True)
        key = "checkpoint_format" if "checkpoint_format" in settings.data else "format"
        self.add = 1 if settings.one(key, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
        if settings.data.get("dynamic"):
            settings.unsupported("dynamic", settings.data["dynamic"], "nothing")
        order = ", act-order" if self.permuted else ""
        self.described = f"GPTQ {self.bits}-bit, groups of {self.group}{order}"

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """As Format."""
        if not has(base + ".qweight"):
            return None
        rows, columns = shape
        _, groups = groups_of(base, self.group, columns)
        if columns * self.bits % 32 or rows * self.bits % 32:
            raise BadCheckpoint(
                f"{base}: found {rows} x {columns}, expected multiples of {32 // self.bits}"
            )
        inputs, outputs = (INPUTS, 32 // self.bits), (ROWS, 32 // self.bits)
        grouped = (ALL, 1) if groups == 1 else (GROUPS, columns // groups)
        found = {
            ".qweight": Part(("I32",), (columns * self.bits // 32, rows), (inputs, (ROWS, 1))),
            ".qzeros": Part(("I32",), (groups, rows * self.bits // 32), (grouped, outputs)),
            ".scales": Part(FLOATS, (groups, rows), (grouped, (ROWS, 1))),
        }
        if self.permuted or has(base + ".g_idx"):
            found[".g_idx"] = Part(("I32",), (columns,))
        return found

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        group = shape[1] if self.group == -1 else self.group
        offsets = self.bits == 4 or not self.symmetric
        return Form("int4" if self.bits == 4 else "int8", group, offsets, self.permuted)

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """As Format."""
        group, groups = groups_of(where, self.group, window.shape[1])
        middle = 1 << (self.bits - 1)
        values = unpacked(tensors[".qweight"], self.bits, 0).to(torch.uint8).t()
        zeros = unpacked(tensors[".qzeros"], self.bits, 1) + self.add
        # a zero of 2^bits - 1 was stored as 2^bits - 2; one of 0 wraps
        zeros &= (1 << self.bits) - 1
        scales = tensors[".scales"].float().t().contiguous()
        if self.symmetric and not bool((zeros == middle).all()):
            raise BadCheckpoint(
                f"{where}: qzeros: found zeros from {int(zeros.min())} to {int(zeros.max())}, "
                f"expected {middle} everywhere: sym is true"
            )
        order = None
        if ".g_idx" in tensors:
            order = self.order(where, tensors[".g_idx"].long(), window.shape[1])
            if self.permuted:
                own = order[slice(*window.columns)]
                values = values[:, places_in(window.inputs, own)]
            order = order if self.permuted and window.all_columns else None
        group = min(group, values.shape[1])
        offsets = -zeros.t().float() * scales
        if self.bits == 4:
            return Stored("int4", packed_nibbles(values), scales, group, offsets, order)
        signed = (values.contiguous() ^ 128).view(torch.int8)
        if self.symmetric:
            return Stored("int8", signed, scales, group, None, order)
        return Stored("int8", signed, scales, group, offsets + 128 * scales, order)

    def order(self, where: str, index: torch.Tensor, columns: int) -> torch.Tensor:
        """The inputs of a matrix in the order of their groups, by its g_idx int64 [columns]. Raises
        BadCheckpoint for one that has none.
        """
        group, groups = groups_of(where, self.group, columns)
        inside = bool(((index >= 0) & (index < groups)).all())
        if not inside or not bool((torch.bincount(index, minlength=groups) == group).all()):
            raise BadCheckpoint(
                f"{where}: g_idx: found other groups than {groups} of {group} inputs each"
            )
        order = torch.argsort(index, stable=True)
        if not self.permuted and not torch.equal(order, torch.arange(len(order))):
            raise BadCheckpoint(f"{where}: g_idx: found inputs out of order, but desc_act is false")
        return order

    def spare(self, name: str) -> bool:
        """As Format."""
        return False
