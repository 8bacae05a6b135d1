"""Logits of one query by an index of K, in place of K: by some of its channels, or by tables of
what each code of a token gives. By one call of C++ on a CPU, else by torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

AT_ONCE = 4096  # tokens whose channels or codes torch's operators take at a time
CODES = {torch.uint8: 1, torch.int32: 4}  # bytes


class _Indexed(ctypes.Structure):
    """`Indexed` of indexed.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("given", "rows", "index")),
        *((name, ctypes.c_long) for name in ("index_head", "index_row")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("out_head", "out_query")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "group", "terms", "sums", "tokens", "threads")
        ),
    ]


_BINDING = Binding("logits by an index", omnikv_sizeof_indexed=_Indexed)


def channel_logits(
    few: torch.Tensor,
    channels: torch.Tensor,
    by_channel: torch.Tensor,
    out: torch.Tensor,
    backend: str = "auto",
) -> None:
    """out[h, g, t] = the sum over i of few[h, g, i] * by_channel[h, channels[h, i], t].

    few float32 [Hkv, G, r]; channels int64 [Hkv, r]; by_channel [Hkv, D, >= n], floats; out float32
    [Hkv, G, n]; last dims contiguous. Mutates out. Raises ValueError for an unknown backend.
    """
    if choose(backend, by_channel, lambda: _fits(by_channel, FLOATS)) == "native":
        _call("omnikv_channel_logits", few, channels, by_channel, out, 0)
        return
    heads, dim, _ = by_channel.shape
    rows = channels + dim * torch.arange(heads, device=few.device).unsqueeze(1)
    keys, n = by_channel.flatten(0, 1), out.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = keys[rows.flatten(), part].to(few.dtype).unflatten(0, rows.shape)
        out[:, :, part] = few @ some


def code_logits(
    table: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, backend: str = "auto"
) -> None:
    """out[h, g, t] = the sum over p of table[h, p, g, codes[h, p, t]].

    table float32 [Hkv, parts, G, C]; codes [Hkv, parts, >= n] uint8 or int32, below C; out float32
    [Hkv, G, n]; last dims contiguous. Mutates out. Raises ValueError for an unknown backend.
    """
    if choose(backend, codes, lambda: _fits(codes, CODES)) == "native":
        _call("omnikv_code_logits", table, None, codes, out, table.shape[3])
        return
    n = out.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = codes[:, :, part].long().unsqueeze(2).expand(-1, -1, table.shape[2], -1)
        out[:, :, part] = table.gather(3, some).sum(1)


def _fits(index: torch.Tensor, kinds: object) -> bool:
    return index.dtype in kinds and _BINDING.usable()  # type: ignore[operator]


def _call(
    name: str,
    given: torch.Tensor,
    rows: torch.Tensor | None,
    index: torch.Tensor,
    out: torch.Tensor,
    sums: int,
) -> None:
    """Run a function of indexed.cpp. sums: entries of a table, 0 of channels."""
    given = given.contiguous()
    rows = None if rows is None else rows.contiguous()
    (heads, group, tokens), size = out.shape, index.element_size()
    assert tokens <= index.shape[2]
    if not tokens:  # of which there may be no tables either
        return
    assert index.stride(2) == out.stride(2) == 1
    call = _Indexed(
        given.data_ptr(), None if rows is None else rows.data_ptr(), index.data_ptr(),
        index.stride(0) * size, index.stride(1) * size,
        out.data_ptr(), out.stride(0), out.stride(1),
        heads, group, given.shape[1 if sums else 2], sums, tokens, torch.get_num_threads(),
    )  # fmt: skip
    kind = CODES[index.dtype] if sums else FLOATS[index.dtype]
    check(getattr(loaded(), name)(ctypes.byref(call), kind), f"logits by an index of {index.dtype}")


@_BINDING.self_test
def _logits() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    wide, found, expected = torch.randn(2, 32, 150, generator=generator), *torch.empty(2, 2, 7, 149)
    few, channels = torch.randn(2, 7, 9, generator=generator), torch.arange(18).view(2, 9) + 5
    for dtype in FLOATS:
        by_channel = wide.to(dtype)
        _call("omnikv_channel_logits", few, channels, by_channel, found, 0)
        channel_logits(few, channels, by_channel, expected, "reference")
        yield f"logits by channels of {dtype}", found, expected, torch.float32
    table = torch.randn(2, 3, 7, 40, generator=generator)
    for dtype in CODES:
        codes = torch.randint(40, (2, 3, 150), generator=generator).to(dtype)
        _call("omnikv_code_logits", table, None, codes, found, 40)
        code_logits(table, codes, expected, "reference")
        yield f"logits by codes of {dtype}", found, expected, torch.float32
