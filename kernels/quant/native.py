"""Products with weights of few bits by the C++ kernels: a few rows of floats meet weights that are
widened in registers, many rows meet pieces of the weight that are widened in a core's cache.

Activations are never rounded, but where many rows of 16-bit floats multiply as whole numbers of 16
bits (integers.cpp): 256 columns of a row under one scale. 8 bits cost 3.6 times the weights' own
divergence (docs/QUANTISATION.md), so only who asks for them gets them (`Panels.rounds`,
rounded.cpp). Sums of folds are whole there, all others float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.native.amx import TileBinding
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.native.pages import zeros
from kernels.quant.matrix import Quantised, blocks
from kernels.quant.torch_forms.rounded_rows import GROUP, ROWS, rounded_rows

LANES = 16  # outputs of a panel
PARTS = {"int8": 4, "int4": 8}  # columns of a 32-bit word
ZERO = {"int8": 0, "int4": 8}  # what is taken from a value, so that a part has a sign
MOST_ROWS = 8  # rows that are multiplied in registers
FOLD = 64  # columns that are summed before their scale, at most
TILE = 6  # rows of a tile, where there are many
INTEGER_ROWS = 32  # from which rows of 16 bits multiply as whole numbers
INTEGER_FOLDS = range(32, 129, 16)  # columns of a fold there: few cost much, many leave 32 bits


class _Product(ctypes.Structure):
    """`Product` of panels.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x", "values", "scales", "offsets", "bias", "residual", "out", "scratch"
            )  # fmt: skip
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "rows", "outputs", "inputs", "words", "group", "fold", "bits", "zero",
                "kind", "scale_kind", "bias_kind", "out_kind", "gated", "threads",
            )  # fmt: skip
        ),
    ]  # fmt: skip


_BINDING = Binding("products with weights of few bits", omnikv_sizeof_few_bits=_Product)
_TILED = TileBinding("products with few bits in tiles", omnikv_sizeof_few_bits=_Product)
_ROUNDED = Binding("products of rows in 8 bits", omnikv_sizeof_few_bits=_Product)
KNOWN = 3  # numbers that a row has for each fold there


def usable() -> bool:
    """Whether the C++ products with weights of few bits run on this machine."""
    return _BINDING.usable()


def held_as_panels(kind: str, group: int, columns: int, plain: bool = True) -> bool:
    """Whether panels can hold a matrix of `columns` inputs: kind "int8" or "int4" whose groups are
    whole words of 32 bits, or whole rows.

    group: columns under one scale; plain: without a table and outliers.
    """
    return plain and kind in PARTS and (group >= columns or group % PARTS[kind] == 0)


def panel_bytes(kind: str, shape: tuple[int, int], group: int, offsets: bool) -> int:
    """Count the bytes of a matrix, shape (O, I), in panels. group: columns under one scale;
    offsets: whether groups have one.
    """
    rows, columns = shape
    groups = -(-columns // group)
    scales = (4 if kind == "int8" and groups == 1 else 2) * groups * (2 if offsets else 1)
    return -(-rows // LANES) * LANES * (4 * -(-columns // PARTS[kind]) + scales)


@dataclass(frozen=True)
class Panels:
    """A matrix [O, I] of int8 or int4 as few_bits.cpp reads it.

    values: int32 [panels, words, LANES], a word of PARTS columns, the first in its lowest bits,
    int4 less 8. scales, offsets: [panels, groups, LANES] of one dtype, float32 for int8 rows and 16
    bits else, or no offsets. Rows are filled up to whole panels. group: columns under one scale.
    rounds: ROWS rows and more that it multiplies are rounded to 8 bits first.
    """

    kind: str
    shape: tuple[int, int]
    group: int
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    rounds: bool = False

    @classmethod
    def of(cls, weight: Quantised, rounds: bool = False) -> Panels:
        """Lay a matrix [O, I] out, its permutation aside. Scales of int8 rows are float32, all
        others 16 bits: where they are not, float16 if that can, else bfloat16. Raises ValueError
        unless `held_as_panels`.
        """
        plain = weight.table is None and weight.outliers is None
        if not held_as_panels(weight.kind, weight.group, weight.shape[1], plain):
            raise ValueError(f"{weight.kind} in groups of {weight.group}: no panels hold that")
        rows, columns = weight.shape
        panels, words = -(-rows // LANES), -(-columns // PARTS[weight.kind])
        values = zeros(panels, words, LANES, dtype=torch.int32)
        step = max(1, (1 << 20) // columns // LANES)  # panels at a time
        for start in range(0, panels, step):
            part = weight.values[start * LANES : (start + step) * LANES].view(torch.uint8)
            whole = part ^ 0x88 if weight.kind == "int4" else part
            count = -(-len(whole) // LANES)
            short = 0, 4 * words - whole.shape[1], 0, count * LANES - len(whole)
            whole = F.pad(whole, short).contiguous().view(torch.int32).view(count, LANES, words)
            values[start : start + count] = whole.transpose(1, 2)
        kept = _scale_dtype(weight)
        scales = _paneled((_spoken(weight) if weight.kind == "int4" else weight.scales).to(kept))
        offsets = None if weight.offsets is None else _paneled(weight.offsets.to(kept))
        group = min(weight.group, columns)
        return cls(weight.kind, weight.shape, group, values, scales, offsets, rounds)

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and offsets."""
        held = (self.values, self.scales, self.offsets)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def quantised(self, rows: slice | torch.Tensor) -> Quantised:
        """Some rows, a slice or int64 indices, as they came: values [rows, I] in few bits."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.shape[0]))
        panel, lane = rows // LANES, rows % LANES
        bytes_ = self.values[panel, :, lane].view(torch.uint8)  # [rows, 4 * words]
        if self.kind == "int8":
            values = bytes_[:, : self.shape[1]].view(torch.int8)
        else:
            values = bytes_[:, : self.shape[1] // 2] ^ 0x88
        offsets = None if self.offsets is None else self.offsets[panel, :, lane]
        return Quantised(self.kind, values, self.scales[panel, :, lane], self.group, offsets)

    def rows(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise some rows, a slice or int64 indices: [rows, I] of `dtype`."""
        return self.quantised(rows).rows(slice(None), dtype)


def product(
    x: torch.Tensor,
    weight: Panels,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    tiled: bool | None = None,
) -> torch.Tensor:
    """Multiply the rows of x [..., I] by a weight [O, I]; any number of rows, on a CPU.

    x in float32, bfloat16 or float16, contiguous; another dtype is a KeyError. bias [O] of such a
    dtype is added, then residual [..., O or O / 2] of x's dtype, contiguous. gated: the first half
    of the outputs goes through SiLU and scales the second (SwiGLU, arXiv 2002.05202), so there are
    O / 2. Sums are float32 and rounded to the dtype of x after the product, after SiLU and at the
    end, where torch's operators round. out_dtype: of the result, x's by default. tiled: many rows
    of 16 bits in tiles of AMX; None: where they run. Returns [..., O or O / 2], new. Results do not
    depend on the number of threads. Raises MemoryError where tiles of x find no room.
    """
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    if gated and rows > MOST_ROWS:
        gate, up = product(x, weight, bias, tiled=tiled).chunk(2, -1)
        y = F.silu(gate).mul_(up)
        y = y if residual is None else y.add_(residual)
        return y.to(out_dtype or x.dtype)
    how = _how(x.dtype, weight, rows, tiled)
    if how == "torch":
        return _rounded(x, weight, bias, residual, out_dtype)
    return _run(how, x, weight, bias, residual, gated, out_dtype)


class FewBits(NamedTuple):
    """A weight [O, I] in panels with its bias [O] or None, for kernels that multiply one row by it
    themselves.
    """

    weight: Panels
    bias: torch.Tensor | None

    @property
    def outputs(self) -> int:
        """O."""
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        """I."""
        return self.weight.shape[1]

    @property
    def form(self) -> tuple[object, ...]:
        """What all of several have in common that multiply together."""
        weight = self.weight
        offsets = weight.offsets is None or weight.offsets.dtype
        return weight.kind, weight.shape, weight.group, weight.scales.dtype, offsets

    def told(self, dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[ctypes.Structure, int]:
        """`Product` of panels.h for a row of a dtype, which has addresses of weight and bias only
        and lacks x, residual, out, scratch, gated and threads; and the floats of scratch that it
        takes.
        """
        weight = self.weight
        fold = _fold(weight.group, weight.shape[1], PARTS[weight.kind])
        call = _told(weight, self.bias, 1, dtype, out_dtype, False, fold)
        return call, _room("few", weight, 1, fold)


def _how(dtype: torch.dtype, weight: Panels, rows: int, tiled: bool | None) -> str:
    """What multiplies `rows` rows of a dtype: "few" or "many" by floats, "integers" or "tiles" in
    16 bits, "rounded" in 8, or "torch" where that is not right here.
    """
    if weight.rounds and rows >= ROWS:
        return "rounded" if _ROUNDED.usable() else "torch"
    fold = _fold(weight.group, weight.shape[1], PARTS[weight.kind])
    if rows < INTEGER_ROWS or dtype == torch.float32 or fold not in INTEGER_FOLDS:
        return "many" if rows > MOST_ROWS else "few"
    if _TILED.usable() if tiled is None else tiled:
        return "tiles"
    return "integers" if prefers_integers(loaded()) else "many"


def _run(
    how: str,
    x: torch.Tensor,
    weight: Panels,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    common: bool = False,
) -> torch.Tensor:
    """`product` by one of the words of `_how`. common: of rows in 8 bits, without instructions that
    only some CPUs of an instruction set have.
    """
    library, (outputs, inputs) = loaded(), weight.shape
    rows, rounds = x.numel() // inputs, how == "rounded"
    fold = _rounded_fold(weight) if rounds else _fold(weight.group, inputs, PARTS[weight.kind])
    out = torch.empty(*x.shape[:-1], outputs // 2 if gated else outputs, dtype=out_dtype or x.dtype)
    scratch = torch.empty(_room(how, weight, rows, fold))
    call = _told(weight, bias, rows, x.dtype, out.dtype, gated, fold)
    call.x, call.residual, call.out = x.data_ptr(), _at(residual), out.data_ptr()
    call.scratch = scratch.data_ptr()
    if how == "tiles":
        check(library.omnikv_tiled_integers(ctypes.byref(call)), "a product in tiles")
    elif rounds:
        library.omnikv_rounded(ctypes.byref(call), common)
    elif how == "integers":
        library.omnikv_integers(ctypes.byref(call))
    else:
        library.omnikv_few_bits(ctypes.byref(call), how == "many")
    return out


def _told(
    weight: Panels,
    bias: torch.Tensor | None,
    rows: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    gated: bool,
    fold: int,
) -> _Product:
    """A product of `rows` rows of a dtype, but for where x, residual, out and scratch lie."""
    (outputs, inputs), bits = weight.shape, 32 // PARTS[weight.kind]
    return _Product(
        None, weight.values.data_ptr(), weight.scales.data_ptr(), _at(weight.offsets),
        _at(bias), None, None, None,
        rows, outputs, inputs, weight.values.shape[1], weight.group, fold, bits, ZERO[weight.kind],
        FLOATS[dtype], FLOATS[weight.scales.dtype], 0 if bias is None else FLOATS[bias.dtype],
        FLOATS[out_dtype], gated, torch.get_num_threads(),
    )  # fmt: skip


def _room(how: str, weight: Panels, rows: int, fold: int) -> int:
    """Count the 32-bit numbers that a product of `rows` rows keeps of them."""
    columns, tiles = weight.values.shape[1] * PARTS[weight.kind], -(-rows // TILE)
    if how == "tiles":
        return 0
    if how == "rounded":
        return tiles * TILE * -(-columns // fold) * (fold // 4 + KNOWN)
    if how == "few":
        padded = -(-columns // LANES) * LANES
        return rows * (padded + -(-padded // fold) + len(weight.values) * LANES)
    return tiles * TILE * columns


def _rounded_fold(weight: Panels) -> int:
    """Columns that have one step of rows in 8 bits and one scale of the weight."""
    return GROUP if weight.group >= weight.shape[1] else math.gcd(GROUP, weight.group)


def _rounded(
    x: torch.Tensor,
    weight: Panels,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """`product` of rows in 8 bits by torch's operators, where the C++ kernel is not right here."""
    flat = rounded_rows(x.reshape(-1, weight.shape[1]))
    y = flat.new_empty(len(flat), weight.shape[0])
    for part in blocks(weight.shape):
        y[:, part] = flat @ weight.rows(part, torch.float32).t()
    y = (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], weight.shape[0])
    y = y if residual is None else y + residual
    return y.to(out_dtype or x.dtype)


def prefers_integers(library: ctypes.CDLL) -> bool:
    """Whether many rows of 16 bits multiply as whole numbers: where pairs of bfloat16 do not."""
    return bool(library.omnikv_has_integers())


def multiply_panels(
    x: torch.Tensor, weight: Panels, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of x [R, I], contiguous, by a weight [O, I] and add bias [O] or None:
    `product`, as one operator where torch.compile looks. Returns [R, O] in x.dtype, new.
    """
    if not torch.compiler.is_compiling():
        return product(x, weight, bias)
    held = weight.values, weight.scales, weight.offsets
    own = weight.kind, weight.group, *weight.shape, weight.rounds
    return multiply_panels_op(x, *held, bias, *own)


@torch.library.custom_op("omnikv::multiply_panels", mutates_args=())
def multiply_panels_op(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    outputs: int,
    inputs: int,
    rounds: bool,
) -> torch.Tensor:
    """`multiply_panels` of x [R, I] in plain tensors: [R, O]. outputs, inputs: O, I."""
    held = values, scales, offsets
    return product(x, Panels(kind, (outputs, inputs), group, *held, rounds), bias)


@multiply_panels_op.register_fake
def _(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    group: int,
    outputs: int,
    inputs: int,
    rounds: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], outputs)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fold(group: int, inputs: int, parts: int) -> int:
    """Columns that are summed before their scale: all of a short group, else whole words of it."""
    if group <= 2 * FOLD and group % parts == 0:
        return group
    if group >= inputs:
        return FOLD
    return next(size for size in (64, 32, 16, 8, 4) if group % size == 0)


def _spoken(weight: Quantised) -> torch.Tensor:
    """The scales of an int4 matrix, 0 where a group's values are all 0: it says nothing there, and
    8 of it less 8 of it would leave rounding errors of any size.
    """
    rows, columns = weight.shape
    group = min(weight.group, columns)
    whole = F.pad(weight.values, (0, -columns % group // 2))
    some = whole.reshape(rows, -1, group // 2).amax(2) != 0
    return torch.where(some, weight.scales, torch.zeros_like(weight.scales))


def _scale_dtype(weight: Quantised) -> torch.dtype:
    """The dtype in which panels keep scales and offsets."""
    if weight.kind == "int8" and weight.scales.shape[1] == 1:
        return torch.float32
    if weight.scales.dtype != torch.float32:
        return weight.scales.dtype
    held = weight.scales.abs()
    least, most = held.masked_fill(held == 0, 1.0).min(), held.max()
    if weight.offsets is not None:
        most = torch.maximum(most, weight.offsets.abs().max())
    limits = torch.finfo(torch.float16)
    # below its normal numbers float16 loses bits, where bfloat16 does not
    fits = bool(least >= limits.smallest_normal and most <= limits.max)
    return torch.float16 if fits else torch.bfloat16


def _paneled(scales: torch.Tensor) -> torch.Tensor:
    """[O, groups] as [panels, groups, LANES], 0 beyond the last row."""
    short = -len(scales) % LANES
    whole = F.pad(scales, (0, 0, 0, short)).view(-1, LANES, scales.shape[1])
    return whole.transpose(1, 2).contiguous()


@_BINDING.self_test
def _vectors() -> Iterator[Case]:
    # in registers, in tiles of registers, and as whole numbers
    some = (torch.float32, 3), (torch.float32, 20), (torch.bfloat16, 20), (torch.bfloat16, 40)
    return _products(some, False)


@_TILED.self_test
def _tiles() -> Iterator[Case]:
    return _products(((torch.bfloat16, 40), (torch.float16, 33)), True)


@_ROUNDED.self_test
def _rows_in_bytes() -> Iterator[Case]:
    """Rows and columns that no tile divides, where bytes reach their ends; groups, and none."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(37, 72, generator=generator)
    x[::2, ::5] = 3.0
    x[5], x[6] = 0, 1e-34
    for kind, group, offset in (("int8", 72, 0), ("int8", 8, 1), ("int4", 24, 1), ("int4", 72, 0)):
        values = torch.randint(-128, 128, (21, 72), generator=generator).to(torch.int8)
        values[:3, ::2] = -128
        values = values if kind == "int8" else values[:, :36].contiguous().view(torch.uint8)
        scales, offsets = (
            torch.rand(21, 72 // group, generator=generator).half().float() + 0.5 for _ in "so"
        )
        held = scales, group, offsets if offset else None
        panels = Panels.of(Quantised(kind, values, *held), rounds=True)
        whole = panels.rows(slice(None), torch.float32).double()
        found = _run("rounded", x, panels)
        expected = rounded_rows(x).double() @ whole.t()
        name = f"a product of rows in 8 bits with {kind} in groups of {group}"
        yield name, found, expected, x.dtype


def _products(some: Sequence[tuple[torch.dtype, int]], tiled: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for kind, columns in (("int8", 64), ("int4", 32)):
        values = torch.randint(-127, 128, (40, columns), generator=generator).to(torch.int8)
        values = values if kind == "int8" else values.view(torch.uint8)
        # as panels hold them
        scales = torch.rand(40, 2, generator=generator).half().float() + 0.5
        weight = Quantised(kind, values, scales.half().float(), 32)
        whole = weight.dense(torch.float32).double()
        for dtype, rows in some:
            x = torch.randn(rows, 64, generator=generator).to(dtype)
            name = f"a product of {rows} rows with {kind} in {dtype}"
            found = product(x, Panels.of(weight), tiled=tiled)
            yield name, found, x.double() @ whole.t(), dtype
