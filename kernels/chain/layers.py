"""Layers of a decode step of one token in one call (layers.cpp). They call the kernels that Python
would call one by one, told the same, so that bits are the same.

Python between the calls of a layer takes 120 us at 2,048 tokens and up to 400 behind layers that
read more rows than the caches hold, and no second thread shares it (docs/LOG.md, 2026-11-28).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.attention.dense import decode_dense
from kernels.attention.native import SPLIT, attends, part_floats
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.chain.matrix import FewBits, Held, Matrix, held, multiply
from kernels.launch.softmax import PLAIN, Softmax
from kernels.layer.native_product import Product
from kernels.layer.native_step import (
    ACTIVATIONS,
    act_rows,
    normalize_rows,
    rotate_store,
    stores,
)
from kernels.native.kinds import FLOATS, PACKED, ROWS
from kernels.native.library import Binding, Case, check, loaded
from kernels.quant import native as quant
from kernels.quant.native import Panels
from kernels.quant.rounding import to_int4, to_int8
from kernels.rows.forms import DTYPES, FORMS
from kernels.rows.native import packs
from kernels.select import native as topk
from kernels.select.topk import select_topk

CHOICES = {"": 0, "softmax": 1, "raw": 2}  # `Choice` of layers.cpp


_NORMS = "input", "post", "q", "k", "o", "down"


class _Layer(ctypes.Structure):
    """`Layer` of layers.cpp."""

    _fields_ = [
        *((name, Held) for name in ("qkv", "o", "gate_up", "down")),
        *((f"{name}_norm", ctypes.c_void_p) for name in _NORMS),
        *((name, ctypes.c_void_p) for name in ("k", "v", "ring")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row", "value_head", "value_row")),
        *((name, ctypes.c_void_p) for name in ("index", "count")),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "dim", "slots")),
        *((name, ctypes.c_int) for name in ("window", "size", "choice", "angles")),
        *((name, ctypes.c_int) for name in ("rows", "key_bytes", "value_bytes")),
        *((name, ctypes.c_int) for name in ("widths", "made", "activation")),
        *((name, ctypes.c_float) for name in ("scale", "cap", "residual")),
    ]


class _Angles(ctypes.Structure):
    """`Angles` of layers.cpp."""

    _fields_ = [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("pairs", ctypes.c_long)]


_OWN = "normed", "qkv", "q", "attended", "made", "mixed", "part"
_BUFFERS = *_OWN, "scratch", "lse", "parts", "logits"


class _Step(ctypes.Structure):
    """`Step` of layers.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "angles")),
        ("head", Held),
        *((name, ctypes.c_void_p) for name in ("head_norm", "x", "out", "found")),
        *((name, ctypes.c_void_p) for name in (*_BUFFERS, "scores", "position")),
        *((name, ctypes.c_long) for name in ("n", "tail")),
        *((name, ctypes.c_int) for name in ("budget", "room", "kind", "hidden", "split")),
        *((name, ctypes.c_int) for name in ("threads",)),
        ("eps", ctypes.c_float),
        ("wide", ctypes.c_int),
        ("offset", ctypes.c_float),
    ]


BINDING = Binding(
    "a chain of layers", omnikv_sizeof_chained_layer=_Layer, omnikv_sizeof_chained_step=_Step
)


class Reading(NamedTuple):
    """What attention of one query reads in a layer of one sequence, and leaves.

    index int32 [1, 1, K], counts int32 [1]: what was chosen for it, which it reads with the tail;
    None: it reads everything. kind: "softmax" or "raw" scores of what it reads, by which it chooses
    for others, into index and counts, and which it leaves in scores float32 [1, T]; "": it chooses
    nothing.
    """

    # hides tuple.index
    index: torch.Tensor | None = None  # type: ignore[assignment]
    counts: torch.Tensor | None = None
    kind: str = ""
    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class ChainedLayer:
    """A layer as a Chain takes it.

    qkv makes [(heads + 2 kv_heads) * dim], gate_up [2 * inner]. k, v [kv_heads, T, dim or bytes of
    a packed row], of the model's dtype or packed, last dim contiguous; ring [slots, heads, dim]
    contiguous. window: tokens that it sees, of k and v [kv_heads, 2 * size, ..], a ring of `size`
    rows held twice; 0: all. angles: the number of its rope among those of a step.

    o_norm, down_norm [hidden]: of what a half adds to x, or None; residual: what that is multiplied
    by. activation: between gate and up and down, one of ACTIVATIONS without bounds of its own.
    widths: q_norm and k_norm are of all heads at once.
    """

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    ring: torch.Tensor
    heads: int
    reading: Reading
    scale: float
    softmax: Softmax
    window: int = 0
    size: int = 0
    angles: int = 0
    o_norm: torch.Tensor | None = None
    down_norm: torch.Tensor | None = None
    activation: str = "silu"
    residual: float = 1.0
    widths: bool = False

    @property
    def norms(self) -> tuple[torch.Tensor | None, ...]:
        """Its norms, as `Layer` of layers.cpp has them."""
        return tuple(getattr(self, f"{name}_norm") for name in _NORMS)

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.o.inputs // self.heads

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Its four matrices."""
        return self.qkv, self.o, self.gate_up, self.down


def chains(
    k: torch.Tensor, v: torch.Tensor, softmax: Softmax, dtype: torch.dtype, dim: int
) -> bool:
    """Whether a layer of rows k, v [kv_heads, T, ..], for heads of `dim` elements of a dtype, can
    be part of a Chain.
    """
    known = softmax.sinks is None and stores(k.dtype, dtype, dim)
    return known and attends(k, v, dim) and topk.BINDING.usable() and BINDING.usable()


class Now(NamedTuple):
    """What a step tells the layers of a chain.

    n: tokens, the new one too; tail: where their tail begins; budget: tokens to choose; position
    int64 [1, 1]; angles: (cos, sin) float32 [1, 1, pairs] of each rope.
    """

    n: int
    tail: int
    budget: int
    position: torch.Tensor
    angles: Sequence[tuple[torch.Tensor, torch.Tensor]]


class Chain:
    """Layers of one sequence that follow each other. It keeps weights and what is chosen alive, and
    of the sequence's rows the addresses only: who has it makes another where they move.

    dtype: of x, weights and rows; offset: of norms, as kernels/layer/native_step.py takes it. head:
    what makes logits behind the last layer, and its norm, or None. most: tokens that it may have.
    scratch: its `part` and `logits` are used where they have room for so many.
    """

    def __init__(
        self,
        layers: Sequence[ChainedLayer],
        dtype: torch.dtype,
        eps: float,
        offset: float | None,
        head: tuple[Matrix, torch.Tensor] | None,
        most: int,
        scratch: Scratch,
    ) -> None:
        self.dtype, self.most, self.hidden = dtype, most, layers[0].down.outputs
        self._kept: list[object] = []
        self._few = 0  # floats of scratch that products with few bits take
        self._layers = (_Layer * len(layers))(*map(self._told, layers))
        self._count = len(layers)
        self._ropes = max(layer.angles for layer in layers) + 1
        self._angles = (_Angles * self._ropes)()
        choosing = [layer for layer in layers if layer.reading.kind]
        index, _, _, scores = choosing[0].reading if choosing else Reading()
        ending, self._vocab = Held(), 0
        if head is not None:
            ending, self._vocab = self._held(head[0], torch.float32), head[0].outputs
        buffers = self._buffers(layers)
        buffers.append(_room(scratch.part, max(map(_part_floats(most), layers))))
        buffers.append(_room(scratch.logits, max((x.heads for x in choosing), default=0) * most))
        self._kept += [*buffers, scores, head]
        self._step = _Step(
            ctypes.addressof(self._layers), ctypes.addressof(self._angles),
            ending, _pointer(None if head is None else head[1]),
            **dict(zip(_BUFFERS, map(_pointer, buffers), strict=True)), scores=_pointer(scores),
            room=0 if index is None else index.shape[-1],
            kind=FLOATS[dtype], hidden=self.hidden, split=SPLIT,
            eps=eps, wide=offset is not None, offset=offset or 0.0,
        )  # fmt: skip
        self._behind = torch.empty(1, 1, self.hidden, dtype=dtype)

    def _buffers(self, layers: Sequence[ChainedLayer]) -> list[torch.Tensor]:
        """What a layer writes and the next one writes over."""
        width = max(layer.o.inputs for layer in layers)
        made = max(layer.gate_up.outputs for layer in layers)
        mixed = max(layer.down.inputs for layer in layers)
        room = [self.hidden, max(layer.qkv.outputs for layer in layers), width, width, made, mixed]
        room.append(self.hidden)
        buffers = [torch.empty(count, dtype=self.dtype) for count in room]
        lse = torch.empty(max(layer.heads for layer in layers))
        return [*buffers, torch.empty(self._few), lse]

    def _told(self, layer: ChainedLayer) -> _Layer:
        """A layer as layers.cpp is told of it."""
        size, (index, counts, kind, _) = layer.k.element_size(), layer.reading
        packed = layer.k.dtype in PACKED
        widths = [rows.shape[2] if packed else 0 for rows in (layer.k, layer.v)]
        norms, activation = layer.norms, ACTIVATIONS.index(layer.activation)
        matrices = [self._held(matrix, self.dtype) for matrix in layer.matrices]
        self._kept += [*norms, index, counts]
        return _Layer(
            *matrices, *map(_pointer, norms), *map(_pointer, (layer.k, layer.v, layer.ring)),
            *(step * size for rows in (layer.k, layer.v) for step in rows.stride()[:2]),
            _pointer(index), _pointer(counts),
            layer.heads, len(layer.k), layer.dim, len(layer.ring),
            layer.window, layer.size, CHOICES[kind], layer.angles, ROWS[layer.k.dtype], *widths,
            layer.widths and layer.q_norm is not None, layer.gate_up.outputs, activation,
            layer.scale, layer.softmax.cap, layer.residual,
        )  # fmt: skip

    def _held(self, matrix: Matrix, out_dtype: torch.dtype) -> Held:
        """A matrix as layers.cpp takes it; counts the scratch that it needs."""
        told, floats = held(matrix, self.dtype, out_dtype, self._kept)
        self._few = max(self._few, floats)
        return told

    def __call__(self, x: torch.Tensor, first: int, stop: int, now: Now) -> torch.Tensor:
        """Run the layers first .. stop - 1, numbers in this chain, of x [1, 1, hidden], contiguous:
        x behind them, new; where that is the last one and there is a head, logits float32 [1, 1,
        vocab]. Mutates the sequence's rows, ring and choices. Raises ValueError for a dtype that
        this build lacks or more tokens than `most`, MemoryError where a kernel finds no room.
        """
        n, tail, budget, position, angles = now
        if n > self.most or x.dtype != self.dtype or x.numel() != self.hidden:
            raise ValueError(f"found {n} tokens and x {x.shape}, expected up to {self.most}")
        if stop == self._count and self._vocab:
            out, found = self._behind, torch.empty(1, 1, self._vocab)
        else:
            out, found = torch.empty_like(x), None
        for known, (cos, sin) in zip(self._angles, angles, strict=True):
            known.cos, known.sin, known.pairs = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        step = self._step
        step.x, step.out, step.found = x.data_ptr(), out.data_ptr(), _pointer(found)
        step.position, step.n, step.tail, step.budget = position.data_ptr(), n, tail, budget
        step.threads = torch.get_num_threads()
        check(loaded().omnikv_layers(ctypes.byref(step), first, stop), f"layers of {self.dtype}")
        return out if found is None else found


def _part_floats(rows: int) -> Callable[[ChainedLayer], int]:
    """Counts the floats of `parts` of a layer that reads so many rows."""

    def count(layer: ChainedLayer) -> int:
        kv_heads = len(layer.k)
        return part_floats(kv_heads, layer.heads // kv_heads, layer.dim, rows)

    return count


def _room(held: torch.Tensor, needed: int) -> torch.Tensor:
    """`held`, where it has so many elements, or a new one."""
    return held if held.numel() >= needed else torch.empty(needed)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def by_calls(
    layers: Sequence[ChainedLayer],
    x: torch.Tensor,
    now: Now,
    eps: float,
    offset: float | None = None,
) -> torch.Tensor:
    """What a Chain of these layers computes of x [1, 1, hidden], a call of Python each. eps and
    offset: of norms. Returns x [1, 1, hidden] behind them. Mutates what a Chain mutates.
    """
    lengths, tail, budget = (torch.tensor([m], dtype=torch.int32) for m in now[:3])
    for layer in layers:
        index, counts, kind, scores = layer.reading
        k, v, norms = layer.k[None], layer.v[None], None
        qkv = multiply(layer.qkv, x, layer.input_norm, eps, offset).view(1, 1, -1, layer.dim)
        if layer.q_norm is not None and layer.widths:
            _norm_widths(layer, qkv, eps, offset)
        elif layer.q_norm is not None:
            norms = layer.q_norm, layer.k_norm
        twice = (0, layer.size) if layer.window else None
        ring, angles = layer.ring[None], now.angles[layer.angles]
        q = rotate_store(qkv, *angles, k, v, ring, now.position, twice, norms, eps, offset)
        if kind and index is not None and counts is not None and scores is not None:
            found = decode_dense(q, k, v, lengths, layer.scale, scores, kind, softmax=layer.softmax)
            select_topk(scores, torch.zeros_like(tail), tail, budget, index[:, 0], counts)
        elif index is not None and counts is not None:
            given = index, counts, tail, lengths, layer.scale
            found = decode_sparse(q, k, v, *given, softmax=layer.softmax)
        elif layer.window:
            seen = min(now.n, layer.window)
            first = tail.new_full((1,), (now.n - seen) % layer.size)
            none = torch.zeros_like(first)
            given = none.view(1, 1, 1), none, first, first + seen, layer.scale
            found = decode_sparse(q, k, v, *given, softmax=layer.softmax)
        else:
            found = decode_dense(q, k, v, lengths, layer.scale, softmax=layer.softmax)
        x = _added(layer, layer.o, found.flatten(2), layer.o_norm, x, eps, offset)
        gated = layer.activation == "silu"
        mixed = multiply(layer.gate_up, x, layer.post_norm, eps, offset, gated=gated)
        mixed = mixed if gated else act_rows(mixed, layer.activation)
        x = _added(layer, layer.down, mixed, layer.down_norm, x, eps, offset)
    return x


def _norm_widths(layer: ChainedLayer, qkv: torch.Tensor, eps: float, offset: float | None) -> None:
    """Norm all heads of q at once, and those of k: qkv [1, 1, H + 2 Hkv, D], in place."""
    both = qkv[:, :, : layer.heads], qkv[:, :, layer.heads : layer.heads + len(layer.k)]
    for part, norm in zip(both, (layer.q_norm, layer.k_norm)):
        assert norm is not None
        part.copy_(normalize_rows(part.flatten(2), norm, eps, offset).view_as(part))


def _added(
    layer: ChainedLayer,
    last: Matrix,
    y: torch.Tensor,
    norm: torch.Tensor | None,
    x: torch.Tensor,
    eps: float,
    offset: float | None,
) -> torch.Tensor:
    """x and what the last matrix of a half makes of y, normed and scaled."""
    if norm is None and layer.residual == 1.0:
        return multiply(last, y, residual=x)
    part = multiply(last, y)
    part = part if norm is None else normalize_rows(part, norm, eps, offset)
    return x + part if layer.residual == 1.0 else x + part * layer.residual


def some_layers(
    dtype: torch.dtype,
    rows: int,
    generator: torch.Generator,
    readings: Sequence[Reading],
    kind: str = "",
    bank: str = "",
) -> list[ChainedLayer]:
    """Small layers for tests, one for each reading: random weights of 48 columns, 4 query heads
    over 2 K/V heads of 32, and `rows` random rows k, v [2, rows, 32]. kind: "int8" or "int4", of
    weights in groups of 16, with biases; bank: a name of packed rows; "": both are of the dtype.
    """
    heads, kv_heads, dim, hidden, inner = 4, 2, 32, 48, 80

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    def matrix(outputs: int, inputs: int) -> Matrix:
        weight = draw(outputs, inputs) * inputs**-0.5
        if not kind:
            return Product(weight)
        few = to_int8(weight, 16) if kind == "int8" else to_int4(weight, 16)
        return FewBits(Panels.of(few), draw(outputs))

    def rows_of(side: str) -> torch.Tensor:
        drawn = draw(kv_heads, rows, dim)
        return getattr(FORMS[DTYPES[bank]], side).pack(drawn) if bank else drawn

    return [
        ChainedLayer(
            matrix((heads + 2 * kv_heads) * dim, hidden), matrix(hidden, heads * dim),
            matrix(2 * inner, hidden), matrix(hidden, inner),
            draw(hidden), draw(hidden), draw(dim), draw(dim),
            rows_of("keys"), rows_of("values"), draw(8, heads, dim),
            heads, reading, dim**-0.5, PLAIN,
        )
        for reading in readings
    ]  # fmt: skip


@BINDING.self_test
def _cases() -> Iterator[Case]:
    some = [(dtype, "", "") for dtype in FLOATS]
    some += [(torch.bfloat16, "int8", "")] if quant.usable() else []
    some += [(torch.bfloat16, "", "int8")] if packs(torch.int8, 32) else []
    for dtype, kind, bank in some:
        found = []
        for chained in (True, False):
            generator, n = torch.Generator().manual_seed(1), 300
            index, counts = torch.full((1, 1, 24), -1, dtype=torch.int32), torch.zeros(1).int()
            scores = torch.zeros(1, n)
            chosen = Reading(index, counts)
            readings = Reading(), Reading(index, counts, "softmax", scores), chosen
            layers = some_layers(dtype, n, generator, readings, kind, bank)
            angles = [(torch.rand(1, 1, 16, generator=generator),) * 2]
            now = Now(n, 128, 24, torch.tensor([[n - 1]]), angles)
            x = torch.randn(1, 1, 48, generator=generator).to(dtype)
            if chained:
                shape = ScratchShape(1, 1, 4, 2, 32, n, scored=True, dtype=dtype)
                scratch = make_scratch(shape, torch.device("cpu"))
                x = Chain(layers, dtype, 1e-5, None, None, n, scratch)(x, 0, 3, now)
            else:
                x = by_calls(layers, x, now, 1e-5)
            found.append((x, index, layers[2].k, layers[2].ring))
        for name, one, other in zip(("x", "choice", "K", "queries"), *found):
            yield f"{name} behind layers in {dtype} {kind} {bank}", one, other, one.dtype
