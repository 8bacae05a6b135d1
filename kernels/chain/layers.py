"""Layers of a decode step of one token in one call (layers.cpp). They call the kernels that Python
would call one by one, told the same, so that bits are the same.

Python between the calls of a layer takes 120 us at 2,048 tokens and up to 400 behind layers that
read more rows than the caches hold, and no second thread shares it (docs/LOG.md, 2026-11-28).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch

from kernels.attention.native import SPLIT, attends, part_floats
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.chain.calls import by_calls
from kernels.chain.layer import NORMS, ChainedLayer, Now, Reading
from kernels.chain.matrix import Held, Matrix, held
from kernels.launch.softmax import PLAIN, Softmax
from kernels.layer.native_product import Product
from kernels.layer.native_step import ACTIVATIONS, stores
from kernels.native.kinds import FLOATS, PACKED, ROWS
from kernels.native.library import Binding, Case, check, loaded
from kernels.quant import native as quant
from kernels.quant.native import FewBits, Panels
from kernels.quant.rounding import to_int4, to_int8
from kernels.rows.forms import DTYPES, FORMS
from kernels.rows.native import packs
from kernels.select import native as topk

CHOICES = {"": 0, "softmax": 1, "raw": 2}  # `Choice` of layers.cpp


class _Layer(ctypes.Structure):
    """`Layer` of layers.cpp."""

    _fields_ = [
        *((name, Held) for name in ("qkv", "o", "gate_up", "down")),
        ("mixture", ctypes.c_void_p),
        *((f"{name}_norm", ctypes.c_void_p) for name in NORMS),
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


def chains(
    k: torch.Tensor, v: torch.Tensor, softmax: Softmax, dtype: torch.dtype, dim: int
) -> bool:
    """Whether a layer of rows k, v [kv_heads, T, ..], for heads of `dim` elements of a dtype, can
    be part of a Chain.
    """
    known = softmax.sinks is None and stores(k.dtype, dtype, dim)
    return known and attends(k, v, dim) and topk.BINDING.usable() and BINDING.usable()


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
        self.dtype, self.most, self.hidden = dtype, most, layers[0].o.outputs
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
        made, mixed = (max(sizes) for sizes in zip(*(layer.inner for layer in layers)))
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
        mixture = None if layer.mixture is None else layer.mixture.address
        self._kept += [*norms, index, counts, layer.mixture]
        return _Layer(
            *matrices, mixture,
            *map(_pointer, norms), *map(_pointer, (layer.k, layer.v, layer.ring)),
            *(step * size for rows in (layer.k, layer.v) for step in rows.stride()[:2]),
            _pointer(index), _pointer(counts),
            layer.heads, len(layer.k), layer.dim, len(layer.ring),
            layer.window, layer.size, CHOICES[kind], layer.angles, ROWS[layer.k.dtype], *widths,
            layer.widths and layer.q_norm is not None, layer.inner[0], activation,
            layer.scale, layer.softmax.cap, layer.residual,
        )  # fmt: skip

    def _held(self, matrix: Matrix | None, out_dtype: torch.dtype) -> Held:
        """A matrix as layers.cpp takes it; counts the scratch that it needs."""
        if matrix is None:
            return Held()
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
