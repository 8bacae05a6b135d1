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
from kernels.prefill.native import attend_prompts, attends_prompt
from kernels.prefill.tiled import attend_tiles
from kernels.rows.forms import unpack, unpack_keys

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
    if softmax is not PLAIN:
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
