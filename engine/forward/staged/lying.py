"""A matrix as the tensors that it consists of, and the same matrix made of copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch

from engine.base.errors import SettingError
from kernels.layer.linear import Linear
from kernels.layer.native_product import Product
from kernels.quant.linear import QuantisedLinear
from kernels.quant.matrix import Quantised
from kernels.quant.native import Panels
from kernels.quant.words import Words

Matrix = Linear | QuantisedLinear
ALIGN = 256  # bytes: what a GPU's kernels read begins on such an address
# forms that are nothing but tensors; those of torch's own CPU products are opaque or in tiles
FLOATS = ("plain", "left", "narrow", "widened")
FEW_BITS = ("words", "native", "blocks", "int8pack")


def require_movable(matrix: Matrix) -> None:
    """Raise SettingError for a matrix in a form that cannot lie elsewhere."""
    forms = FLOATS if isinstance(matrix, Linear) else FEW_BITS
    if matrix.form not in forms:
        raise SettingError(
            f"weights_offload: found a matrix in the form {matrix.form!r} of torch's CPU products, "
            "which cannot be moved; use weights_offload='off', or install a C++ compiler"
        )


def tensors(matrix: Matrix) -> list[torch.Tensor]:
    """Return what a matrix consists of, each contiguous; `lying_in` takes as many."""
    found = [matrix.bias] if matrix.bias is not None else []
    if isinstance(matrix, Linear):
        return [matrix.weight, *found]
    if matrix.permutation is not None:
        found.append(matrix.permutation)
    for held in (matrix.stored, matrix.words, matrix.panels):
        if isinstance(held, Words) and held.joined and held.offsets is not None:
            # an offset lies behind its scale, in one word
            found += [held.values, torch.stack((held.scales, held.offsets), -1)]
        elif held is not None:
            found += [getattr(held, name) for name in _names(held)]
    return [tensor.contiguous() for tensor in found]


def lying_in(matrix: Matrix, parts: Sequence[torch.Tensor]) -> Matrix:
    """Return the same matrix made of these tensors, as `tensors` lists them."""
    rest, twin = iter(parts), copy(matrix)
    if isinstance(twin, Linear):
        twin.weight = next(rest)
        twin.bias = None if twin.bias is None else next(rest)
        if twin.product is not None:  # it has addresses
            twin.product = Product(twin.weight, twin.bias, twin.product.most_rows)
        if twin.many is not None:
            twin.many = type(twin.many)(twin.weight, twin.bias)
        return twin
    twin.bias = None if twin.bias is None else next(rest)
    twin.permutation = None if twin.permutation is None else next(rest)
    twin.stored, twin.words, twin.panels = (
        None if held is None else _of(held, rest) for held in (twin.stored, twin.words, twin.panels)
    )
    return twin


def _names(held: Quantised | Words | Panels) -> list[str]:
    """The fields of a matrix of few bits that are tensors."""
    named = (field.name for field in fields(held))
    return [name for name in named if isinstance(getattr(held, name), torch.Tensor)]


def _of(held: Any, parts: Iterator[torch.Tensor]) -> Any:
    """The same value made of the next parts."""
    if isinstance(held, Words) and held.joined:
        values = next(parts)
        scales, offsets = next(parts).unbind(-1)
        return replace(held, values=values, scales=scales, offsets=offsets)
    return replace(held, **{name: next(parts) for name in _names(held)})


def moved(matrix: Matrix, move: Callable[[torch.Tensor], torch.Tensor]) -> Matrix:
    """Return the same matrix made of what `move` makes of its tensors."""
    return lying_in(matrix, [move(tensor) for tensor in tensors(matrix)])


def places(parts: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each of these tensors begins in a buffer that holds all, and its bytes."""
    found, at = [], 0
    for tensor in parts:
        at = -(-at // ALIGN) * ALIGN
        found.append(at)
        at += tensor.nbytes
    return found, at


def view(buffer: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a buffer, uint8, from byte `at` on as a tensor of the shape of `like`."""
    return buffer[at : at + like.nbytes].view(like.dtype).view(like.shape)
