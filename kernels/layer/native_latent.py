"""What latent attention has in place of plain queries and keys in a decode step, by the C++
kernels: heads' own matrices, the row that all heads share, and what goes to rotation and the bank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.layer.norm import normalize_rows_ref
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded


class _Heads(ctypes.Structure):
    """`Heads` of latent.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "matrices", "out")),
        *((name, ctypes.c_long) for name in ("x_row", "x_head", "out_row", "out_head")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "inputs", "outputs")),
        *((name, ctypes.c_int) for name in ("lying", "threads")),
    ]


class _Call(ctypes.Structure):
    """`Call` of latent.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "row", "key", "norm", "times", "out")),
        *((name, ctypes.c_long) for name in ("q_row", "row_row", "times_row")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "plain", "turned", "rank", "threads")),
        ("eps", ctypes.c_float),
    ]


_BINDING = Binding("latent heads", omnikv_sizeof_heads_call=_Heads, omnikv_sizeof_latent_call=_Call)


def reads_latent(
    dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor, *norms: torch.Tensor
) -> bool:
    """Whether the C++ kernels run here and read a layer's own tensors of latent attention: on a
    CPU, of the dtype of activations, key [H, plain, rank] and norms contiguous, value [H, rank, O]
    as `by_head` takes it.
    """
    lies = key.is_contiguous() and all(norm.is_contiguous() for norm in norms)
    lies = lies and (value.is_contiguous() or value.mT.is_contiguous())
    held = (key, value, *norms)
    ours = dtype in FLOATS and all(t.dtype == dtype and t.device.type == "cpu" for t in held)
    return lies and ours and _BINDING.usable()


def by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply x [B, S, H, I], last dim contiguous, by each head's own matrix [H, I, O], contiguous
    or a contiguous [H, O, I] across: [B, S, H, O], new. Sums are float32 and rounded once. Results
    do not depend on the number of threads. Raises MemoryError where x finds no room.
    """
    batch, length, heads, inputs = x.shape
    outputs = matrices.shape[2]
    x = x.flatten(0, 1)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(batch, length, heads, outputs, dtype=x.dtype)
    call = _Heads(
        x.data_ptr(), matrices.data_ptr(), out.data_ptr(), x.stride(0), x.stride(1),
        heads * outputs, outputs, len(x), heads, inputs, outputs, not matrices.is_contiguous(),
        torch.get_num_threads(),
    )  # fmt: skip
    check(loaded().omnikv_by_head(ctypes.byref(call), FLOATS[x.dtype]), "products of heads")
    return out


def latent_heads(
    q: torch.Tensor,
    row: torch.Tensor,
    key: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make what `rotate_store` (kernels/layer/native_step.py) takes: queries in the latent's space
    and the row, [B, S, H + 1, turned + rank], new, the part that rotates first.

    q [B, S, H * (plain + turned)]; row [B, S, turned + rank], the latent last, which is divided by
    its root mean square and scaled by norm [rank]; key [H, plain, rank]; times float32 [B or 1, S,
    1]: queries are multiplied by it first, None: they are not. Raises MemoryError where queries
    find no room.
    """
    heads, plain, rank = key.shape
    (batch, length, width), turned = row.shape, row.shape[-1] - rank
    q, row = (t.flatten(0, 1) for t in (q, row))
    q, row = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, row))
    if times is not None:
        times = times.expand(batch, length, 1).contiguous()
    out = torch.empty(batch, length, heads + 1, width, dtype=q.dtype)
    call = _Call(
        *(t.data_ptr() for t in (q, row, key, norm)),
        None if times is None else times.data_ptr(), out.data_ptr(),
        q.stride(0), row.stride(0), 1, len(q), heads, plain, turned, rank,
        torch.get_num_threads(), eps,
    )  # fmt: skip
    check(loaded().omnikv_latent_heads(ctypes.byref(call), FLOATS[q.dtype]), "latent heads")
    return out


@_BINDING.self_test
def _latents() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    sizes = (1, 3, 2 * 20), (1, 3, 8 + 72), (2, 12, 72), (72,), (1, 3, 1), (2, 72, 17)
    held = [torch.randn(*size, generator=generator) for size in sizes]
    for dtype in FLOATS:
        q, row, key, norm, _, value = (t.to(dtype) for t in held)
        for times in (None, held[4]):
            turned = q if times is None else (q * times).to(dtype)
            heads = turned.double().view(1, 3, 2, 20)
            inside = torch.einsum("bshi,hio->bsho", heads[..., :12], key.double())
            latent = normalize_rows_ref(row[..., 8:], norm, 1e-6).double()
            shared = torch.cat((row[..., :8].double(), latent), -1).unsqueeze(2)
            expected = torch.cat((torch.cat((heads[..., 12:], inside), -1), shared), 2)
            found = latent_heads(q, row, key, norm, 1e-6, times)
            yield f"latent heads in {dtype}", found, expected, dtype
            expected = torch.einsum("bshi,hio->bsho", found[:, :, :2, 8:].double(), value.double())
            lying = value.transpose(1, 2).contiguous().transpose(1, 2)
            for matrices in (value, lying):
                made = by_head(found[:, :, :2, 8:], matrices)
                yield f"products of heads in {dtype}", made, expected, dtype
