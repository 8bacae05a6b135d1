"""One query's attention to rows that it meets at one distance, wherever they stand, and to the
newest ones at their own: the step of InfLLM (Xiao et al., NeurIPS 2024), by one call of C++.

Where there is no C++ kernel, callers turn the far keys back and multiply.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.attention.native import LANES, SPLIT
from kernels.launch.dispatch import NATIVE
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded


class _Far(ctypes.Structure):
    """`Far` of far.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "distant", "far_k", "far_v", "k", "v")),
        *(
            (f"{rows}_{step}", ctypes.c_long)
            for rows in ("far_key", "far_value", "key", "value")
            for step in ("head", "row")
        ),
        *((name, ctypes.c_void_p) for name in ("at", "rows", "freq", "out", "received")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "group", "dim", "far", "near", "pairs", "split", "threads")
        ),
        ("scale", ctypes.c_float),
    ]


_BINDING = Binding("attention at one distance", omnikv_sizeof_far=_Far)


def meets_far(backend: str, k: torch.Tensor) -> bool:
    """Whether `attend_far` runs under a backend, on rows k [.., D]. The first call compiles it and
    runs its self-test.
    """
    fits = k.device.type == "cpu" and k.dtype in FLOATS and not k.shape[-1] % LANES
    return backend in NATIVE and fits and _BINDING.usable()


def attend_far(
    q: torch.Tensor,
    distant: torch.Tensor,
    far_k: torch.Tensor,
    far_v: torch.Tensor,
    at: torch.Tensor,
    freq: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over far and near rows.

    q, distant [H, D]: the query, and the same turned from position 0 to the distance; far_k, far_v
    [Hkv, n, D]: rotated rows at positions `at` int64 [n], whose keys are met as if they stood at 0;
    rows int64 [n]: which of far_k, far_v [Hkv, T, D] they are, None: all in turn; freq float64
    [R / 2]: of the rotation; k, v [Hkv, m, D], m >= 1: rows at their own distances. Rows of one
    dtype, last dim contiguous. Returns (out [H, D], what each head weighs the near rows by [H, m]),
    float32. Raises MemoryError where the kernel finds no room for its own.
    """
    (heads, near, dim), far = k.shape, len(at)
    wide, distant, at = q.float().contiguous(), distant.float().contiguous(), at.contiguous()
    rows = None if rows is None else rows.contiguous()
    out, received = torch.empty(len(q), dim), torch.empty(len(q), near)
    size = k.element_size()
    call = _Far(
        wide.data_ptr(), distant.data_ptr(), *(t.data_ptr() for t in (far_k, far_v, k, v)),
        *(step * size for side in (far_k, far_v, k, v) for step in side.stride()[:2]),
        at.data_ptr(), None if rows is None else rows.data_ptr(), freq.data_ptr(),
        out.data_ptr(), received.data_ptr(),
        heads, len(q) // heads, dim, far, near, len(freq), SPLIT, torch.get_num_threads(), scale,
    )  # fmt: skip
    code = loaded().omnikv_far_and_near(ctypes.byref(call), FLOATS[k.dtype])
    check(code, f"attention at one distance in {k.dtype}")
    return out, received


def attend_far_ref(
    q: torch.Tensor,
    distant: torch.Tensor,
    far_k: torch.Tensor,
    far_v: torch.Tensor,
    at: torch.Tensor,
    freq: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_far` in plain torch, same arguments and result, in the dtype that q promotes float32
    to.
    """
    wide, (heads, _, dim), size = torch.promote_types(q.dtype, torch.float32), k.shape, len(freq)
    if rows is not None:
        far_k, far_v = far_k[:, rows], far_v[:, rows]
    angle = at.unsqueeze(1).double() * freq
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    one, other, rest = far_k.to(wide).split([size, size, dim - 2 * size], -1)
    back = torch.cat((one * cos + other * sin, other * cos - one * sin, rest), -1)
    far = distant.to(wide).view(heads, -1, dim) @ back.mT
    near = q.to(wide).view(heads, -1, dim) @ k.to(wide).mT
    weights = (torch.cat([far, near], -1) * scale).softmax(-1)
    out = weights @ torch.cat([far_v, v], 1).to(wide)
    return out.flatten(0, 1), weights[..., len(at) :].flatten(0, 1)


@_BINDING.self_test
def _met() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q, distant = torch.randn(2, 6, 64, generator=generator)
    far_k, far_v = torch.randn(2, 2, 101, 64, generator=generator)
    k, v = torch.randn(2, 2, 301, 64, generator=generator)
    at = torch.cat([torch.arange(7), torch.arange(5000, 5090), torch.tensor([6000, 6002, 6003, 9])])
    freq = 10000.0 ** -(torch.arange(24).double() / 24)
    for dtype in FLOATS:
        rows = [t.to(dtype) for t in (far_k, far_v, k, v)]
        given = q.to(dtype), distant, *rows[:2], at, freq, *rows[2:], 0.125
        out, received = attend_far(*given)
        expected = attend_far_ref(*given)
        yield f"attention at one distance in {dtype}", out, expected[0], dtype
        yield f"what near rows receive in {dtype}", received, expected[1], dtype
        some = *given[:4], at[::3], *given[5:], torch.arange(100, -1, -3)
        found = attend_far(*some)[0]
        yield f"rows where they lie in {dtype}", found, attend_far_ref(*some)[0], dtype
