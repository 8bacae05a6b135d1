"""Attention to rows that were drawn, each of which stands for those that were not: the estimate of
MagicPIG (Chen et al., ICLR 2025, section 4.2). By one call of C++ on a CPU, else by torch's
operators.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.rows.forms import as_bytes, floats, key_floats

LEAST = 1e-4  # added to a probability
GROUP = 128  # the most query heads of a K/V head that the kernel takes
LANES = 16  # a head's dimensions are whole vectors


class _Drawn(ctypes.Structure):
    """`Drawn` of drawn.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "means", "k", "v")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row", "value_head", "value_row")),
        *((name, ctypes.c_void_p) for name in ("index", "counts")),
        ("index_head", ctypes.c_long),
        ("drawn", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("drawn_head", "drawn_query")),
        ("out", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in (
                "heads",
                "group",
                "dim",
                "first",
                "stop",
                "sink",
                "bits",
                "tables",
                "threads",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "least")),
    ]


_BINDING = Binding("attention to drawn rows", omnikv_sizeof_drawn=_Drawn)


@dataclass(frozen=True)
class Draws:
    """Which rows each query head has drawn, and how. index int32 [Hkv, K]: rows, ascending, of
    which the first counts int32 [Hkv] count, and of these the first `sink` with certainty; drawn
    bool [Hkv, G, >= K]; means float32 [Hkv, D], of keys; last dims contiguous. bits, tables: of the
    signs, of which a row and its query agreed in two tables at least.
    """

    index: torch.Tensor
    counts: torch.Tensor
    drawn: torch.Tensor
    means: torch.Tensor
    sink: int
    bits: int
    tables: int


def attend_drawn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    draws: Draws,
    first: int,
    stop: int,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """One softmax over what a query head has drawn, whose logits are less the log of the
    probability with which it is drawn, and the rows first .. stop - 1 as they are.

    q [Q, H, D]: query j sees Q-1-j rows fewer than the last; k, v [Hkv, n, width], floats or
    packed, last dim contiguous. Returns [Q, H, D] in q.dtype. Raises ValueError for an unknown
    backend, MemoryError where the kernel finds no room for its own.
    """
    native = len(q) == 1 and choose(backend, q, lambda: _fits(q, k, v)) == "native"
    return (_attend if native else attend_drawn_ref)(q, k, v, draws, first, stop, scale)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    draws: Draws,
    first: int,
    stop: int,
    scale: float,
) -> torch.Tensor:
    """By drawn.cpp: q [1, H, D]."""
    heads, (_, query_heads, dim), size = len(k), q.shape, k.element_size()
    wide, out = q.float().contiguous(), torch.empty(query_heads, dim)
    index, counts, means = draws.index, draws.counts.contiguous(), draws.means.contiguous()
    assert index.dtype == counts.dtype == torch.int32 and draws.drawn.dtype == torch.bool
    assert index.stride(1) == draws.drawn.stride(2) == 1
    call = _Drawn(
        wide.data_ptr(), means.data_ptr(), k.data_ptr(), v.data_ptr(),
        *(step * size for side in (k, v) for step in side.stride()[:2]),
        index.data_ptr(), counts.data_ptr(), index.stride(0),
        draws.drawn.data_ptr(), *draws.drawn.stride()[:2], out.data_ptr(),
        heads, query_heads // heads, dim, first, stop, draws.sink, draws.bits, draws.tables,
        torch.get_num_threads(), scale, LEAST,
    )  # fmt: skip
    code = loaded().omnikv_attend_drawn(ctypes.byref(call), FLOATS[k.dtype])
    check(code, f"attention to drawn rows in {k.dtype}")
    return out[None].to(q.dtype)


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    known = k.dtype == v.dtype and k.dtype in FLOATS and not q.shape[2] % LANES
    return known and q.shape[1] <= GROUP * len(k) and _BINDING.usable()


def attend_drawn_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    draws: Draws,
    first: int,
    stop: int,
    scale: float,
) -> torch.Tensor:
    """`attend_drawn` in plain torch, same arguments and result, in float32 or in q's float64."""
    count, heads, most = len(q), len(k), int(draws.counts.max())
    places = torch.arange(most, device=q.device) < draws.counts.unsqueeze(1)
    at, which = draws.index[:, :most].long() * places, torch.arange(heads, device=q.device)
    chosen_k, chosen_v = (as_bytes(t)[which[:, None], at].view(t.dtype) for t in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = key_floats(chosen_k).to(wide).masked_fill(~places.unsqueeze(2), 0.0)
    newest = key_floats(k[:, first:stop]).to(wide)
    asked = q.to(wide).view(count, heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
    logits = asked @ keys.mT.unsqueeze(1) * scale  # [Hkv, G, Q, K]
    probable = _probable(asked, keys - draws.means.to(wide).unsqueeze(1), draws)
    # the first rows are the first of the list
    logits[..., draws.sink :] -= (probable[..., draws.sink :] + LEAST).log()
    taken = draws.drawn[:, :, :most] & places.unsqueeze(1)
    logits = logits.masked_fill(~taken.unsqueeze(2), -math.inf)
    tail = asked @ newest.mT.unsqueeze(1) * scale
    seen = torch.arange(stop - first, device=q.device) < torch.arange(
        stop - first - count + 1, stop - first + 1, device=q.device
    ).unsqueeze(1)
    weights = torch.cat([logits, tail.masked_fill(~seen, -math.inf)], -1).softmax(-1)
    kept_v = floats(chosen_v).to(wide).masked_fill(~places.unsqueeze(2), 0.0)
    values = torch.cat([kept_v, floats(v[:, first:stop]).to(wide)], 1)
    out = weights @ values.unsqueeze(1)
    return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)


def _probable(q: torch.Tensor, keys: torch.Tensor, draws: Draws) -> torch.Tensor:
    """With what probability a key is drawn: q [Hkv, G, Q, D], keys [Hkv, K, D], less their mean ->
    [Hkv, G, Q, K].
    """
    sizes = q.norm(dim=-1, keepdim=True) * keys.norm(dim=-1)[:, None, None]
    cosine = (q @ keys.mT.unsqueeze(1) / sizes.clamp(min=1e-30)).clamp(-1, 1)
    near = 1 - cosine.double().arccos() / math.pi  # small chances are small differences
    return drawing(near, draws.bits, draws.tables).to(q.dtype)


def drawing(near: torch.Tensor, bits: int, tables: int) -> torch.Tensor:
    """The probability that two rows agree in two tables at least, where they agree in one sign with
    probability `near`.
    """
    table = near**bits
    none = (1 - table) ** tables
    return 1 - none - tables * table * (1 - table) ** (tables - 1)


@_BINDING.self_test
def _attended() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 6, 64, generator=generator)
    k, v = torch.randn(2, 2, 400, 64, generator=generator)
    index = torch.stack([torch.arange(290), torch.arange(0, 580, 2)]).int().clamp(max=389)
    drawn = torch.rand(2, 3, 300, generator=generator) < 0.7
    draws = Draws(index, torch.tensor([5, 290]).int(), drawn, k.mean(1), 4, 10, 150)
    for dtype in FLOATS:
        given = q.to(dtype), k.to(dtype), v.to(dtype), draws, 390, 400, 0.125
        name = f"attention to drawn rows in {dtype}"
        yield name, _attend(*given), attend_drawn_ref(*given), dtype
