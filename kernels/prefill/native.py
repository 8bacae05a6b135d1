"""Attention of a prompt by the C++ kernel: one pass over the rows that a chunk of queries sees."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.attention.native import LANES
from kernels.attention.reference import attend_alone
from kernels.launch.isa import isa
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.amx import TileBinding
from kernels.native.kinds import FLOATS, PACKED, ROWS
from kernels.native.library import Binding, Case, check, loaded
from kernels.rows.forms import FORMS
from kernels.rows.native import stored_queries

WIDEST = 256  # head whose whole numbers' sums stay below 2^31


class _Call(ctypes.Structure):
    """`Call` of prompt.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *(
            (name, ctypes.c_long)
            for name in (
                "query",
                "query_head",
                "key_head",
                "key_row",
                "value_head",
                "value_row",
            )  # fmt: skip
        ),
        ("index", ctypes.c_void_p),
        ("index_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *(
            (name, ctypes.c_int)
            for name in (
                "kv_heads",
                "group",
                "dim",
                "queries",
                "kept",
                "start",
                "visited",
                "causal",
                "high",
                "window",
                "threads",
                "exact",
                "query_bits",
            )  # fmt: skip
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        ("out_kind", ctypes.c_int),
    ]


_BINDING = Binding("a prompt's attention", omnikv_sizeof_prefill_call=_Call)
_TILED = TileBinding("a prompt's attention in tiles", omnikv_sizeof_prefill_call=_Call)


def attends_prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here for q [.., D] and rows k, v of q's dtype or int8, all on a
    CPU, D a multiple of LANES, and is the fastest: torch's is on a CPU with AMX, unless tiles are
    wanted there. The first call compiles it and runs its self-test.
    """
    rows = k.dtype in (q.dtype, torch.int8)
    return (
        q.device.type == "cpu"
        and rows
        and k.dtype == v.dtype
        and q.dtype in FLOATS
        and not q.shape[-1] % LANES
        and (isa() != "amx" or tiles_take(q, k))
        and _BINDING.usable()
    )


def tiles_take(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether tiles of AMX run here (kernels/native/amx.py) and multiply q [C, H, D] and rows k
    [Hkv, n, >= D]: bfloat16 by bfloat16, or 16 bits by int8.
    """
    if k.dtype == torch.int8:
        known = q.dtype != torch.float32 and q.shape[-1] <= WIDEST
    else:
        known = q.dtype == k.dtype == torch.bfloat16
    return known and _TILED.usable()


def rounds_queries(q: torch.Tensor, k: torch.Tensor, softmax: Softmax) -> bool:
    """Whether `attend_prompt` rounds q [.., D] as `Softmax.query_bits` says, where it meets rows k:
    for int8 rows and D up to WIDEST, on x86 with VNNI. Elsewhere numbers of 8 bits are multiplied
    no faster than those of 16, and in tiles of AMX both are fast.
    """
    return (
        softmax.query_bits == 8
        and k.dtype == torch.int8
        and q.shape[-1] <= WIDEST
        and _BINDING.usable()
        and bool(loaded().omnikv_has_query_bytes())
        and not tiles_take(q, k)
    )


def attend_prompt(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    first: int | None,
    window: int = 0,
    index: torch.Tensor | None = None,
    kept: int = 0,
    start: int = 0,
    softmax: Softmax = PLAIN,
    tiled: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with queries [C, H, D], float32, bfloat16 or float16, to `kept` rows of an index and
    to the rows from `start`.

    scale: of the logits, 1/sqrt(D). k, v [Hkv, n, D] of any strides, last dim contiguous, or packed
    int8 rows; index int32 [1 or Hkv, >= kept] or None with kept = 0. first: position of query 0, so
    that query c sees rows up to first + c; None: every query sees all n rows. window: rows that a
    query sees at most, its own among them (0: all), with kept = 0. softmax: its cap, and bits of
    queries where `rounds_queries` says so; sinks are left to whoever merges. tiled: in tiles of
    AMX; None: where `tiles_take` them. Returns (out [C, H, D] in q.dtype, lse [C, H] float32).
    Raises ValueError for a dtype that this build lacks.
    """
    library = loaded()
    tiled = tiles_take(q, k) if tiled is None else tiled
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    dtype = q.dtype
    if k.dtype in PACKED:
        # transformed queries rounded to bfloat16 are a rounding more than the model's own. The
        # kernel makes whole numbers of 16 bits of them where the model's are 16-bit floats
        q = stored_queries(q.float(), k)
    if q.stride(2) != 1:
        q = q.contiguous()
    out, lse = torch.empty(queries, heads, dim, dtype=dtype), torch.empty(queries, heads)
    size = k.element_size()
    call = _Call(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), q.stride(1),
        k.stride(0) * size, k.stride(1) * size, v.stride(0) * size, v.stride(1) * size,
        None if index is None else index.data_ptr(),
        0 if index is None or len(index) == 1 else index.stride(0),
        out.data_ptr(), lse.data_ptr(),
        kv_heads, heads // kv_heads, dim, queries, kept, start, kept + rows - start,
        first is not None, kept + (first or 0) - start, window, torch.get_num_threads(),
        dtype == torch.float32, softmax.query_bits, scale, softmax.cap, FLOATS[dtype],
    )  # fmt: skip
    run = library.omnikv_tiled_prompt if tiled else library.omnikv_prefill
    code = run(ctypes.byref(call), FLOATS[q.dtype], ROWS[k.dtype])
    check(code, f"a prompt's attention of q {q.dtype}, rows {k.dtype}")
    return out, lse


def attend_prompts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    first: int | None,
    window: int = 0,
    softmax: Softmax = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_prompt` over all rows of each sequence: q [B, C, H, D]; k, v [B, Hkv, n, D]. Returns
    (out [B, C, H, D] in q.dtype, lse [B, C, H] float32). Raises what `attend_prompt` does.
    """
    found = [attend_prompt(*one, scale, first, window, softmax=softmax) for one in zip(q, k, v)]
    if len(found) == 1:
        return found[0][0][None], found[0][1][None]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


@_BINDING.self_test
def _vectors() -> Iterator[Case]:
    return _prompt_attention(False)


@_TILED.self_test
def _tiles() -> Iterator[Case]:
    return _prompt_attention(True)


def _prompt_attention(tiled: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    sizes = (20, 6, 64), (2, 300, 64), (2, 300, 64)
    q, k, v = (torch.randn(*size, generator=generator) for size in sizes)
    visible = [281 + i for i in range(20)]
    for dtype in (torch.bfloat16,) if tiled else FLOATS:
        q_, k_, v_ = q.to(dtype), k.to(dtype), v.to(dtype)
        expected, _ = attend_alone(q_.float(), k_.float(), v_.float(), visible, 0.125)
        found, _ = attend_prompt(q_, k_, v_, 0.125, 280, tiled=tiled)
        yield f"a prompt's attention in {dtype}", found, expected, dtype
    form = FORMS[torch.int8]
    rows = form.keys.pack(k), form.values.pack(v)
    expected, _ = attend_alone(q, *rows, visible, 0.125)
    # in float32, which tiles leave, and as whole numbers
    for dtype in FLOATS.keys() - ({torch.float32} if tiled else set()):
        found, _ = attend_prompt(q.to(dtype), *rows, 0.125, 280, tiled=tiled)
        yield f"a prompt's attention to int8 rows in {dtype}", found, expected, dtype
    if not tiled:
        softmax, dtype = Softmax(query_bits=8), torch.bfloat16
        found, _ = attend_prompt(q.to(dtype), *rows, 0.125, 280, softmax=softmax, tiled=False)
        yield "a prompt's attention to int8 rows by queries of 8 bits", found, expected, dtype
