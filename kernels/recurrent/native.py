"""A recurrent layer by the C++ kernels: the convolution and the delta rule, of a step and of a
prompt.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, check, loaded

LANES = 16  # of the widest vectors: whole ones of a value head
MOST = 8  # tokens of a step, taps of a convolution


class _Delta(ctypes.Structure):
    """`Call` of recurrent.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "g", "beta", "state", "keys", "deltas", "decays", "out")
        ),
        *((name, ctypes.c_void_p) for name in ("base", "positions")),
        *((f"{side}_{step}", ctypes.c_long) for side in "qkv" for step in ("batch", "row")),
        *(
            (name, ctypes.c_int)
            for name in ("batch", "count", "heads", "group", "dk", "dv", "size", "threads")
        ),
        ("eps", ctypes.c_float),
    ]


class _Chunk(ctypes.Structure):
    """`Call` of recurrent_prompt.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "g", "beta", "state", "out")),
        *((name, ctypes.c_void_p) for name in ("after", "keys", "deltas")),
        *((f"{side}_{step}", ctypes.c_long) for side in "qkv" for step in ("batch", "row")),
        *(
            (name, ctypes.c_int)
            for name in ("batch", "count", "heads", "group", "dk", "dv", "keep", "threads")
        ),
        ("eps", ctypes.c_float),
    ]


class _Conv(ctypes.Structure):
    """`Conv` of conv.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "weight", "bias", "inputs", "out", "positions")
        ),
        *((name, ctypes.c_long) for name in ("x_batch", "x_row")),
        *(
            (name, ctypes.c_int)
            for name in ("batch", "count", "channels", "taps", "size", "threads")
        ),
    ]


DELTA = Binding("the delta rule", omnikv_sizeof_delta_call=_Delta)
CHUNK = Binding("the delta rule over a prompt", omnikv_sizeof_delta_chunk_call=_Chunk)
CONV = Binding("the convolution", omnikv_sizeof_conv_call=_Conv)


def takes_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes a step of v [B, Q, Hv, dv] on a CPU: at most 8
    tokens, and as `_takes` says.
    """
    return v.shape[1] <= MOST and _takes(q, k, v, state) and DELTA.usable()


def takes_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes a prompt of v [B, N, Hv, dv] on a CPU."""
    return _takes(q, k, v, state) and CHUNK.usable()


def _takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether dv is a multiple of 16, heads follow each other, q, k and v have one float dtype, and
    S is contiguous.
    """
    dense = all(t.stride()[2:] == (t.shape[3], 1) for t in (q, k, v))
    alike = q.dtype == k.dtype == v.dtype and v.dtype in FLOATS
    return dense and alike and v.shape[-1] % LANES == 0 and state.is_contiguous()


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    base: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`gated_delta_step` of kernels/recurrent/delta.py, same arguments. rings: keys, deltas and
    decays, contiguous, which it mutates. eps: beside a squared length.
    """
    batch, count, heads, dk = k.shape
    group, dv = v.shape[2] // heads, v.shape[3]
    g, beta = g.contiguous(), beta.contiguous()
    assert g.dtype == beta.dtype == state.dtype == torch.float32
    assert all(ring.is_contiguous() for ring in rings)
    out = torch.empty(batch, count, heads * group, dv)
    places = [t.long().contiguous() for t in (base, positions)]
    call = _Delta(
        *(t.data_ptr() for t in (q, k, v, g, beta, state, *rings, out, *places)),
        *(step * t.element_size() for t in (q, k, v) for step in t.stride()[:2]),
        batch, count, heads, group, dk, dv, rings[0].shape[2], torch.get_num_threads(), eps,
    )  # fmt: skip
    check(loaded().omnikv_delta_step(ctypes.byref(call), FLOATS[v.dtype]), "the delta rule")
    return out


def delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keep: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """`gated_delta_chunk` of kernels/recurrent/delta.py, same arguments: (o, S after the first
    N - keep tokens, the other tokens' keys, deltas and decays). eps: beside a squared length.
    """
    batch, count, heads, dk = k.shape
    group, dv = v.shape[2] // heads, v.shape[3]
    g, beta = g.contiguous(), beta.contiguous()
    assert g.dtype == beta.dtype == state.dtype == torch.float32
    out, after = torch.empty(batch, count, heads * group, dv), torch.empty_like(state)
    keys = torch.empty(batch, heads, keep, dk)
    deltas = torch.empty(batch, heads * group, keep, dv)
    call = _Chunk(
        *(t.data_ptr() for t in (q, k, v, g, beta, state, out, after, keys, deltas)),
        *(step * t.element_size() for t in (q, k, v) for step in t.stride()[:2]),
        batch, count, heads, group, dk, dv, keep, torch.get_num_threads(), eps,
    )  # fmt: skip
    code = loaded().omnikv_delta_chunk(ctypes.byref(call), FLOATS[v.dtype])
    check(code, "the delta rule over a prompt")
    return out, after, keys, deltas, g[:, count - keep :].transpose(1, 2).contiguous()


def takes_conv(x: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes x [B, N, C] on a CPU: one float dtype, inputs and
    weight contiguous, at most 8 taps.
    """
    dtypes = {x.dtype, inputs.dtype, weight.dtype}
    dense = inputs.is_contiguous() and weight.is_contiguous() and x.stride(-1) == 1
    few = weight.shape[1] <= MOST and len(dtypes) == 1 and x.dtype in FLOATS
    return dense and few and CONV.usable()


def conv_step(
    x: torch.Tensor,
    inputs: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`conv_step` of kernels/recurrent/conv.py, same arguments. bias: contiguous, in x's dtype."""
    return _convolved(x, inputs, positions.long().contiguous(), weight, bias)


def conv_chunk(
    x: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`conv_chunk` of kernels/recurrent/conv.py, same arguments. bias: contiguous, in x's dtype."""
    return _convolved(x, before, None, weight, bias)


def _convolved(
    x: torch.Tensor,
    inputs: torch.Tensor,
    places: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    (batch, count, channels), size = x.shape, x.element_size()
    out = torch.empty(batch, count, channels, dtype=x.dtype)
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    call = _Conv(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        inputs.data_ptr(), out.data_ptr(), None if places is None else places.data_ptr(),
        x.stride(0) * size, x.stride(1) * size,
        batch, count, channels, weight.shape[1], inputs.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    check(loaded().omnikv_conv(ctypes.byref(call), FLOATS[x.dtype]), CONV.name)
    return out
