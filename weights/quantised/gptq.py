"""GPTQ: words packed along the inputs, zeros along the outputs, act-order in g_idx.

W[o, i] = scales[g(i), o] * (q[i, o] - z[g(i), o]); version 1 of the format stores z - 1. Source:
GPTQModel, qlinear/__init__.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weights.errors import BadCheckpoint
from weights.quantised.format import FLOATS, Part, Settings, groups_of, unpacked
from weights.quantised.stored import Form, Stored, packed_nibbles


class GPTQ:
    """4 and 8 bits, symmetric or not, groups or whole columns, act-order."""

    def __init__(self, settings: Settings) -> None:
        self.bits = settings.one("bits", (4, 8))
        self.group = settings.group()
        self.permuted = settings.flag("desc_act", False)
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
        found = {
            ".qweight": Part(("I32",), (columns * self.bits // 32, rows)),
            ".qzeros": Part(("I32",), (groups, rows * self.bits // 32)),
            ".scales": Part(FLOATS, (groups, rows)),
        }
        if self.permuted or has(base + ".g_idx"):
            found[".g_idx"] = Part(("I32",), (columns,))
        return found

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        group = shape[1] if self.group == -1 else self.group
        offsets = self.bits == 4 or not self.symmetric
        return Form("int4" if self.bits == 4 else "int8", group, offsets, self.permuted)

    def read(
        self, where: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> Stored:
        """As Format."""
        group, groups = groups_of(where, self.group, shape[1])
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
            order = self._order(where, tensors[".g_idx"].long(), group, groups)
            values = values[:, order]
            order = order if self.permuted else None
        offsets = -zeros.t().float() * scales
        if self.bits == 4:
            return Stored("int4", packed_nibbles(values), scales, group, offsets, order)
        signed = (values.contiguous() ^ 128).view(torch.int8)
        if self.symmetric:
            return Stored("int8", signed, scales, group, None, order)
        return Stored("int8", signed, scales, group, offsets + 128 * scales, order)

    def _order(self, where: str, index: torch.Tensor, group: int, groups: int) -> torch.Tensor:
        """The inputs in the order of their groups."""
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
