"""What a step does of one layer, bound once: the newest token is learnt by an index of K, its query
chooses by it and attends to what is chosen, by one call of C++.

Where that call is not to be had, callers do the same by a launcher each: learn.py, choose.py,
kernels/attention/sparse.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kernels.attention.native import LANES, Call, attends, room, where
from kernels.attention.reference import attend_alone
from kernels.index.bound import told_lists
from kernels.index.choose import BINDING as CHOICE
from kernels.index.choose import Choice, told_codes
from kernels.index.choose import told_channels as by_channels
from kernels.index.indexes import Channels, Codes
from kernels.index.learn import BINDING as LEARNING
from kernels.index.learn import Learnt, told_channels, told_value
from kernels.launch.dispatch import NATIVE
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

LEARNS = {"channels": 0, "code": 1, "value": 2}


class _Layer(ctypes.Structure):
    """`Layer` of choose.cpp."""

    _fields_ = [
        ("learnt", ctypes.POINTER(Learnt) * 2),
        ("choice", ctypes.POINTER(Choice)),
        ("attention", ctypes.POINTER(Call)),
        ("means", ctypes.c_void_p),
        ("learns", ctypes.c_int * 2),
        *((name, ctypes.c_int) for name in ("by_codes", "kind", "q_kind")),
        *((name, ctypes.c_int) for name in ("learning", "tokens", "ranked", "start")),
        *((name, ctypes.c_int) for name in ("newest", "known", "threads")),
        *((name, ctypes.c_void_p) for name in ("stop", "room", "q", "out")),
    ]


BINDING = Binding("a step by an index", omnikv_sizeof_layer=_Layer)


class Now(NamedTuple):
    """What layers of a step share. tokens: of the sequence; ranked: those that compete, as
    `choose_by_channels` or `choose_by_codes` are told; start: of the tail; stop, room: as Ends has
    them; newest, known: as those two are told as well.
    """

    tokens: int
    ranked: int
    start: int
    stop: torch.Tensor
    room: torch.Tensor
    newest: int = 0
    known: int = 0


def binds(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
) -> bool:
    """Whether a BoundLayer takes queries q [1, 1, H, D] of a sequence's rows k, v [1, Hkv, T, D]
    under a backend. The first call compiles it and runs its self-test.
    """
    floats = q.dtype in FLOATS and k.dtype in FLOATS and q.device.type == "cpu"
    alone = q.shape[:2] == (1, 1) and softmax.sinks is None and not q.shape[3] % LANES
    usable = backend in NATIVE and floats and alone and attends(k, v, q.shape[3])
    return usable and CHOICE.usable() and LEARNING.usable() and BINDING.usable()


class BoundLayer:
    """One layer of one sequence. It keeps no tensor alive that is read: who binds it does.

    index: of one sequence, whose lists take equally many; q [1, 1, H, D] of the session's dtype; k,
    v [1, Hkv, T, D]: the bank's rows; counts int32: as Ends has them; learnt: what learn.py tells
    C++ of these rows, beside its name of LEARNS; means float32 [Hkv, D] or None: what has the
    weight that a choice leaves (`weights` of its index); parts: as `attend` of
    kernels/attention/native.py has them.
    """

    def __init__(
        self,
        index: Channels | Codes,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        softmax: Softmax = PLAIN,
        learnt: Sequence[tuple[str, Learnt]] = (),
        means: torch.Tensor | None = None,
        parts: torch.Tensor | None = None,
    ) -> None:
        heads, dim = q.shape[2:]
        self._rows = where(k, v)
        choice = (
            told_codes(index, q[0], 0) if isinstance(index, Codes) else by_channels(index, q[0], 0)
        )
        self._left = torch.empty(heads), room(parts, heads, 1, dim, k.shape[2])
        attention = told_lists(k[0], v[0], index.chosen, *self._left, scale, softmax)
        self._choice, self._counts = choice, counts.data_ptr()
        self._layer = _Layer(
            choice=ctypes.pointer(choice),
            attention=ctypes.pointer(attention),
            means=None if means is None else means.data_ptr(),
            by_codes=isinstance(index, Codes),
            kind=FLOATS[k.dtype],
            q_kind=FLOATS[q.dtype],
        )
        for i, (name, call) in enumerate(learnt):
            self._layer.learnt[i] = ctypes.pointer(call)
            self._layer.learns[i] = LEARNS[name]
        self._at = ctypes.byref(self._layer)

    def of(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether it is bound to these rows."""
        return self._rows == where(k, v)

    def run(self, q: torch.Tensor, now: Now, learning: bool) -> torch.Tensor:
        """Learn the newest token, where `learning`, choose and attend: q [1, 1, H, D] -> the same.

        Mutates what the index leaves, counts, and what learns. Raises MemoryError where a
        kernel finds no room for its own.
        """
        layer, q = self._layer, q.contiguous()
        out = torch.empty_like(q)
        self._choice.counts = self._counts
        layer.learning, layer.tokens, layer.ranked = learning, now.tokens, now.ranked
        layer.start, layer.newest, layer.known = now.start, now.newest, now.known
        layer.threads = torch.get_num_threads()
        layer.stop, layer.room = now.stop.data_ptr(), now.room.data_ptr()
        layer.q, layer.out = q.data_ptr(), out.data_ptr()
        check(loaded().omnikv_choose_and_attend(self._at), "a step by an index")
        return out


@BINDING.self_test
def _steps() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for dtype in FLOATS:
        k, v = torch.randn(2, 1, 2, 150, 32, generator=generator).to(dtype)
        q = torch.randn(1, 1, 6, 32, generator=generator).to(dtype)
        held = torch.zeros(1, 2, 32, 150, dtype=dtype)
        held[:, :, :, :129] = k.mT[:, :, :, :129]
        scores, chosen = torch.zeros(2, 150), torch.zeros(2, 20, dtype=torch.int32)
        logits, weights = torch.zeros(1, 6, 150), torch.zeros(1, 6)
        given = scores, chosen, "sum", 0.2, logits
        index = Channels(*given, rows=held, r=9, weights=weights)
        stop, room, counts = (torch.full((2,), n, dtype=torch.int32) for n in (120, 20, 0))
        prefix, blocks = (torch.ones(2, n, 32, dtype=torch.float64) for n in (64, 4))
        means = torch.zeros(2, 32)
        learnt = "channels", told_channels(held[0], k[0])
        more = "value", told_value(prefix, blocks, v[0], means)
        bound = BoundLayer(index, q, k, v, counts, 0.2, PLAIN, [learnt, more], means)
        out = bound.run(q, Now(130, 130, 120, stop, room, 10), True)
        token, row = held[0, :, :, 129].contiguous(), k[0, :, 129].contiguous()
        yield f"the token learnt in {dtype}", token, row, torch.int32
        rows = torch.cat([chosen.long(), torch.arange(120, 130).expand(2, -1)], 1)
        for head, some in enumerate(rows):
            mine, (own_k, own_v) = (
                slice(3 * head, 3 * head + 3),
                (t[0, head, None, some].float() for t in (k, v)),
            )
            read, _ = attend_alone(q[0, :, mine].float(), own_k, own_v, [30], 0.2)
            expected = torch.lerp(means[head], read, weights[0, mine, None])
            yield f"a step by an index in {dtype}", out[0, :, mine], expected, dtype
