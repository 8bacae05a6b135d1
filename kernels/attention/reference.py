"""The reference that every decode kernel is checked against: plain torch attention in float32, one
sequence at a time.

K and V are made contiguous before they are multiplied. The same rows then give the same bits
wherever they came from: a slice of a bank, a gather, a copy from host memory. Every test that
compares two storages bit for bit relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.launch.softmax import PLAIN, Softmax
from kernels.rows.forms import floats, key_floats


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Sequence[int] | torch.Tensor,
    scale: float,
    scores: bool = False,
    softmax: Softmax = PLAIN,
    logs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with Q queries to n rows of K and V, in float32.

    q [Q, H, D]; k, v [Hkv, n, D] of any strides and dtype, or packed; visible [Q] ints: query j
    sees rows below visible[j]; logs float32 [n], added to the logits of the rows, or None. Returns
    (out [Q, H, D] in q.dtype, logits): with `scores`, the scaled and capped logits [Q, H, n]
    float32, -inf where a row is not visible; else None.
    """
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    group = heads // kv_heads
    packed = (
        q.float()
        .view(queries, kv_heads, group, dim)
        .transpose(0, 1)
        .reshape(kv_heads, queries * group, dim)
    )
    logits = torch.bmm(packed, key_floats(k).contiguous().transpose(1, 2)) * scale
    softmax.capped(logits)
    logits = logits if logs is None else logits + logs
    logits = logits.view(kv_heads, queries, group, rows)
    limit = torch.as_tensor(visible, device=k.device).view(1, queries, 1, 1)
    logits = logits.masked_fill(torch.arange(rows, device=k.device) >= limit, float("-inf"))
    weights = torch.softmax(logits, dim=-1)
    if softmax.sinks is not None:
        by_head = logits.transpose(0, 1).reshape(queries, heads, rows)
        weights = softmax.weights(by_head).view(queries, kv_heads, group, rows).transpose(0, 1)
    weights = weights.reshape(kv_heads, queries * group, rows)
    out = torch.bmm(weights, floats(v).contiguous()).view(kv_heads, queries, group, dim)
    out = out.transpose(0, 1).reshape(queries, heads, dim).to(q.dtype)
    return out, logits.transpose(0, 1).reshape(queries, heads, rows) if scores else None


def attend_alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Sequence[int] | torch.Tensor,
    scale: float,
    scores: bool = False,
    softmax: Softmax = PLAIN,
    logs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as `attend` does, one query after the other, each to its own rows: a query gets the
    same bits however many others go with it.

    Arguments and result as `attend`; with `scores`, the logits are the last query's [1, H, n].
    """
    out, logits = torch.empty_like(q), None
    for j, n in enumerate(int(rows) for rows in visible):
        mine = None if logs is None else logs[:n]
        out[j : j + 1], logits = attend(
            q[j : j + 1], k[:, :n], v[:, :n], [n], scale, scores, softmax, mine
        )
    return out, logits


def head_max(logits: torch.Tensor, kind: str, softmax: Softmax = PLAIN) -> torch.Tensor:
    """Reduce the logits of a row under every head to one number: OmniKV Eq. 3, the max over heads.

    logits [W, H, n] float32 -> [W, n] float32. kind "softmax": max over heads of the softmax over
    the n rows (and the sinks); "raw": max over heads of the logit itself. Raises ValueError for
    another kind.
    """
    if kind == "softmax":
        return softmax.weights(logits).amax(dim=1)
    if kind == "raw":
        return logits.amax(dim=1)
    raise ValueError(f"kind: found {kind!r}, expected 'softmax' or 'raw'")
