"""K before rotation in few numbers a token: coefficients in a basis that all K/V heads share.

The basis are the leading right singular vectors of K [tokens, heads * D], which are the leading
eigenvectors of its Gram matrix: so the rows that make it come block by block, and are never all in
float32 at once. Coefficients are the rows' products with it, U S of the decomposition.
"""

from __future__ import annotations

import torch

from engine.model.rope import Rotary, apply_rope
from kernels.rows.forms import key_floats


def before_rotation(k: torch.Tensor, first: int, rotary: Rotary, layer: int) -> torch.Tensor:
    """Rows of K at positions from `first` on, k [Hkv, n, width] as a bank holds them, turned back:
    float32 [n, Hkv * D].
    """
    positions = torch.arange(first, first + k.shape[1], device=k.device)
    cos, sin = rotary.at(positions, layer=layer)
    size = cos.square() + sin.square()  # a rope may scale: not 1
    return apply_rope(key_floats(k).transpose(0, 1), cos / size, -sin / size).flatten(1)


def leading(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """The `rank` leading eigenvectors of gram [W, W] float32, orthonormal rows [rank, W] float32.

    In float64: LAPACK's float32 has given NaN for a finite matrix of few directions.
    """
    return torch.linalg.eigh(gram.double()).eigenvectors[:, -rank:].flip(1).mT.float()


def rebuilt(
    coefficients: torch.Tensor,
    basis: torch.Tensor,
    tokens: torch.Tensor,
    rotary: Rotary,
    layer: int,
) -> torch.Tensor:
    """K of each head's own tokens, rotated to their positions: float32 [B, Hkv, T, D].

    coefficients [B, n, r]; basis float32 [B, r, Hkv * D]; tokens int64 [B, Hkv, T], below n.
    """
    heads = tokens.shape[1]
    sequence = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
    rows = coefficients[sequence, tokens].float()
    k = rows @ basis.unflatten(2, (heads, -1)).transpose(1, 2)
    return apply_rope(k.unsqueeze(3), *rotary.at(tokens, layer=layer)).squeeze(3)
