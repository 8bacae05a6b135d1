"""Tokens put into an index of K: their K by channel, codes of its parts, their V in the sums of all
V. Of one token, as a step adds it, by one call of C++ each on a CPU, else by torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.rows.forms import unpack_keys


class Learnt(ctypes.Structure):
    """`Learnt` of learn.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("row", "channels", "centroids", "index", "prefix", "blocks", "mean")
        ),
        *((name, ctypes.c_long) for name in ("row_token", "row_head", "index_head", "index_row")),
        *((name, ctypes.c_long) for name in ("centroid_head", "centroid_part")),
        *((name, ctypes.c_long) for name in ("prefix_head", "block_head")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "dim", "rows", "sums", "token", "block", "kind")
        ),
    ]


BINDING = Binding("an index of K", omnikv_sizeof_learnt=Learnt)


def learn_channels(
    rows: torch.Tensor,
    first: int,
    k: torch.Tensor,
    channels: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """rows[h, i, first + t] = k[h, t, channels[h, i]], or without channels k[h, t, i].

    rows [Hkv, R, T] floats; k [Hkv, n, width] as a bank holds it, of any form; channels int64 [Hkv,
    R], contiguous. Mutates rows. Raises ValueError for an unknown backend.
    """
    if choose(backend, rows, lambda: _is_token(k, rows.dtype)) == "native":
        _channels_natively(rows, first, k, channels)
        return
    keys = unpack_keys(k, rows.dtype)
    if channels is not None:
        keys = keys.gather(2, channels.unsqueeze(1).expand(-1, keys.shape[1], -1))
    rows[:, :, first : first + keys.shape[1]] = keys.mT


def learn_code(
    codes: torch.Tensor, token: int, k: torch.Tensor, centroids: torch.Tensor, backend: str
) -> bool:
    """codes[h, p, token] = the centroid nearest to part p of k[h, 0], of equal ones the first.

    codes uint8 [Hkv, parts, T]; k [Hkv, 1, D] floats; centroids float32 [Hkv, parts, C, D / parts],
    whose last two dims are contiguous. Returns whether the C++ kernel runs here and takes these; if
    not, nothing has changed. Mutates codes. Raises ValueError for an unknown backend.
    """
    if choose(backend, codes, lambda: _is_token(k, *FLOATS)) != "native":
        return False
    _code_natively(codes, token, k, centroids)
    return True


def add_value(
    prefix: torch.Tensor,
    blocks: torch.Tensor,
    token: int,
    v: torch.Tensor,
    mean: torch.Tensor,
    backend: str = "auto",
) -> bool:
    """Add a token's V to the sums of engine/methods/select/index/value_sums.py, and leave the mean
    of the first token + 1.

    prefix float64 [Hkv, BLOCK, D], blocks float64 [Hkv, N, D] and mean float32 [Hkv, D], their last
    two dims contiguous; v [Hkv, 1, D] floats. Returns, mutates and raises as `learn_code`.
    """
    if choose(backend, prefix, lambda: _is_token(v, *FLOATS)) != "native":
        return False
    _value_natively(prefix, blocks, token, v, mean)
    return True


def _is_token(row: torch.Tensor, *dtypes: torch.dtype) -> bool:
    """Whether the C++ kernel runs here and takes a row [Hkv, n, D]."""
    return row.shape[1] == 1 and row.dtype in dtypes and row.dtype in FLOATS and BINDING.usable()


def _run(name: str, call: Learnt, token: int) -> None:
    """Call a function of learn.cpp."""
    call.token = token
    check(getattr(loaded(), name)(ctypes.byref(call)), name)


def _told(row: torch.Tensor, *given: int | None) -> Learnt:
    """What a function of learn.cpp is told of rows [Hkv, n, D], but for the token, whose K or V is
    the first of them. given: from `channels` to `mean` the pointers, then the strides behind
    row_head, and rows, sums and block.
    """
    assert row.stride(2) == 1
    (heads, _, dim), size = row.shape, row.element_size()
    *pointers_strides, rows, sums, block = given
    pointers, strides = pointers_strides[:6], pointers_strides[6:]
    return Learnt(
        row.data_ptr(), *pointers, row.stride(1) * size, row.stride(0) * size, *strides,
        heads, dim, rows, sums, 0, block, FLOATS[row.dtype],
    )  # fmt: skip


def told_channels(
    rows: torch.Tensor, k: torch.Tensor, channels: torch.Tensor | None = None
) -> Learnt:
    """What C++ is told of `learn_channels`, of rows k [Hkv, n, D] of one dtype."""
    size, head = rows.element_size(), None if channels is None else channels.data_ptr()
    pointers = head, None, rows.data_ptr(), None, None, None
    strides = rows.stride(0) * size, rows.stride(1) * size, 0, 0, 0, 0
    return _told(k, *pointers, *strides, rows.shape[1], 0, 0)


def told_code(codes: torch.Tensor, k: torch.Tensor, centroids: torch.Tensor) -> Learnt:
    """What C++ is told of `learn_code`, of rows k [Hkv, n, D]."""
    head, part, *inner = centroids.stride()
    assert inner == [centroids.shape[3], 1]
    pointers = None, centroids.data_ptr(), codes.data_ptr(), None, None, None
    strides = codes.stride(0), codes.stride(1), head, part, 0, 0
    return _told(k, *pointers, *strides, codes.shape[1], centroids.shape[2], 0)


def told_value(
    prefix: torch.Tensor, blocks: torch.Tensor, v: torch.Tensor, mean: torch.Tensor
) -> Learnt:
    """What C++ is told of `add_value`, of rows v [Hkv, n, D]."""
    pointers = None, None, None, prefix.data_ptr(), blocks.data_ptr(), mean.data_ptr()
    strides = 0, 0, 0, 0, prefix.stride(0), blocks.stride(0)
    return _told(v, *pointers, *strides, 0, 0, prefix.shape[1])


def _channels_natively(
    rows: torch.Tensor, first: int, k: torch.Tensor, channels: torch.Tensor | None
) -> None:
    _run("omnikv_learn_channels", told_channels(rows, k, channels), first)


def _code_natively(
    codes: torch.Tensor, token: int, k: torch.Tensor, centroids: torch.Tensor
) -> None:
    _run("omnikv_learn_code", told_code(codes, k, centroids), token)


def _value_natively(
    prefix: torch.Tensor, blocks: torch.Tensor, token: int, v: torch.Tensor, mean: torch.Tensor
) -> None:
    _run("omnikv_add_value", told_value(prefix, blocks, v, mean), token)


@BINDING.self_test
def _tokens() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(2, 70, 24, generator=generator)
    centroids = torch.randn(2, 4, 20, 6, generator=generator)
    channels = torch.arange(14).view(2, 7) + 3
    for dtype in FLOATS:
        k = wide.to(dtype)
        for some in (None, channels):
            found, expected = torch.zeros(2, 2, 24 if some is None else 7, 70, dtype=dtype)
            learn_channels(expected, 0, k, some, "reference")
            for t in range(70):
                _channels_natively(found, t, k[:, t : t + 1], some)
            yield f"K by channel in {dtype}", found, expected, torch.int32
        codes = torch.zeros(2, 4, 70, dtype=torch.uint8)
        prefix, mean = torch.zeros(2, 64, 24, dtype=torch.float64), torch.zeros(2, 24)
        blocks = torch.zeros(2, 3, 24, dtype=torch.float64)
        for t in range(70):
            _code_natively(codes, t, k[:, t : t + 1], centroids)
            _value_natively(prefix, blocks, t, k[:, t : t + 1], mean)
        parts = k.float().unflatten(2, (4, 6)).transpose(1, 2)
        near = parts @ centroids.mT - centroids.square().sum(-1).unsqueeze(2) / 2
        yield f"codes of K in {dtype}", codes, near.argmax(-1).to(torch.uint8), torch.uint8
        yield f"the mean of V in {dtype}", mean, k.float().mean(1), torch.float32
