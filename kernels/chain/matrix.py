"""Matrices of a chained layer, of floats or of few bits, as layers.cpp takes them."""

from __future__ import annotations

import ctypes

import torch

from kernels.layer.native_product import Product
from kernels.layer.native_step import normalize_rows
from kernels.quant.native import FewBits
from kernels.quant.native import product as few_bits

Matrix = Product | FewBits


class Held(ctypes.Structure):
    """`Held` of layers.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("floats", "few")]


def held(
    matrix: Matrix, dtype: torch.dtype, out_dtype: torch.dtype, kept: list[object]
) -> tuple[Held, int]:
    """A matrix as layers.cpp takes it to multiply a row of a dtype, and the floats of scratch that
    it needs. Appends to `kept` what has to live as long.
    """
    kept.append(matrix)
    if isinstance(matrix, Product):
        return Held(floats=matrix.address), 0
    told, floats = matrix.told(dtype, out_dtype)
    kept.append(told)
    return Held(few=ctypes.addressof(told)), floats


def multiply(
    matrix: Matrix,
    x: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """A product of x [1, 1, I] with what is around it, as Product: [1, 1, O], or half of them."""
    if isinstance(matrix, Product):
        return matrix(x, norm, eps, residual, gated, offset=offset)
    x = x if norm is None else normalize_rows(x, norm, eps, offset)
    return few_bits(x.contiguous(), matrix.weight, matrix.bias, residual, gated)
