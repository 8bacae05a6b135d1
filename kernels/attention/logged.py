"""Dense attention of one query that leaves the logits of every head, for methods that sum
attention: K is read once.
"""

from __future__ import annotations

import torch

from kernels.attention.dense import decode_dense
from kernels.attention.native import attend, attends
from kernels.attention.scratch import Scratch
from kernels.launch.dispatch import choose


def decode_logged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    held: torch.Tensor,
    scratch: Scratch | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with one query to all rows.

    q [1, 1, H, D]; k, v [Hkv, T, D], last dim contiguous, floats or packed; scale: 1/sqrt(D). held:
    float32 of at least H * T elements, which the logits may take. Returns (out [1, 1, H, D] in
    q.dtype, the scaled logits float32 [Hkv, G, 1, T] in held, or None from a kernel that leaves
    none). Mutates held and scratch. Raises what `decode_dense` does.
    """
    rows = k[None], v[None]
    if choose(backend, q, lambda: attends(*rows, q.shape[3])) != "native":
        lengths = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
        return decode_dense(q, *rows, lengths, scale, scratch=scratch, backend=backend), None
    logits = held[: q.shape[2] * k.shape[1]]
    out, _ = attend(q[0], k, v, scale, logits=logits, narrow=True)
    return out[None], logits.view(len(k), -1, 1, k.shape[1])
