"""One product with weights of few bits for any number of rows, which torch.compile takes as one
operator.
"""

from __future__ import annotations

import torch

from kernels.layer.gemv import MOST_ROWS
from kernels.quant.gemm import multiply_tiles
from kernels.quant.gemv import multiply_few_bits
from kernels.quant.words import Words


def multiply_words(
    x: torch.Tensor, weight: Words, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of x [R, I] by a weight of few bits [O, I]: [R, O], in x's dtype.

    x in 16 bits, or at most gemv.MOST_ROWS rows in float32. bias [O] is added.
    """
    if torch.compiler.is_compiling():
        held = weight.values, weight.scales, weight.offsets
        return multiply_words_op(x, *held, bias, weight.kind, weight.group, weight.shape[1])
    return _multiply(x, weight, bias)


def _multiply(x: torch.Tensor, weight: Words, bias: torch.Tensor | None) -> torch.Tensor:
    run = multiply_few_bits if len(x) <= MOST_ROWS else multiply_tiles
    return run(x.contiguous(), weight, bias)


@torch.library.custom_op("omnikv::multiply_words", mutates_args=())
def multiply_words_op(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    inputs: int,
) -> torch.Tensor:
    """`multiply_words` of x [rows, I] in plain tensors: [rows, O]. An operator that a compiler does
    not look into.
    """
    shape = values.shape[0], inputs
    return _multiply(x, Words(kind, shape, values, scales, offsets, group), bias)


@multiply_words_op.register_fake
def _(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    inputs: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], values.shape[0])
