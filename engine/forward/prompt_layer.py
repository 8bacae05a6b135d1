"""The two halves of a layer for a prompt's chunk, in the form that a model's steps have: torch's
operators, or our own kernels between the products.

One form for both, chosen in one place (engine/forward/self_test.py): where a self-test on this very
GPU found our kernels right, they serve chunks too. There torch's operators read and write 1.5 GB a
layer and chunk of 2,048 tokens of an 8B model beside the products, in 30 launches; five launches
read and write 0.37 (counted, not measured). They compile once, for every length: torch.compile
would compile for each model, and again for one row. On a CPU they are the C++ kernels, where a
step's are: beside the products torch's operators were a sixth of a prompt's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.forward.layer import FusedLayer, LayerForm
from engine.forward.native_layer import NativeLayer
from engine.model.llama import Layer, post_attention, pre_attention
from kernels.layer.norm import normalize_rows
from kernels.layer.prompt_fused import add_normalize_rows, rotate_rows, swiglu_rows

Pieces = tuple[Callable, Callable]
PLAIN: Pieces = pre_attention, post_attention


def prompt_pieces(halves: LayerForm) -> Pieces | tuple[Pieces, ...]:
    """The halves of a layer for a chunk, in the form of a step's `halves`; of each part of a model
    in parts.
    """
    if halves.parts:
        return tuple(_pieces(part) for part in halves.parts)
    return _pieces(halves)


def pieces_of(pieces: Pieces | tuple[Pieces, ...], part: int) -> Pieces:
    """The halves of a layer of a part: its own, or those of all parts."""
    own: Any = pieces[part] if isinstance(pieces[0], tuple) else pieces
    return own


def _pieces(halves: LayerForm) -> Pieces:
    if isinstance(halves, NativeLayer):
        return halves.before_chunk, halves.after_chunk
    return FUSED if isinstance(halves, FusedLayer) else PLAIN


def fused_pre_attention(
    layer: Layer,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `pre_attention`, of a block like Llama's."""
    assert layer.input_norm is not None
    qkv = layer.qkv(normalize_rows(x.contiguous(), layer.input_norm, eps))
    qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, head_dim)
    rotated = rotate_rows(qkv, cos.contiguous(), sin.contiguous(), heads + kv_heads)
    q, k = rotated.split([heads, kv_heads], dim=2)
    return q, k, qkv[:, :, heads + kv_heads :], qkv[:, :, :heads]


def fused_post_attention(
    layer: Layer, x: torch.Tensor, attended: torch.Tensor, eps: float
) -> torch.Tensor:
    """As `post_attention`, of a block like Llama's."""
    assert layer.post_norm is not None and layer.gate_up is not None
    assert layer.down is not None
    part = layer.o(attended.flatten(2))
    x, normed = add_normalize_rows(x.contiguous(), part, layer.post_norm, eps)
    return x + layer.down(swiglu_rows(layer.gate_up(normed)))


FUSED: Pieces = fused_pre_attention, fused_post_attention
