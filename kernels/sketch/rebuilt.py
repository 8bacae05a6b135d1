"""Attention to rows whose keys are held in few numbers each: coefficients in a basis that all K/V
heads share, before rotation, of which a step rebuilds the keys that it has chosen. What ShadowKV
(Sun et al., ICML 2025, Algorithm 2) attends to. By one call of C++ on a CPU, else by torch's
operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.launch.dispatch import NATIVE
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

LANES = 16  # a head's dimensions are whole vectors
GROUP = 128  # the most query heads of a K/V head that the kernel takes


class _Rebuilt(ctypes.Structure):
    """`Rebuilt` of rebuilt.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "held_k", "held_v")),
        *(
            (f"held_{name}", ctypes.c_long)
            for name in ("key_head", "key_row", "value_head", "value_row")
        ),
        ("coefficients", ctypes.c_void_p),
        ("coefficient_row", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("basis", "chunks")),
        ("chunk_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "v")),
        *((name, ctypes.c_long) for name in ("value_head", "value_row")),
        *((name, ctypes.c_void_p) for name in ("tail_k", "tail_v")),
        *(
            (f"tail_{name}", ctypes.c_long)
            for name in ("key_head", "key_row", "value_head", "value_row")
        ),
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *(
            (name, ctypes.c_int)
            for name in (
                "heads",
                "group",
                "dim",
                "held",
                "rank",
                "chunk",
                "count",
                "pairs",
                "tail",
                "threads",
                "in_turn",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]


_BINDING = Binding("attention to rebuilt keys", omnikv_sizeof_rebuilt=_Rebuilt)


class Rows(NamedTuple):
    """K and V [Hkv, n, D] of rows that are attended to as they are, last dims contiguous."""

    k: torch.Tensor
    v: torch.Tensor


class LowRank(NamedTuple):
    """Keys to rebuild. coefficients [n, r]; basis float32 [r, Hkv * D], contiguous; chunks int32
    [Hkv, C]: numbers of chunks of `chunk` tokens in turn, of the coefficients; cos, sin float32
    [Hkv, C * chunk, R / 2], contiguous: of the rotation to where these tokens stand; v: [Hkv, n,
    D], of all tokens, or with `in_turn` [Hkv, C * chunk, D]. Last dims contiguous.
    """

    coefficients: torch.Tensor
    basis: torch.Tensor
    chunks: torch.Tensor
    chunk: int
    cos: torch.Tensor
    sin: torch.Tensor
    v: torch.Tensor
    in_turn: bool


def rebuilds(backend: str, dtype: torch.dtype, values: torch.dtype, dim: int, device: str) -> bool:
    """Whether `attend_rebuilt` runs under a backend, for keys and coefficients of a dtype and
    values of another under heads of `dim` elements. The first call compiles it and runs its
    self-test.
    """
    alike = dtype == values and dtype in FLOATS and not dim % LANES
    return backend in NATIVE and device == "cpu" and alike and _BINDING.usable()


def attend_rebuilt(
    q: torch.Tensor,
    held: Rows,
    low: LowRank,
    tail: Rows,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """One softmax over held rows, chosen chunks whose keys are rebuilt, rotated and rounded to the
    dtype of rows, and the tail. q [1, H, D]; all rows of one float dtype, one row at least. Returns
    [1, H, D] in q.dtype. Raises MemoryError where the kernel finds no room for its own.
    """
    (_, query_heads, dim), heads, size = q.shape, len(low.v), low.v.element_size()
    wide, out, lse = q.float().contiguous(), torch.empty(query_heads, dim), torch.empty(query_heads)
    kind, count = low.coefficients.dtype, low.chunks.shape[1]
    assert query_heads <= GROUP * heads and low.chunks.dtype == torch.int32
    assert low.basis.is_contiguous() and low.cos.is_contiguous() and low.sin.is_contiguous()
    call = _Rebuilt(
        wide.data_ptr(), held.k.data_ptr(), held.v.data_ptr(), *_strides(held),
        low.coefficients.data_ptr(), low.coefficients.stride(0) * size, low.basis.data_ptr(),
        low.chunks.data_ptr(), low.chunks.stride(0), low.cos.data_ptr(), low.sin.data_ptr(),
        low.v.data_ptr(), *(step * size for step in low.v.stride()[:2]),
        tail.k.data_ptr(), tail.v.data_ptr(), *_strides(tail), out.data_ptr(), lse.data_ptr(),
        heads, query_heads // heads, dim, held.k.shape[1], low.coefficients.shape[1], low.chunk,
        count, low.cos.shape[2], tail.k.shape[1], torch.get_num_threads(), low.in_turn,
        scale, softmax.cap,
    )  # fmt: skip
    code = loaded().omnikv_attend_rebuilt(ctypes.byref(call), FLOATS[kind])
    check(code, f"attention to rebuilt keys in {kind}")
    return softmax.sunk(out, lse)[0][None].to(q.dtype)


def _strides(rows: Rows) -> tuple[int, ...]:
    return tuple(step * rows.k.element_size() for side in rows for step in side.stride()[:2])


def attend_rebuilt_ref(
    q: torch.Tensor,
    held: Rows,
    low: LowRank,
    tail: Rows,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """`attend_rebuilt` in plain torch, same arguments and result, in float32 or in q's float64."""
    wide, heads, dtype = torch.promote_types(q.dtype, torch.float32), len(low.v), low.v.dtype
    inside = torch.arange(low.chunk, device=q.device)
    tokens = (low.chunks.long().unsqueeze(2) * low.chunk + inside).flatten(1)
    basis = low.basis.to(wide).unflatten(1, (heads, -1)).transpose(0, 1)
    k = turned(low.coefficients[tokens].to(wide) @ basis, low.cos.to(wide), low.sin.to(wide))
    v = low.v if low.in_turn else low.v[torch.arange(heads).unsqueeze(1), tokens]
    k = torch.cat([held.k.to(wide), k.to(dtype).to(wide), tail.k.to(wide)], 1)
    v = torch.cat([held.v, v, tail.v], 1).to(wide)
    logits = softmax.capped(q.to(wide).view(heads, -1, 1, q.shape[2]) @ k.mT.unsqueeze(1) * scale)
    out = softmax.grouped(logits) @ v.unsqueeze(1)
    return out.view(q.shape).to(q.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + R / 2) of x [.., D] by cos, sin [.., R / 2]; dimensions from R on
    stay.
    """
    size = cos.shape[-1]
    one, other, rest = x.split([size, size, x.shape[-1] - 2 * size], -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


@_BINDING.self_test
def _attended() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q, basis = (torch.randn(*s, generator=generator) for s in ((1, 14, 64), (37, 128)))
    k, v = torch.randn(2, 2, 400, 64, generator=generator)
    coefficients, angles = (
        torch.randn(*s, generator=generator) / 6 for s in ((400, 37), (2, 77, 24))
    )
    chunks = torch.stack([torch.arange(11), torch.arange(0, 33, 3)]).int()
    for dtype in FLOATS:
        held, tail = (
            Rows(k[:, part].to(dtype), v[:, part].to(dtype))
            for part in (slice(9, 314), slice(390, 400))
        )
        values = v.to(dtype)
        for own, in_turn in ((values, False), (values[:, :77], True)):
            low = LowRank(
                coefficients.to(dtype), basis, chunks, 7, angles.cos(), angles.sin(), own, in_turn
            )
            given = q.to(dtype), held, low, tail, 0.125, Softmax(20.0)
            name = f"attention to rebuilt keys in {dtype}"
            yield name, attend_rebuilt(*given), attend_rebuilt_ref(*given), dtype
