"""Mamba-2's recurrence by the C++ kernels, of a step and of a prompt."""

from __future__ import annotations

import ctypes

import torch

from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, check, loaded
from kernels.recurrent.native import LANES, MOST


class _Tokens(ctypes.Structure):
    """`Tokens` of ssd.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("c", "b", "x", "g", "dt", "skip", "state", "out")),
        *((f"{side}_{step}", ctypes.c_long) for side in "cbx" for step in ("batch", "row")),
        *(
            (name, ctypes.c_int)
            for name in ("batch", "count", "groups", "each", "ds", "dh", "threads")
        ),
    ]


class _Step(ctypes.Structure):
    """`Step` of ssd.cpp."""

    _fields_ = [
        ("of", _Tokens),
        *((name, ctypes.c_void_p) for name in ("keys", "deltas", "decays", "base", "positions")),
        ("size", ctypes.c_int),
    ]


class _Chunk(ctypes.Structure):
    """`Chunk` of ssd.cpp."""

    _fields_ = [
        ("of", _Tokens),
        *((name, ctypes.c_void_p) for name in ("after", "keys", "deltas")),
        ("keep", ctypes.c_int),
    ]


STEP = Binding("Mamba-2's recurrence", omnikv_sizeof_ssd_step=_Step)
CHUNK = Binding("Mamba-2's recurrence over a prompt", omnikv_sizeof_ssd_chunk=_Chunk)
# c, b, x, g, dt and skip of tokens
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def takes_step(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes a step of x [B, Q, H, dh] on a CPU: at most 8
    tokens, and as `_takes` says.
    """
    return x.shape[1] <= MOST and _takes(c, b, x, state) and STEP.usable()


def takes_chunk(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes a prompt of x [B, N, H, dh] on a CPU."""
    return _takes(c, b, x, state) and CHUNK.usable()


def _takes(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether dh is a multiple of 16, heads follow each other, c, b and x have one float dtype, and
    S is contiguous.
    """
    dense = all(t.stride()[2:] == (t.shape[3], 1) for t in (c, b, x))
    alike = c.dtype == b.dtype == x.dtype and x.dtype in FLOATS
    return dense and alike and x.shape[-1] % LANES == 0 and state.is_contiguous()


def _tokens(given: Given, state: torch.Tensor, out: torch.Tensor) -> _Tokens:
    c, b, x, g, dt, skip = given
    (batch, count, groups, ds), (heads, dh) = b.shape, x.shape[2:]
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (g, dt, skip, state))
    return _Tokens(
        *(t.data_ptr() for t in (c, b, x, g, dt, skip, state, out)),
        *(step * t.element_size() for t in (c, b, x) for step in t.stride()[:2]),
        batch, count, groups, heads // groups, ds, dh, torch.get_num_threads(),
    )  # fmt: skip


def ssd_step(
    given: Given,
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    base: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """`ssd_step` of kernels/recurrent/ssd.py, its arguments. rings: keys, deltas and decays,
    contiguous, which it mutates.
    """
    c, b, x, g, dt, skip = given
    given = c, b, x, g.contiguous(), dt.contiguous(), skip
    assert all(ring.is_contiguous() for ring in rings)
    out = torch.empty(x.shape)
    places = [t.long().contiguous() for t in (base, positions)]
    call = _Step(
        _tokens(given, state, out),
        *(t.data_ptr() for t in (*rings, *places)),
        rings[0].shape[2],
    )
    check(loaded().omnikv_ssd_step(ctypes.byref(call), FLOATS[x.dtype]), STEP.name)
    return out


def ssd_chunk(given: Given, state: torch.Tensor, keep: int) -> tuple[torch.Tensor, ...]:
    """`ssd_chunk` of kernels/recurrent/ssd.py, its arguments: (y, S after the first N - keep
    tokens, the other tokens' keys, deltas and decays).
    """
    c, b, x, g, dt, skip = given
    given = c, b, x, g.contiguous(), dt.contiguous(), skip
    (batch, count, groups, ds), (heads, dh) = b.shape, x.shape[2:]
    out, after = torch.empty(x.shape), torch.empty_like(state)
    keys, deltas = torch.empty(batch, groups, keep, ds), torch.empty(batch, heads, keep, dh)
    call = _Chunk(_tokens(given, state, out), *(t.data_ptr() for t in (after, keys, deltas)), keep)
    check(loaded().omnikv_ssd_chunk(ctypes.byref(call), FLOATS[x.dtype]), CHUNK.name)
    return out, after, keys, deltas, g[:, count - keep :].transpose(1, 2).contiguous()
