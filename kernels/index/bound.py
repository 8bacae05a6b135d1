"""Attention of a decode step to rows that were chosen, its arguments bound once: what does not
change from step to step is told to C++ when a layer runs for the first time.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from kernels.attention.native import SPLIT, Call, attends, room
from kernels.launch.dispatch import NATIVE
from kernels.launch.softmax import Softmax
from kernels.native.kinds import FLOATS
from kernels.native.library import check, loaded


def told_lists(
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    lse: torch.Tensor,
    parts: torch.Tensor,
    scale: float,
    softmax: Softmax,
) -> Call:
    """What C++ is told in every step of one query that attends to rows k, v [Hkv, T, D] of an index
    [1, Hkv or H, K] and to a tail; what it visits is still to be said. softmax: without sinks. The
    kernel leaves its results in lse float32 [H] and parts, as in `attend`.
    """
    lists = len(index)
    call = _told(k, v, len(lse) if lists == len(lse) else len(k), lse, scale, softmax)
    call.index, call.index_head = index.data_ptr(), 0 if lists == 1 else index.stride(0)
    call.parts = parts.data_ptr()
    return call


def _told(
    k: torch.Tensor,
    v: torch.Tensor,
    units: int,
    lse: torch.Tensor,
    scale: float,
    softmax: Softmax,
) -> Call:
    """What does not change from step to step where each of `units` heads has a list: of rows k, v
    [Hkv, T, D] and of lse [H].
    """
    assert softmax.sinks is None
    size, group = k.element_size(), len(lse) // units
    return Call(
        k=k.data_ptr(), v=v.data_ptr(),
        key_head=k.stride(0) * size, key_row=k.stride(1) * size,
        value_head=v.stride(0) * size, value_row=v.stride(1) * size,
        lse=lse.data_ptr(), heads=units, queries=1, group=group, dim=k.shape[2], split=SPLIT,
        shared=units // len(k), scale=scale, cap=softmax.cap, unit=1,
    )  # fmt: skip


class Chosen:
    """Attention of a layer's steps to the rows that they chose, its arguments bound once: a step
    tells what is new in it, and makes no tensor but the result.

    One layer's rows k, v [1, Hkv, T, D], floats of one dtype, last dim contiguous, as `takes`
    says, and queries of `heads` heads. scale, softmax: as in `decode_sparse`
    (kernels/attention/sparse.py); parts: as `attend` of kernels/attention/native.py has them.
    """

    def __init__(
        self,
        heads: int,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softmax: Softmax,
        parts: torch.Tensor | None = None,
    ) -> None:
        # not kept: a bank that is dropped is freed at once
        self._rows = weakref.ref(k), weakref.ref(v)
        kv_heads, dim = k.shape[1], k.shape[3]
        self._most, self._kind = k.shape[2], FLOATS[k.dtype]
        self._sizes = kv_heads, heads // kv_heads, dim
        self._lse = torch.empty(heads)  # nobody reads it
        self._call = _told(k[0], v[0], kv_heads, self._lse, scale, softmax)
        self._parts = room(parts, *self._sizes, self._most)
        self._call.parts = self._parts.data_ptr()
        self._given = ctypes.byref(self._call)

    def of(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether these are the tensors that it has."""
        return k is self._rows[0]() and v is self._rows[1]()

    def attend(
        self,
        q: torch.Tensor,
        index: torch.Tensor,
        kept: int,
        start: int,
        stop: int,
        unit: int = 1,
    ) -> torch.Tensor:
        """Attend to the first `kept` entries of index int32 [1, 1 or Hkv, K], ascending, each of
        `unit` rows in turn, and the rows start .. stop - 1. q [1, 1, H, D] floats -> the same, new.
        Raises MemoryError where the kernel finds no room for its queries.
        """
        call, q = self._call, q.contiguous()
        visited = kept * unit + stop - start
        if visited > self._most:  # rows that are named twice
            self._most, self._parts = visited, room(self._parts, *self._sizes, visited)
            call.parts = self._parts.data_ptr()
        call.index = index.data_ptr()
        call.index_head = 0 if index.shape[1] == 1 else index.stride(1)
        call.kept, call.start, call.visited, call.unit = kept * unit, start, visited, unit
        call.threads = torch.get_num_threads()
        out = torch.empty_like(q)
        rows = ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(out.data_ptr()), FLOATS[q.dtype]
        code = loaded().omnikv_attend_heads(self._given, self._kind, *rows)
        check(code, "attention to chosen rows")
        return out


def takes(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
) -> bool:
    """Whether `Chosen` runs here under a backend for queries q [B, Q, H, D] and rows k, v [B, Hkv,
    T, D] of their layer.
    """
    alone = q.shape[0] == q.shape[1] == 1 and q.device.type == "cpu" and backend in NATIVE
    plain = softmax.sinks is None and k.dtype in FLOATS and q.dtype in FLOATS
    return alone and plain and attends(k, v, q.shape[3])
