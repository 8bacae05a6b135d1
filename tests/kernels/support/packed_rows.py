"""Run the kernel checks over packed rows (kernels/rows/forms.py): their banks are rounded, the
oracle sees the rounded values as floats, the launcher the packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.rows.forms import FORMS, floats, key_floats, row_widths
from tests.kernels.support import kernel_checks


def scales_of(held: torch.Tensor, side: int) -> torch.Tensor:
    """View the scales of packed rows of K (side 0) or of V (1), to be overwritten."""
    form = FORMS[held.dtype]
    return (form.values if side else form.keys).scales(held)


def over_packed_rows(
    monkeypatch: pytest.MonkeyPatch,
    checks: ModuleType,
    *launchers: str,
    form: torch.dtype = torch.int8,
) -> list:
    """Make the checks of a module hand rows of a form to `launchers`. Returns a list that takes
    the dtype of every bank that a launcher got.
    """
    packed_of: dict[int, tuple[torch.Tensor, int]] = {}
    alive: list[torch.Tensor] = []
    seen: list[torch.dtype] = []

    def make_bank(
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        layout: str,
        device: str,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        shape = batch, kv_heads, capacity, head_dim
        # a row of zeros, one of a large element, and subnormal ones among normal rows
        rows = torch.randn(2, *shape, generator=generator)
        rows[:, :, :, 0] = 0.0
        rows[:, :, :, 1 % capacity, 0] = 8.0
        rows[:, :, :, 2 % capacity] *= 1e-42
        found = []
        widths = row_widths(head_dim, form)
        memory = torch.empty(batch, capacity, kv_heads * sum(widths), dtype=form)
        parts = memory.split([kv_heads * width for width in widths], -1)
        for side, one in enumerate(rows):
            held = (FORMS[form].values if side else FORMS[form].keys).pack(one)
            if not side:
                # scales of 8 bits: the rows as floats, sums of 14 bits times a scale, are exact
                scales_of(held, side).copy_(scales_of(held, side).bfloat16())
            if layout == "tokens":
                held = parts[side].unflatten(-1, (kv_heads, -1)).transpose(1, 2).copy_(held)
            wide = (floats(held) if side else key_floats(held)).to(device)
            packed_of[wide.data_ptr()] = held.to(device), side
            alive.append(wide)  # another tensor must not come to lie where it lay
            found.append(wide)
        return tuple(found)

    def swapped(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor) or argument.data_ptr() not in packed_of:
            return argument
        held, side = packed_of[argument.data_ptr()]
        scales_of(held, side)[argument.isnan().any(-1)] = torch.nan
        seen.append(held.dtype)
        return held

    def over(launcher: Callable) -> Callable:
        return lambda *args, **settings: launcher(*map(swapped, args), **settings)

    for module in {checks, kernel_checks}:
        monkeypatch.setattr(module, "make_bank", make_bank)
    for name in launchers:
        monkeypatch.setattr(checks, name, over(getattr(checks, name)))
    return seen
