"""A store that comes from a file, which anybody may have written: it is one, or it is refused."""

from __future__ import annotations

from typing import Any

import torch

from engine.methods.base import Setup
from kernels.rows.forms import row_widths


def checked_layers(
    layers: Any, setup: Setup, scores: int, length: int, counts: bool = False
) -> list[list[Any]]:
    """Return the layers of a state (Rows.state, with rows) at `length` tokens, on the session's
    device. scores: float32 scores with each row. counts: whether a part may be the number of its
    rows (Rows.count). Raises ValueError if they are no store of such a session.
    """
    if not isinstance(layers, list) or len(layers) != setup.config.num_layers:
        raise ValueError("layers")
    evicting = setup.plan.partial_layers
    if any(parts for layer, parts in enumerate(layers) if layer not in evicting):
        raise ValueError("layers")
    return [
        _checked_layer(parts, setup, scores, length, counts) if layer in evicting else []
        for layer, parts in enumerate(layers)
    ]


def _checked_layer(parts: Any, setup: Setup, many: int, length: int, counts: bool) -> list[Any]:
    found: list[Any] = []
    at = 0
    for first, stop, positions, scores, base, kv in parts:
        whole = type(first) is type(stop) is type(base) is int
        if not (whole and first == at < stop <= setup.config.num_kv_heads):
            raise ValueError("heads")
        counted, at = counts and type(positions) is int, stop
        count = positions if counted else _checked_positions(positions, stop - first, length)
        if not 0 <= base <= count <= length:
            raise ValueError("base")
        if counted:
            found.append((first, stop, count, None, base, None))
            continue
        _require(scores, many > 0, (stop - first, many, count), torch.float32)
        dtype = setup.config.row_dtype(setup.dtype)
        for side, width in zip(kv, row_widths(setup.config.head_dim, dtype), strict=True):
            _require(side, True, (stop - first, count, width), dtype)
        tensors = positions, scores, *kv
        mine = [None if t is None else t.to(setup.device) for t in tensors]
        found.append((first, stop, mine[0], mine[1], base, tuple(mine[2:])))
    if at != setup.config.num_kv_heads:
        raise ValueError("heads")
    return found


def _checked_positions(positions: Any, heads: int, length: int) -> int:
    """How many each head holds: different ones, of tokens that there are."""
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
        raise ValueError("positions")
    count = positions.shape[1]
    _require(positions, True, (heads, count), torch.int32)
    ordered = positions.sort(1).values
    if count and (int(ordered.min()) < 0 or int(ordered.max()) >= length):
        raise ValueError("positions")
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError("positions")
    return count


def _require(tensor: Any, there: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError but for a tensor of this shape and dtype, or None where there is none."""
    if (tensor is not None) != there:
        raise ValueError("tensor")
    if there and not (isinstance(tensor, torch.Tensor) and tensor.dtype == dtype):
        raise ValueError("dtype")
    if there and tuple(tensor.shape) != shape:
        raise ValueError("shape")
