"""What a layer does beside its products and attention, by the C++ kernels: the norm; in a decode
step the rotation of queries and keys with the store of the new rows; for a prompt's chunk the
rotation alone, SwiGLU between its products, and rows that are copied.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.launch.dispatch import NATIVE
from kernels.layer.norm import normalize_rows_ref
from kernels.layer.prompt_fused import rotate_rows_ref, swiglu_rows_ref
from kernels.layer.rotate_store import rotate_store_ref
from kernels.native.kinds import FLOATS, PACKED
from kernels.native.library import Binding, Case, loaded
from kernels.rows.native import packs

ACTIVATIONS = ("silu", "gelu_tanh", "clamped", "relu2")  # as activation.h numbers them


class _Call(ctypes.Structure):
    """`Rotation` of rotation.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "out", "k", "v")),
        *((f"{side}_{step}", ctypes.c_long) for side in "kv" for step in ("batch", "head", "row")),
        *((name, ctypes.c_void_p) for name in ("ring", "positions")),
        *(
            (name, ctypes.c_int)
            for name in (
                "batch",
                "queries",
                "heads",
                "kv_heads",
                "dim",
                "pairs",
                "slots",
                "first",
                "count",
            )  # fmt: skip
        ),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        ("wide", ctypes.c_int),
        ("offset", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("unit", "packed", "key_bytes", "value_bytes")),
    ]


class _Rows(ctypes.Structure):
    """`Rows` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "angles", "all", "heads", "kv_heads")),
        *((name, ctypes.c_int) for name in ("dim", "pairs", "threads")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        ("wide", ctypes.c_int),
        ("offset", ctypes.c_float),
    ]


class _Copy(ctypes.Structure):
    """`Copy` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("to", "source")),
        *((name, ctypes.c_long * 3) for name in ("to_steps", "source_steps")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "rows", "bytes", "threads")),
    ]


_SIZES = dict(
    omnikv_sizeof_step_call=_Call,
    omnikv_sizeof_step_rows=_Rows,
    omnikv_sizeof_step_copy=_Copy,
)
_BINDING = Binding("norm and rotation", **_SIZES)


def usable() -> bool:
    """Whether these kernels run on this machine."""
    return _BINDING.usable()


def normalize_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float | None = None
) -> torch.Tensor:
    """Divide each row of x [..., N] by its root mean square and scale it by weight [N], of x's
    dtype: as kernels/layer/norm.py does, on a CPU. offset: it is added to weight, which multiplies
    before x is rounded.
    """
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    given = x.data_ptr(), weight.data_ptr(), out.data_ptr(), FLOATS[x.dtype]
    how = offset is not None, offset or 0.0, torch.get_num_threads()
    _functions()["normalize"](*given, x.numel() // size, size, eps, *how)
    return out


def stores(rows: torch.dtype, dtype: torch.dtype, dim: int) -> bool:
    """Whether `rotate_store` writes rows of a dtype, [.., dim] or packed [.., bytes], for heads of
    `dim` elements of another dtype: the same, or one of packed rows.
    """
    return rows == dtype or packs(rows, dim)


def rotate_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    bank_k: torch.Tensor | None,
    bank_v: torch.Tensor | None,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
    norms: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    eps: float = 0.0,
    offset: float | None = None,
    unit: bool = False,
) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of q and k and store the step, as kernels/layer/rotate_store.py
    does.

    qkv [B, Q, H + 2 Hkv, D] contiguous; cos, sin float32 [B, Q, R/2] contiguous, R <= D: dimensions
    from R on stay; the bank's views, as `stores` says, ring, positions and twice as in
    kernels/layer/store.py. bank_v None: V is K, as rotated, and qkv [B, Q, H + Hkv, D] has no V;
    both None: the layer reads another's rows, and qkv is q alone. norms ([D], [D] or None): every
    head of q and of k is divided by its root mean square and scaled first, as `normalize_rows`
    does; unit: every head of v is divided by its own. Returns rotated q [B, Q, H, D], new. Mutates
    bank_k, bank_v and ring, and qkv where there are norms.
    """
    batch, queries, _, dim = qkv.shape
    kv_heads, slots, heads = 0 if bank_k is None else bank_k.shape[1], ring.shape[1], ring.shape[2]
    out = torch.empty(batch, queries, heads, dim, dtype=qkv.dtype)
    packed: tuple[int, ...] = (0, 0, 0)
    if bank_k is not None and bank_k.dtype in PACKED:
        widths = (0 if rows is None else rows.shape[-1] for rows in (bank_k, bank_v))
        packed = PACKED[bank_k.dtype], *widths
    call = _Call(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        *(None if rows is None else rows.data_ptr() for rows in (bank_k, bank_v)),
        *(step for rows in (bank_k, bank_v) for step in _steps(rows)),
        ring.data_ptr(), positions.data_ptr(),
        batch, queries, heads, kv_heads, dim, cos.shape[-1], slots, *(twice or (0, 0)),
        eps, *(None if norm is None else norm.data_ptr() for norm in norms or (None, None)),
        offset is not None, offset or 0.0, unit and bank_v is not None,
        *packed,
    )  # fmt: skip
    _functions()["rotate_store"](ctypes.byref(call), FLOATS[qkv.dtype])
    return out


def rotate_rows(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    offset: float | None = None,
) -> torch.Tensor:
    """Rotate the pairs (i, i + R/2) of q and k of a prompt's chunk, as
    kernels/layer/prompt_fused.py does.

    qkv [B, S, N, D] contiguous, N >= heads + kv_heads; cos, sin float32 [1 or B, S, R/2]
    contiguous, R <= D: dimensions from R on stay. norms, eps, offset: of q and k, as `rotate_store`
    takes them. Returns [B, S, heads + kv_heads, D], new. Mutates qkv where there are norms.
    """
    batch, length, held, dim = qkv.shape
    out = torch.empty(batch, length, heads + kv_heads, dim, dtype=qkv.dtype)
    rows = _Rows(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        batch * length, cos.shape[0] * length, held, heads, kv_heads, dim, cos.shape[-1],
        torch.get_num_threads(), eps,
        *((None, None) if norms is None else (norm.data_ptr() for norm in norms)),
        offset is not None, offset or 0.0,
    )  # fmt: skip
    _functions()["rotate_rows"](ctypes.byref(rows), FLOATS[qkv.dtype])
    return out


def act_rows(
    made: torch.Tensor, kind: str = "silu", limit: float = 0.0, alpha: float = 0.0
) -> torch.Tensor:
    """Apply what lies between an MLP's matrices to made [..., 2 N], gate and up, or [..., N]
    without a gate ("relu2"): [..., N], new.

    kind, limit, alpha: as Activation of kernels/experts/open.py. Rounded to the dtype after the
    gate's activation and at the end.
    """
    made, inputs = made.contiguous(), made.shape[-1]
    size = inputs if kind == "relu2" else inputs // 2
    out = torch.empty(*made.shape[:-1], size, dtype=made.dtype)
    given = made.data_ptr(), out.data_ptr(), FLOATS[made.dtype], made.numel() // inputs, inputs
    activation = ACTIVATIONS.index(kind), limit, alpha
    _functions()["act_rows"](*given, torch.get_num_threads(), *activation)
    return out


def copy_rows(to: torch.Tensor, source: torch.Tensor, backend: str = "auto") -> None:
    """Copy rows source [B, H, n, D] to `to`, of the same shape: on a CPU by the team of threads
    where both are of one dtype and D lies together; else, and where the backend names torch, by
    torch, whose own threads have to be woken.
    """
    alike = to.dtype == source.dtype and to.shape == source.shape and to.dim() == 4
    lies = to.stride(-1) == 1 == source.stride(-1) and to.device.type == "cpu" == source.device.type
    ours = backend in NATIVE and alike and lies and to.numel() and not torch.compiler.is_compiling()
    if not (ours and usable()):
        to.copy_(source)
    else:
        _copy_rows(to, source)


def _copy_rows(to: torch.Tensor, source: torch.Tensor) -> None:
    size, (batch, heads, rows, dim) = to.element_size(), to.shape
    steps = ((ctypes.c_long * 3)(*(step * size for step in of.stride()[:3])) for of in (to, source))
    given = batch, heads, rows, dim * size, torch.get_num_threads()
    call = _Copy(to.data_ptr(), source.data_ptr(), *steps, *given)
    _functions()["copy_rows"](ctypes.byref(call))


def _steps(rows: torch.Tensor | None) -> tuple[int, ...]:
    """The strides of a bank's rows [B, Hkv, n, D] in bytes, but of D."""
    size = 0 if rows is None else rows.element_size()
    return (0, 0, 0) if rows is None else tuple(step * size for step in rows.stride()[:3])


@functools.cache
def _functions() -> dict[str, ctypes._NamedFuncPointer]:
    names = "normalize", "rotate_store", "rotate_rows", "act_rows", "copy_rows"
    found = {name: getattr(loaded(), f"omnikv_{name}") for name in names}
    pointers, number, real = [ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_float
    found["normalize"].argtypes = [*pointers, *[number] * 3, real, number, real, number]
    found["act_rows"].argtypes = [*pointers[:2], *[number] * 5, real, real]
    return found


@_BINDING.self_test
def _cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    x, weight, cos, sin = (
        torch.randn(*size, generator=generator)
        for size in ((1, 2, 8, 64), (64,), (1, 2, 32), (1, 2, 32))
    )
    positions = torch.tensor([[3, 4]])
    for dtype in FLOATS:
        narrow, by = x.to(dtype), weight.to(dtype)
        expected = normalize_rows_ref(narrow, by, 1e-5)
        yield f"a norm in {dtype}", normalize_rows(narrow, by, 1e-5), expected, dtype
        expected = (F.rms_norm(narrow.float(), (64,), None, 1e-5) * (by.float() + 1)).to(dtype)
        yield f"a wide norm in {dtype}", normalize_rows(narrow, by, 1e-5, 1.0), expected, dtype
        results = []
        for turn in (rotate_store, rotate_store_ref):
            k, v, ring = torch.zeros(3, 1, 4, 8, 64, dtype=dtype).unbind()
            k, v, ring = k[:, :2], v[:, :2], ring.transpose(1, 2)[:, :, :4].contiguous()
            q = turn(narrow.clone(), cos, sin, k, v, ring, positions)
            results.append((q, k, v, ring))
        for name, found, expected in zip(("query", "K", "V", "query ring"), *results):
            yield f"a rotated {name} in {dtype}", found, expected, dtype
        found, expected = (
            turn(narrow, cos, sin, *of)
            for turn, of in ((rotate_rows, (4, 2)), (rotate_rows_ref, (6,)))
        )
        yield f"a chunk's rotation in {dtype}", found, expected, dtype
        yield f"SwiGLU in {dtype}", act_rows(narrow), swiglu_rows_ref(narrow), dtype
        held = torch.zeros(1, 4, 3, 64, dtype=dtype)
        _copy_rows(held[:, :, 1:], narrow[:, :, :4].transpose(1, 2))
        expected = F.pad(narrow[:, :, :4].transpose(1, 2), (0, 0, 1, 0))
        yield f"rows copied in {dtype}", held, expected, dtype
