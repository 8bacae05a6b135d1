"""One query's step over a store of K and V: the new token's row is written, its query attends to
what is seen, and what it weighs is left, by one call of the C++ kernel.

A store is k, v [h, R, D] and positions int32 [h, R], of which the first `held` rows count, in any
order. Where there is no C++ kernel, callers do the same by a launcher each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.attention.native import LANES, SPLIT
from kernels.launch.dispatch import NATIVE
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

UNSEEN = -(2**31)  # `oldest` where every row is seen


class _Step(ctypes.Structure):
    """`Step` of kept.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "out", "new_k", "new_v")),
        *((name, ctypes.c_long) for name in ("new_key_head", "new_value_head")),
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row", "value_head", "value_row")),
        ("positions", ctypes.c_void_p),
        ("position_head", ctypes.c_long),
        ("scores", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("score_head", "score_query")),
        *((name, ctypes.c_void_p) for name in ("left", "starts", "lengths", "slots")),
        *((name, ctypes.c_void_p) for name in ("sinks", "cos", "sin")),
        ("turn", ctypes.c_long),
        *(
            (name, ctypes.c_int)
            for name in (
                "key_bytes",
                "value_bytes",
                "heads",
                "group",
                "dim",
                "held",
                "at",
                "first",
                "oldest",
                "pairs",
                "kinds",
                "weighs",
                "split",
                "threads",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]


_BINDING = Binding("a step over kept rows", omnikv_sizeof_kept=_Step)


class Store(NamedTuple):
    """What some K/V heads have kept: k, v [h, R, D], positions int32 [h, R], scores float32
    [h, S, R] or None, last dims contiguous; the first `held` rows count.
    """

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor | None
    held: int


class Turned(NamedTuple):
    """Rows that a window's query meets otherwise: the `first` ones turned by the angles of cos, sin
    float32 [1 or first, R / 2], and of those behind them none at a position below `oldest`. All
    heads hold the same positions.
    """

    first: int
    oldest: int
    cos: torch.Tensor | None
    sin: torch.Tensor | None


def steps(backend: str, dtype: torch.dtype, rows: torch.dtype, dim: int, device: str) -> bool:
    """Whether `kept_step` runs under a backend, for queries of a dtype and stores of rows of
    another under heads of `dim` elements. The first call compiles it and runs its self-test.
    """
    alike = dtype == rows and rows in FLOATS and not dim % LANES
    return backend in NATIVE and device == "cpu" and alike and _BINDING.usable()


def kept_step(
    q: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    store: Store,
    at: int,
    scale: float,
    softmax: Softmax = PLAIN,
    leaves: str = "",
    turned: Turned | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write a token's rows behind those held and attend with its query.

    q [1, 1, G * h, D], of the store's dtype; new_k, new_v [h, 1, D], last dim contiguous; at: the
    token's position; scale: of the logits. leaves: "logits" (scaled and capped), "weights" (their
    softmax, with the model's sinks) or "". Returns (out [1, 1, G * h, D], float32 [h, G, 1,
    held + 1] or None). Mutates the store's row `held`, whose scores become 0. Raises MemoryError
    where the kernel finds no room for its own, ValueError where the store has none for the row.
    """
    q, (heads, room, dim) = q.contiguous(), store.k.shape
    if store.held >= room:
        raise ValueError(f"kept_step: found {store.held} rows held of {room}, expected room")
    out, group, seen = torch.empty_like(q), q.shape[2] // heads, store.held + 1
    left = torch.empty(heads, group, 1, seen) if leaves else None
    call = _call(q, out, new_k, new_v, store.k, store.v, store.positions)
    call.position_head, call.held, call.at = store.positions.stride(0), store.held, at
    call.key_head, call.value_head = (t.stride(0) * t.element_size() for t in (store.k, store.v))
    call.heads, call.group, call.dim, call.oldest = heads, group, dim, UNSEEN
    call.scale, call.cap, call.weighs = scale, softmax.cap, leaves == "weights"
    scores = store.scores
    if scores is not None:
        call.scores, call.kinds = scores.data_ptr(), scores.shape[1]
        call.score_head, call.score_query = scores.stride()[:2]
    if left is not None:
        call.left = left.data_ptr()
    if softmax.sinks is not None:
        call.sinks = softmax.sinks.data_ptr()
    if turned is not None:
        call.first, call.oldest = turned.first, turned.oldest
        if turned.cos is not None and turned.sin is not None:
            call.cos, call.sin, call.pairs = (
                turned.cos.data_ptr(),
                turned.sin.data_ptr(),
                turned.cos.shape[1],
            )
            call.turn = turned.cos.stride(0) if len(turned.cos) > 1 else 0
    code = loaded().omnikv_kept_step(ctypes.byref(call), FLOATS[q.dtype])
    check(code, f"a step over kept rows in {q.dtype}")
    return out, left


def kept_step_ragged(
    q: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    most: int,
    at: int,
    scale: float,
) -> torch.Tensor:
    """As `kept_step`, of heads that hold different counts in one run of rows: k, v [N, D],
    positions int32 [N].

    table int64 [3, h], contiguous: the row at which a head begins, how many it has with the new
    one, and where that one goes; most: the largest of the second. Returns out [1, 1, G * h, D].
    Mutates k, v and positions at the last. Raises MemoryError as `kept_step` does.
    """
    q, heads = q.contiguous(), table.shape[1]
    out = torch.empty_like(q)
    call = _call(q, out, new_k, new_v, k, v, positions)
    row = table.data_ptr()
    call.starts, call.lengths, call.slots = row, row + 8 * heads, row + 16 * heads
    call.held, call.at, call.heads, call.oldest = most - 1, at, heads, UNSEEN
    call.group, call.dim, call.scale = q.shape[2] // heads, q.shape[3], scale
    code = loaded().omnikv_kept_step(ctypes.byref(call), FLOATS[q.dtype])
    check(code, f"a step over kept rows in {q.dtype}")
    return out


def _call(
    q: torch.Tensor,
    out: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
) -> _Step:
    """What every call has: the tensors, and the bytes of their rows."""
    size = q.element_size()
    width = k.shape[-1] * size
    call = _Step(
        q.data_ptr(), out.data_ptr(), new_k.data_ptr(), new_v.data_ptr(),
        new_k.stride(0) * size, new_v.stride(0) * size, k.data_ptr(), v.data_ptr(),
        0, k.stride(-2) * size, 0, v.stride(-2) * size, positions.data_ptr(),
    )  # fmt: skip
    call.key_bytes = call.value_bytes = width
    call.split, call.threads = SPLIT, torch.get_num_threads()
    return call


def kept_step_ref(
    q: torch.Tensor,
    new_k: torch.Tensor,
    new_v: torch.Tensor,
    store: Store,
    at: int,
    scale: float,
    softmax: Softmax = PLAIN,
    leaves: str = "",
    turned: Turned | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`kept_step` in plain torch, same arguments and result, in the dtype that q promotes float32
    to.
    """
    held, heads, dim = store.held, *store.k.shape[::2]
    store.k[:, held], store.v[:, held] = new_k[:, 0], new_v[:, 0]
    store.positions[:, held] = at
    if store.scores is not None:
        store.scores[:, :, held] = 0.0
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (t[:, : held + 1].to(wide).unsqueeze(1) for t in (store.k, store.v))
    folded = q.to(wide).view(heads, -1, 1, dim)
    logits = folded @ k.mT
    if turned is not None:
        unseen = store.positions[0, : held + 1] < turned.oldest
        unseen[: turned.first] = False
        if turned.cos is not None and turned.sin is not None:
            by = turned.cos.to(wide), turned.sin.to(wide)
            for row in range(turned.first):
                cos, sin = (t[min(row, len(t) - 1)] for t in by)
                own = slice(row, row + 1)
                logits[..., own] = _turn(folded, cos, sin) @ k[:, :, own].mT
    logits = softmax.capped(logits * scale)
    if turned is not None:
        logits = logits.masked_fill(unseen, float("-inf"))
    weights = softmax.grouped(logits)
    out = (weights @ v).view(1, 1, -1, dim).to(q.dtype)
    return out, {"": None, "logits": logits, "weights": weights}[leaves]


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + R / 2) of x [.., D]: [.., D]; dimensions from R on stay."""
    size = len(cos)
    one, other, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), -1)


@_BINDING.self_test
def _steps() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 1, 6, 64, generator=generator)
    new_k, new_v = torch.randn(2, 2, 1, 64, generator=generator)
    k, v = torch.randn(2, 2, 300, 64, generator=generator)
    angles = torch.randn(2, 3, 24, generator=generator)
    positions = torch.stack([torch.arange(300, dtype=torch.int32)] * 2)
    positions[:, 3:290] = positions[:, 3:290].flip(1)
    sinks = Softmax(3.0, torch.randn(6, generator=generator))
    window = Turned(3, 20, angles[0], angles[1])
    for dtype in FLOATS:
        for softmax, leaves, seen in ((PLAIN, "weights", None), (sinks, "", window)):
            results = []
            for form in (kept_step, kept_step_ref):
                mine = k.to(dtype, copy=True), v.to(dtype, copy=True), positions.clone()
                rows = Store(*mine, None, 290)
                new = q.to(dtype), new_k.to(dtype), new_v.to(dtype)
                out, left = form(*new, rows, 900, 0.125, softmax, leaves, seen)
                results.append((out, left, *mine))
            for name, one, other in zip(("attention", "what is left"), *results):
                if one is not None and other is not None:
                    yield f"{name} of a step over kept rows in {dtype}", one, other, dtype
            for one, other in zip(results[0][2:], results[1][2:]):
                yield "a row that was put", one.float(), other.float(), torch.float32
