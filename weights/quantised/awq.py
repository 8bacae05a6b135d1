"""AWQ ("gemm"): words packed along the outputs, in an order of their own.

W[o, i] = scales[i // g, o] * (q[i, o] - z[i // g, o]). Source: AutoAWQ, packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weights.errors import BadCheckpoint
from weights.pieces import Window
from weights.quantised.format import ALL, FLOATS, INPUTS, ROWS, Part, Settings, groups_of, unpacked
from weights.quantised.stored import Form, Stored, packed_nibbles

# nibble, low first, that holds each of a word's eight columns
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ:
    """4 bits with zero points."""

    def __init__(self, settings: Settings) -> None:
        data = settings.data
        settings.one("w_bit" if "w_bit" in data and "bits" not in data else "bits", (4,))
        old = "q_group_size" in data and "group_size" not in data
        self.group = settings.group("q_group_size" if old else "group_size")
        if not settings.flag("zero_point", True):
            settings.unsupported("zero_point", False, "true")
        version = data.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            settings.unsupported("version", version, "gemm")
        self.described = f"AWQ 4-bit, groups of {self.group}"

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """As Format."""
        if not has(base + ".qweight"):
            return None
        rows, columns = shape
        group, groups = groups_of(base, self.group, columns)
        if rows % 8 or columns % 2:
            raise BadCheckpoint(f"{base}: found {rows} x {columns}, expected multiples of 8 and 2")
        grouped = (ALL, 1) if groups == 1 else (INPUTS, group)
        return {
            ".qweight": Part(("I32",), (columns, rows // 8), ((INPUTS, 1), (ROWS, 8))),
            ".qzeros": Part(("I32",), (groups, rows // 8), (grouped, (ROWS, 8))),
            ".scales": Part(FLOATS, (groups, rows), (grouped, (ROWS, 1))),
        }

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        return Form("int4", shape[1] if self.group == -1 else self.group, True)

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """As Format."""
        group, _ = groups_of(where, self.group, window.shape[1])
        values, zeros = (
            unpacked(tensors[name], 4, 1).unflatten(1, (-1, 8))[:, :, ORDER].flatten(1)
            for name in (".qweight", ".qzeros")
        )
        scales = tensors[".scales"].float().t().contiguous()
        group = min(group, window.own[1])
        offsets = -zeros.t().float() * scales
        return Stored("int4", packed_nibbles(values.to(torch.uint8).t()), scales, group, offsets)

    def spare(self, name: str) -> bool:
        """As Format."""
        return False
