"""Windowed prefill: a chunk of queries attends causally, each to the newest `window` rows up to its
own.

Sliding-window layers hold a ring of few rows, so the rows of a chunk and of its window are one
short run. Queries go in blocks, each against its own rows and a mask of one block: activations are
O(chunk), and masked products are at most those of BLOCK rows per query.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.launch.dispatch import choose
from kernels.launch.isa import fuses
from kernels.launch.softmax import PLAIN, Softmax
from kernels.prefill.dense import attend_chunk, attend_rows, fused
from kernels.prefill.merge import Part, merge
from kernels.prefill.native import attend_prompts, attends_prompt
from kernels.prefill.tiled import attend_tiles
from kernels.rows.forms import is_packed, unpack, unpack_keys

BLOCK = 256  # queries at a time


def prefill_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: int,
    window: int,
    scale: float,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Attend with a chunk whose K and V follow `past` older rows.

    q [B, C, H, D]; k, v [B, Hkv, past + C, D] views of any strides, last dim contiguous, floats or
    packed; window >= 1. Query i sees rows max(0, past + i - window + 1) .. past + i. scale: of the
    logits, 1/sqrt(D). softmax: a cap on logits, and sinks.
    Returns out [B, C, H, D] in q.dtype. The reference computes in float32. Raises ValueError for an
    unknown backend.
    """
    chosen, chunk = choose(backend, q, lambda: attends_prompt(q, k, v)), q.shape[1]
    if chosen == "native":
        return softmax.sunk(*attend_prompts(q, k, v, scale, past, window, softmax))[0]
    if not softmax.plain:
        whole = attend_tiles(q, k, v, scale, softmax, past, window, chosen)
        return softmax.sunk(*whole)[0]
    wide = chosen == "reference" or (q.device.type == "cpu" and not fuses(q.dtype, chunk))
    out = torch.empty_like(q)
    for first in range(0, chunk, BLOCK):
        stop = min(chunk, first + BLOCK)
        low = max(0, past + first - window + 1)
        at = torch.arange(past + first, past + stop, device=q.device).unsqueeze(1)
        row = torch.arange(low, past + stop, device=q.device)
        mask = (row <= at) & (row > at - window)
        rows = slice(low, past + stop)
        parts = [
            q[:, first:stop].transpose(1, 2),
            unpack_keys(k[:, :, rows], q.dtype),
            unpack(v[:, :, rows], q.dtype),
        ]
        if wide:
            parts = [part.float() for part in parts]
        some, keys, values = parts
        found = scaled_dot_product_attention(
            some, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[:, first:stop] = found.transpose(1, 2).to(q.dtype)
    return out


def prefill_window_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: int,
    window: int,
    scale: float,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> Part:
    """`prefill_window` with the log-sum-exp of every query's logits, same arguments. Sinks are left
    to the caller. On a CPU without a kernel of its own a block's rows are three: those that all its
    queries see, which need no mask, and the two ends, of a block each.

    Returns (out [B, C, H, D] in q.dtype, lse [B, C, H] float32). Raises ValueError for an unknown
    backend.
    """
    chosen = choose(backend, q, lambda: attends_prompt(q, k, v))
    if chosen != "cpu" or softmax.cap or is_packed(k):
        return attend_tiles(q, k, v, scale, softmax, past, window, chosen)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for first in range(0, q.shape[1], BLOCK):
        some = q[:, first : first + BLOCK]
        rows = slice(max(0, past + first - window + 1), past + first + some.shape[1])
        given = k[:, :, rows], v[:, :, rows], past + first - rows.start, window, scale
        at = slice(first, first + some.shape[1])
        out[:, at], lse[:, at] = _block(some, *given)
    return out, lse


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, window: int, scale: float
) -> Part:
    """Attend with a block of queries [B, C, H, D], of which the first has `past` rows before it,
    all within its window; k, v [B, Hkv, past + C, D].
    """
    count = q.shape[1]
    # rows that leave the window of some query: row j that of query j + window - past
    leaving = min(past, max(0, past + count - window))
    parts = []
    if window >= count:
        parts.append(attend_chunk(q, k, v, past, scale, backend="cpu"))
    else:
        own = torch.arange(count, device=q.device)
        age = own.unsqueeze(1) - own
        parts.append(_masked(q, k[:, :, past:], v[:, :, past:], (age >= 0) & (age < window), scale))
    if leaving < past:
        rows = slice(leaving, past)
        parts.append(attend_rows(q, k[:, :, rows], v[:, :, rows], scale, backend="cpu"))
    if leaving:
        at = torch.arange(past, past + count, device=q.device).unsqueeze(1)
        seen = at - torch.arange(leaving, device=q.device) < window
        parts.append(_masked(q, k[:, :, :leaving], v[:, :, :leaving], seen, scale))
    return parts[0] if len(parts) == 1 else merge(parts, q.dtype)


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> Part:
    """Attend with queries [B, C, H, D] to few rows k, v [B, Hkv, n, D]; seen: bool [C, n]."""
    group = q.shape[2] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
    found = fused(q.transpose(1, 2), keys, values, False, scale, seen=seen)
    out, lse = (t.transpose(1, 2) for t in found)
    # a query that sees none of them
    blind = ~seen.any(1)[:, None]
    return out.masked_fill(blind[..., None], 0.0), lse.float().masked_fill(blind, float("-inf"))
