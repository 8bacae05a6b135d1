"""FP8 of the DeepSeek and Qwen kind: float8_e4m3fn with a scale for each block of the matrix.

W = q * weight_scale_inv, despite its name. Source: transformers,
quantizer_finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weights.pieces import Window
from weights.quantised.format import FLOATS, INPUTS, ROWS, Part, Settings
from weights.quantised.stored import Form, Stored

SIDE = 1 << 16  # a block's rows and columns, at most


class FP8Blocks:
    """Blocks of any size; activations are not quantised here, which is at least as exact."""

    def __init__(self, settings: Settings) -> None:
        block = settings.data.get("weight_block_size")
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(type(side) is int and 1 <= side <= SIDE for side in block)
        ):
            settings.refuse("weight_block_size", block, "two sizes such as [128, 128]")
        settings.one("fmt", ("e4m3",), "e4m3")
        self.rows, self.columns = block
        self.described = f"FP8, blocks of {self.rows} x {self.columns}"

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """As Format."""
        if not has(base + ".weight_scale_inv"):
            return None
        counts = (-(-shape[0] // self.rows), -(-shape[1] // self.columns))
        return {
            ".weight": Part(("F8_E4M3",), shape, ((ROWS, 1), (INPUTS, 1))),
            ".weight_scale_inv": Part(FLOATS, counts, ((ROWS, self.rows), (INPUTS, self.columns))),
        }

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        return Form("fp8", min(self.columns, shape[1]))

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """As Format."""
        scales = tensors[".weight_scale_inv"].float().repeat_interleave(self.rows, 0)
        rows, columns = window.own  # whole blocks, but for the matrix's last
        return Stored(
            "fp8", tensors[".weight"], scales[:rows].contiguous(), min(self.columns, columns)
        )

    def spare(self, name: str) -> bool:
        """As Format."""
        return name.endswith(".input_scale")
