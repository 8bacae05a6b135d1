"""What a step of InfLLM (Xiao et al., NeurIPS 2024) does of one layer, bound once: blocks are
ranked, one query attends to far and near rows, and what the near ones receive is added, by one call
of C++.

Where that call is not to be had, callers do the same by operators and kernels/kept/far.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.attention.native import SPLIT, where
from kernels.kept.far import attend_far_ref
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded


class _Stream(ctypes.Structure):
    """`Stream` of far.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row", "value_head", "value_row")),
        ("means", ctypes.c_void_p),
        ("scores", ctypes.c_void_p * 2),
        ("freq", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("heads", "group", "dim", "pairs", "init", "local")),
        *((name, ctypes.c_int) for name in ("block", "topk", "slots", "split")),
        *((name, ctypes.c_int) for name in ("kind", "mean_kind", "q_kind")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("half", "start", "attended", "initial", "blocks")),
        *((name, ctypes.c_int) for name in ("rest", "threads")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "q", "out", "places")),
    ]


BINDING = Binding("a step of a stream", omnikv_sizeof_stream=_Stream)


class Sizes(NamedTuple):
    """Tokens: the first ones that are always read, a query's window, a block; and how many blocks
    are read.
    """

    init: int
    local: int
    block: int
    topk: int


class Place(NamedTuple):
    """Where a step's query stands. start: its position, at least `local`; initial: first tokens
    that are outside its window; blocks: whole blocks behind init; rest: the first position in none;
    cos, sin float32 [R / 2]: of the turn from position 0 to the distance of far rows.
    """

    start: int
    initial: int
    blocks: int
    rest: int
    cos: torch.Tensor
    sin: torch.Tensor


class BoundStream:
    """One layer of one sequence. It keeps no tensor alive: who binds it does.

    q [1, 1, H, D] floats, of the session's dtype; k, v [1, Hkv, T, D] floats of one dtype, rotated,
    by position; means [N, H, D], contiguous: of each block; scores float32 [2, H, S]: two halves,
    position p in slot p % S; freq float64 [R / 2]: of the rotation.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        means: torch.Tensor,
        scores: torch.Tensor,
        freq: torch.Tensor,
        sizes: Sizes,
        scale: float,
    ) -> None:
        self._rows, size, heads = where(k, v), k.element_size(), q.shape[2]
        assert means.is_contiguous() and scores.stride()[1:] == (scores.shape[2], 1)
        halves = [half.data_ptr() for half in scores]
        self._stream = _Stream(
            k.data_ptr(), v.data_ptr(),
            *(step * size for t in (k, v) for step in t.stride()[1:3]),
            means.data_ptr(), (ctypes.c_void_p * 2)(*halves), freq.data_ptr(),
            k.shape[1], heads // k.shape[1], q.shape[3], len(freq), sizes.init, sizes.local,
            sizes.block, sizes.topk, scores.shape[2], SPLIT,
            FLOATS[k.dtype], FLOATS[means.dtype], FLOATS[q.dtype], scale,
        )  # fmt: skip
        self._at, self._topk = ctypes.byref(self._stream), sizes.topk

    def of(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether it is bound to these rows."""
        return self._rows == where(k, v)

    def run(
        self, q: torch.Tensor, place: Place, half: int, attended: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend and collect. half: of the scores, which is read; the other one becomes what it is
        after the step. attended: positions that have a score. Returns (out like q, the blocks that
        were read int64, ascending: of equal ones the first). Raises MemoryError where the kernel
        finds no room for its own.
        """
        stream, q = self._stream, q.contiguous()
        out = torch.empty_like(q)
        read = torch.empty(min(self._topk, place.blocks), dtype=torch.int64)
        stream.half, stream.start, stream.attended = half, place.start, attended
        stream.initial, stream.blocks, stream.rest = place.initial, place.blocks, place.rest
        stream.threads = torch.get_num_threads()
        stream.cos, stream.sin = place.cos.data_ptr(), place.sin.data_ptr()
        stream.q, stream.out, stream.places = q.data_ptr(), out.data_ptr(), read.data_ptr()
        check(loaded().omnikv_stream_step(self._at), "a step of a stream")
        return out, read


@BINDING.self_test
def _steps() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    sizes, count, freq = Sizes(5, 20, 8, 3), 5, 100.0 ** -(torch.arange(8).double() / 8)
    start = sizes.init + count * sizes.block + 3 + sizes.local
    cos, sin = (20 * freq).cos().float(), (20 * freq).sin().float()
    place = Place(start, 5, count, start - 3 - sizes.local, cos, sin)
    for dtype in FLOATS:
        k, v = torch.randn(2, 2, 80, 32, generator=generator).to(dtype)
        q = torch.randn(1, 1, 6, 32, generator=generator).to(dtype)
        means = torch.randn(count, 6, 32, generator=generator).to(dtype)
        scores = torch.rand(2, 6, 30, generator=generator)
        expected = scores[0].clone()
        bound = BoundStream(q, k[None], v[None], means, scores, freq, sizes, 0.2)
        out, read = bound.run(q, place, 0, start)
        one, other, rest = q[0, 0].float().split([8, 8, 16], -1)
        distant = torch.cat((one * cos - other * sin, other * cos + one * sin, rest), -1)
        best = (means.float() * distant).sum((1, 2)).topk(sizes.topk).indices.sort().values
        yield f"blocks read in {dtype}", read.float(), best.float(), torch.float32
        own = (sizes.init + sizes.block * best.unsqueeze(1) + torch.arange(8)).flatten()
        far = torch.cat([torch.arange(5), own, torch.arange(place.rest, start + 1 - 20)])
        near = slice(start + 1 - sizes.local, start + 1)
        given = q[0, 0], distant, k[:, far], v[:, far], far, freq, k[:, near], v[:, near]
        attended, received = attend_far_ref(*given, 0.2)
        yield f"a step of a stream in {dtype}", out[0, 0], attended, dtype
        slots = torch.arange(near.start, near.stop) % 30
        expected[:, start % 30] = 0
        expected[:, slots] += received
        yield f"what its window has received in {dtype}", scores[1], expected, dtype
