"""compressed-tensors: packed 4 and 8 bits (W4A16, W8A16), int8 (W8A8) and FP8.

W = (q - zero) * scale. Packed: element i of a row at bit i * bits of the row's words, q plus
2^(bits - 1); zeros are packed the same way along the rows. Source: compressed_tensors 0.20,
compressors/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import shown
from weights.pieces import Window
from weights.quantised.format import ALL, FLOATS, INPUTS, ROWS, Part, Settings, groups_of, unpacked
from weights.quantised.stored import Form, Stored, packed_nibbles

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")


class CompressedTensors:
    """One scheme for all matrices; which of them are quantised, the tensors say."""

    def __init__(self, settings: Settings) -> None:
        groups = settings.data.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            settings.refuse("config_groups", groups, "an object of schemes")
        schemes = []
        for name, group in groups.items():
            if not isinstance(group, dict):
                settings.unsupported(f"config_groups.{shown(name, 30)}", group, "a scheme in full")
            schemes.append(group.get("weights"))
        if any(scheme != schemes[0] for scheme in schemes):
            settings.unsupported("config_groups", f"{len(schemes)} schemes", "one for all weights")
        where = f"{settings.prefix}config_groups.{shown(next(iter(groups)), 30)}.weights."
        scheme = Settings(schemes[0], settings.source, where)
        self.format = settings.one("format", FORMATS, groups[next(iter(groups))].get("format"))
        self.kind = scheme.one("type", ("int", "float"), "int")
        self.bits = scheme.one("num_bits", (8,) if self.kind == "float" else (4, 8))
        self.strategy = scheme.one("strategy", STRATEGIES)
        self.symmetric = scheme.flag("symmetric", True)
        self.packed = self.format == "pack-quantized"
        if self.packed and self.kind == "float" or self.bits == 4 and not self.packed:
            settings.unsupported("format", self.format, f"the one of {self.bits}-bit {self.kind}")
        if not self.symmetric and not self.packed:
            scheme.unsupported("symmetric", False, "true")
        if self.strategy == "block" and self.kind == "int":
            scheme.unsupported("strategy", "block", "tensor, channel or group")
        self.group = scheme.group() if self.strategy == "group" else -1
        self.block = (1, 1)
        if self.strategy == "block":
            block = scheme.data.get("block_structure")
            if (
                not isinstance(block, list)
                or len(block) != 2
                or not all(type(side) is int and 1 <= side <= 1 << 16 for side in block)
            ):
                scheme.refuse("block_structure", block, "two sizes such as [128, 128]")
            self.block = (block[0], block[1])
        if settings.data.get("kv_cache_scheme") is not None:
            settings.unsupported("kv_cache_scheme", "a scheme", "null")
        grouped = f", groups of {self.group}" if self.group > 0 else f", per {self.strategy}"
        self.described = f"compressed-tensors {self.kind}{self.bits}{grouped}"

    def _scale_shape(self, base: str, shape: tuple[int, int]) -> tuple[int, ...]:
        rows, columns = shape
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "block":
            return (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return (rows, groups_of(base, self.group, columns)[1])

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """As Format."""
        if not has(base + ".weight_scale"):
            return None
        if has(base + ".weight_g_idx"):
            raise UnsupportedCheckpoint(
                f"{base}: found weight_g_idx, expected none (act-order of old files, not supported)"
            )
        rows, columns = shape
        scales, per = self._scale_shape(base, shape), 32 // self.bits
        grouped, whole = self._axis(base, shape), (ROWS, 1)
        high = (ROWS, self.block[0] if self.strategy == "block" else 1)
        axes = () if self.strategy == "tensor" else (high, grouped)
        found = {".weight_scale": Part(FLOATS, scales, axes)}
        if not self.packed:
            dtype = "I8" if self.kind == "int" else "F8_E4M3"
            return {".weight": Part((dtype,), shape, (whole, (INPUTS, 1))), **found}
        if columns % 2:
            raise BadCheckpoint(f"{base}: found rows of {columns}, expected an even number")
        words = rows, -(-columns * self.bits // 32)
        found[".weight_packed"] = Part(("I32",), words, (whole, (INPUTS, per)))
        found[".weight_shape"] = Part(("I64", "I32"), (2,))
        if not self.symmetric:
            zeros = -(-rows * self.bits // 32), *scales[1:]
            found[".weight_zero_point"] = Part(("I32",), zeros, ((ROWS, per), grouped))
        return found

    def _axis(self, base: str, shape: tuple[int, int]) -> tuple[str, int]:
        """What the scales' second dimension is."""
        if self.strategy == "block":
            return INPUTS, self.block[1]
        group, groups = groups_of(base, self.group, shape[1])
        return (ALL, 1) if groups == 1 else (INPUTS, group)

    def form(self, shape: tuple[int, int]) -> Form:
        """As Format."""
        if self.kind == "float":
            return Form(
                "fp8", min(self.block[1] if self.strategy == "block" else shape[1], shape[1])
            )
        group = shape[1] if self.group == -1 else self.group
        if self.bits == 4:
            return Form("int4", group, True)
        return Form("int8", group, not self.symmetric)

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """As Format."""
        whole, shape = window.shape, window.own
        scales = tensors[".weight_scale"].float()
        group = min(self.form(whole).group, shape[1])
        if self.strategy == "tensor":
            scales = scales.view(1, 1).expand(shape[0], 1).contiguous()
        elif self.strategy == "block":
            scales = scales.repeat_interleave(self.block[0], 0)[: shape[0]].contiguous()
        if not self.packed:
            kind = "int8" if self.kind == "int" else "fp8"
            return Stored(kind, tensors[".weight"], scales, group)
        if tensors[".weight_shape"].tolist() != list(whole):
            raise BadCheckpoint(
                f"{where}: weight_shape: found {tensors['.weight_shape'].tolist()}, "
                f"expected {list(whole)}"
            )
        values = unpacked(tensors[".weight_packed"], self.bits, 1)[:, : shape[1]].to(torch.uint8)
        middle = 1 << (self.bits - 1)
        zeros = torch.full_like(scales, middle)
        if not self.symmetric:
            zeros = unpacked(tensors[".weight_zero_point"], self.bits, 0)[: shape[0]].float()
        if self.bits == 4:
            return Stored("int4", packed_nibbles(values), scales, group, -zeros * scales)
        signed = (values.contiguous() ^ 128).view(torch.int8)
        offsets = None if self.symmetric else (middle - zeros) * scales
        return Stored("int8", signed, scales, group, offsets)

    def spare(self, name: str) -> bool:
        """As Format."""
        return name.endswith((".input_scale", ".output_scale", ".input_zero_point"))
