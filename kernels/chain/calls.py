"""Layers of a chain by calls of Python, each kernel by itself: what a chain is held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention.dense import decode_dense
from kernels.attention.sparse import decode_sparse
from kernels.chain.layer import ChainedLayer, Now
from kernels.chain.matrix import Matrix, multiply
from kernels.layer.native_step import act_rows, normalize_rows, rotate_store
from kernels.select.topk import select_topk


def by_calls(
    layers: Sequence[ChainedLayer],
    x: torch.Tensor,
    now: Now,
    eps: float,
    offset: float | None = None,
) -> torch.Tensor:
    """What a Chain of these layers computes of x [1, 1, hidden], a call of Python each. eps and
    offset: of norms. Returns x [1, 1, hidden] behind them. Mutates what a Chain mutates.
    """
    lengths, tail, budget = (torch.tensor([m], dtype=torch.int32) for m in now[:3])
    for layer in layers:
        index, counts, kind, scores = layer.reading
        k, v, norms = layer.k[None], layer.v[None], None
        qkv = multiply(layer.qkv, x, layer.input_norm, eps, offset).view(1, 1, -1, layer.dim)
        if layer.q_norm is not None and layer.widths:
            _norm_widths(layer, qkv, eps, offset)
        elif layer.q_norm is not None:
            norms = layer.q_norm, layer.k_norm
        twice = (0, layer.size) if layer.window else None
        ring, angles = layer.ring[None], now.angles[layer.angles]
        q = rotate_store(qkv, *angles, k, v, ring, now.position, twice, norms, eps, offset)
        if kind and index is not None and counts is not None and scores is not None:
            found = decode_dense(q, k, v, lengths, layer.scale, scores, kind, softmax=layer.softmax)
            select_topk(scores, torch.zeros_like(tail), tail, budget, index[:, 0], counts)
        elif index is not None and counts is not None:
            given = index, counts, tail, lengths, layer.scale
            found = decode_sparse(q, k, v, *given, softmax=layer.softmax)
        elif layer.window:
            seen = min(now.n, layer.window)
            first = tail.new_full((1,), (now.n - seen) % layer.size)
            none = torch.zeros_like(first)
            given = none.view(1, 1, 1), none, first, first + seen, layer.scale
            found = decode_sparse(q, k, v, *given, softmax=layer.softmax)
        else:
            found = decode_dense(q, k, v, lengths, layer.scale, softmax=layer.softmax)
        x = _added(layer, layer.o, found.flatten(2), layer.o_norm, x, eps, offset)
        x = _mixed(layer, x, eps, offset)
    return x


def _mixed(layer: ChainedLayer, x: torch.Tensor, eps: float, offset: float | None) -> torch.Tensor:
    """x [1, 1, hidden] behind a layer's MLP, or its experts."""
    if layer.gate_up is None or layer.down is None:
        assert layer.mixture is not None
        norm = layer.post_norm
        flat = (x if norm is None else normalize_rows(x, norm, eps, offset))[0]
        if layer.down_norm is None and layer.residual == 1.0:
            return layer.mixture(flat, x[0])[None]
        return _behind(layer, layer.mixture(flat)[None], layer.down_norm, x, eps, offset)
    gated = layer.activation == "silu"
    mixed = multiply(layer.gate_up, x, layer.post_norm, eps, offset, gated=gated)
    mixed = mixed if gated else act_rows(mixed, layer.activation)
    return _added(layer, layer.down, mixed, layer.down_norm, x, eps, offset)


def _norm_widths(layer: ChainedLayer, qkv: torch.Tensor, eps: float, offset: float | None) -> None:
    """Norm all heads of q at once, and those of k: qkv [1, 1, H + 2 Hkv, D], in place."""
    both = qkv[:, :, : layer.heads], qkv[:, :, layer.heads : layer.heads + len(layer.k)]
    for part, norm in zip(both, (layer.q_norm, layer.k_norm)):
        assert norm is not None
        part.copy_(normalize_rows(part.flatten(2), norm, eps, offset).view_as(part))


def _added(
    layer: ChainedLayer,
    last: Matrix,
    y: torch.Tensor,
    norm: torch.Tensor | None,
    x: torch.Tensor,
    eps: float,
    offset: float | None,
) -> torch.Tensor:
    """x and what the last matrix of a half makes of y, normed and scaled."""
    if norm is None and layer.residual == 1.0:
        return multiply(last, y, residual=x)
    return _behind(layer, multiply(last, y), norm, x, eps, offset)


def _behind(
    layer: ChainedLayer,
    part: torch.Tensor,
    norm: torch.Tensor | None,
    x: torch.Tensor,
    eps: float,
    offset: float | None,
) -> torch.Tensor:
    """x and part, normed and scaled."""
    part = part if norm is None else normalize_rows(part, norm, eps, offset)
    return x + part if layer.residual == 1.0 else x + part * layer.residual
