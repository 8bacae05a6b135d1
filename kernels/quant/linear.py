"""Products with weights of few bits: on a CPU, on a GPU, and on any device by dequantising in
blocks.

A decode step waits for the weights, so a form is judged by one row, and by the rows of a prompt
that come with it. Forms:

"native": int8 or int4 in whole rows or groups of whole words, by the C++ kernels, where this
    machine has a compiler: widened in registers, for many rows in pieces
    (kernels/quant/native.py).
"digits", "vnni": int8 with one scale per row, in the integer products of fbgemm and of oneDNN: a
    row of x goes in as two rows of 7 bits (kernels/quant/torch_forms/int8_digits.py).
"int8pack": the same weights in torch's own product, which reads them as rows of bfloat16.
"int4pack": int4 in groups of 32 to 256, torch's product for bfloat16 rows.
"pair": int8 in such groups, as two 4-bit products of its high and its low four bits.
"words": int8 or int4, in whole rows or groups of whole blocks, in our own kernels for a GPU
    (kernels/quant/gemv.py, kernels/quant/gemm.py).
"blocks": rows of the weight are dequantised some at a time and multiplied.

A row's outliers are a sparse product of their own.

Many rows are bound by arithmetic, so there torch's own products dequantise in blocks. The integer
products stay: fbgemm takes 6 ns a weight to unpack, as long as it multiplies 400 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F

from kernels.launch.isa import multiplies
from kernels.launch.triton import HAVE_TRITON
from kernels.layer.gemv import MOST_ROWS
from kernels.quant.matrix import BLOCK, Quantised, blocks
from kernels.quant.native import (
    FewBits,
    Panels,
    held_as_panels,
    multiply_panels,
    panel_bytes,
    usable,
)
from kernels.quant.product import multiply_words
from kernels.quant.torch_forms.int4_tiles import Tiles, tile_rows, works
from kernels.quant.torch_forms.int8_digits import TwoDigits, digit_bytes, fbgemm_probe, vnni_probe
from kernels.quant.torch_forms.outliers import SparseRows
from kernels.quant.torch_forms.rounded_rows import ROWS, rounded_rows
from kernels.quant.words import Words, held_as_words, row_words

FORMS = ("words", "native", "pair", "digits", "vnni", "int8pack", "int4pack", "blocks")
DIGITS = ("digits", "vnni")
# rows up to which a form's own product beats dequantising, with and without 16-bit products
ALL = 1 << 30
FEW = {
    "digits": (ALL, ALL),
    "vnni": (ALL, ALL),
    "int8pack": (12, 12),
    "int4pack": (12, 24),
    "pair": (12, 24),
    "words": (ALL, ALL),
    "native": (ALL, ALL),
    "blocks": (0, 0),
}
GROUPED = "int8 in groups"  # a kind of its own where rates are concerned
GROUPS = (32, 64, 128, 256)  # what the 4-bit product takes


def held_bytes(
    kind: str,
    shape: tuple[int, int],
    group: int,
    offsets: bool,
    form: str,
    outliers: int = 0,
    scale_bytes: int | None = None,
) -> int:
    """Count the bytes of a weight [O, I] in one of FORMS, without permutation and table.

    offsets: whether groups have one beside their scale; int4pack always stores both. outliers: of
    each row. scale_bytes: of a scale that is stored, None for 4 per row and 2 per group.
    """
    rows, columns = shape
    if outliers:
        sparse = SparseRows.bytes_of(rows, outliers) if form != "blocks" else 8 * rows * outliers
        return sparse + held_bytes(kind, shape, group, offsets, form)
    if form == "native":
        return panel_bytes(kind, shape, group, offsets)
    if form in DIGITS:
        return digit_bytes(shape, form)
    if form == "int8pack":
        return rows * columns + 2 * rows
    groups = -(-columns // group)
    if form == "int4pack":
        return rows * columns // 2 + 4 * rows * groups
    if form == "pair":
        return rows * columns + 8 * rows * groups
    values = rows * columns // 2 if kind == "int4" else rows * columns
    if form == "words":
        values = 4 * rows * row_words(kind, columns)
    scale = scale_bytes or (4 if kind == "int8" and groups == 1 else 2)
    return values + scale * rows * groups * (2 if offsets else 1)


def choose_quantised_form(
    kind: str,
    shape: tuple[int, int],
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    plain: bool = True,
    outliers: bool = False,
) -> str:
    """Choose one of FORMS for weights of a kind, by what this machine has and by shape: forms round
    differently, so the choice never depends on a timing.

    dtype: of the activations. plain: no table. outliers: whether rows have some. "native" where the
    C++ kernels read the weight. Else one of torch's products: for int8 in whole rows "vnni" where
    the CPU has AVX512, else "digits", and "int8pack" where neither operator is right; for groups
    "pair" and "int4pack" where tiles hold them. Else "blocks".
    """
    if device.type == "cuda" and HAVE_TRITON and held_as_words(kind, group, shape[1], plain):
        return "words"
    if device.type != "cpu" or not plain:
        return "blocks"
    grouped = kind == "int8" and group < shape[1]
    able = able_forms(GROUPED if grouped else kind, dtype)
    if "native" in able and not outliers and held_as_panels(kind, group, shape[1]):
        return "native"
    tiled = group in GROUPS and tile_rows() and not (shape[0] % tile_rows() or shape[1] % group)
    if (kind == "int4" or grouped) and not tiled:
        return "blocks"
    return next(form for form in able if form != "native")


def able_forms(kind: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The forms that this machine has for weights of a kind and activations of `dtype`, those that
    are preferred first, "blocks" last. Operators that are missing or wrong here are left out.
    """
    found = []
    if kind in ("int8", "int4", GROUPED) and usable():
        found.append("native")
    if kind == "int8":
        probes = {"vnni": vnni_probe, "digits": fbgemm_probe}
        found += [form for form, probe in probes.items() if works(probe)]
    # with other activations the two are scalar code, 10 to 20 times slower
    if kind == "int8" and dtype == torch.bfloat16 and hasattr(torch, "_weight_int8pack_mm"):
        found.append("int8pack")
    if kind == "int4" and tile_rows():
        found.append("int4pack")
    if kind == GROUPED and tile_rows():
        found.append("pair")
    return (*found, "blocks")


def speed_note(kind: str, form: str) -> str:
    """Say which product runs, and where it saves memory alone."""
    said = f"{form} products"
    return said if form != "blocks" else f"{said}: {kind} saves memory on this CPU, not time"


def pack_quantised(
    weight: Quantised,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    form: str = "auto",
    rounds: bool = False,
) -> QuantisedLinear:
    """Hold a weight of few bits [O, I] and a bias [O] or None as a callable.

    dtype: of activations. form: "auto" for what `choose_quantised_form` says, one of FORMS,
    or "plain", which dequantises in blocks everywhere. A weight that words do not hold is held in
    blocks. rounds: many rows are rounded to 8 bits before it multiplies them, on a CPU.
    """
    if form == "auto":
        plain = weight.table is None
        if weight.kind == "int8" and weight.offsets is not None and weight.scales.shape[1] == 1:
            plain = False
        apart = weight.outliers is not None
        form = choose_quantised_form(
            weight.kind, weight.shape, weight.group, dtype, weight.device, plain, apart
        )
    plain = weight.table is None and weight.outliers is None
    if form == "words" and not held_as_words(weight.kind, weight.group, weight.shape[1], plain):
        form = "blocks"
    return QuantisedLinear(weight, bias, dtype, "blocks" if form == "plain" else form, rounds)


class QuantisedLinear:
    """A weight of few bits as a callable x [..., I] -> [..., O], beside
    kernels.layer.linear.Linear.

    `.form` is one of FORMS, `.shape` is (O, I), `.dtype` that of activations, `.nbytes` counts the
    weight and its bias. `.panels` is what the form "native" holds and `.words` what "words" does,
    else None; words with `.dequantises` and panels without `.native`, the C++ kernels, multiply in
    blocks all the same. rounds: rounded_rows.ROWS rows and more are rounded to 8 bits first, in any
    form but "words". Raises ValueError where the form cannot hold the weight.
    """

    def __init__(
        self,
        weight: Quantised,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        form: str,
        rounds: bool = False,
    ) -> None:
        self.form, self.bias, self.dtype, self.rounds = form, bias, dtype, rounds
        self.kind, self.group = weight.kind, weight.group
        self.shape: tuple[int, ...] = weight.shape
        self.permutation = weight.permutation
        self.few = FEW[form][not multiplies(dtype)]
        self.stored: Quantised | None = weight if form in ("blocks", "int8pack") else None
        if form in (*DIGITS, "int8pack") and not weight.per_row:
            raise ValueError(f"form {form!r}: found groups of {weight.group}, expected whole rows")
        self.tiles: tuple[Tiles, ...] = ()
        self.words: Words | None = None
        self.panels: Panels | None = None
        self.native = form == "native" and usable()
        self.dequantises = False
        self.sparse: SparseRows | None = None
        outliers = 0 if weight.outliers is None else weight.outliers.shape[1]
        self.nbytes = held_bytes(
            weight.kind, weight.shape, weight.group, weight.offsets is not None, form, outliers
        )
        if form == "blocks":
            self.nbytes, self.permutation = weight.nbytes, None  # `rows` puts inputs in order
        elif form == "words":
            self.words = Words.of(weight)
            self.nbytes = self.words.nbytes
        elif form == "native":
            self.panels = Panels.of(weight, rounds)
        elif weight.places is not None and weight.outliers is not None:
            self.sparse = SparseRows(weight.places, weight.outliers, weight.shape[1])
        if form in DIGITS:
            self.digits = TwoDigits(weight, form)
        elif form == "int8pack":
            # the op takes scales of the activations' dtype: keep these only
            scales = weight.scales.to(dtype)
            self.stored = Quantised("int8", weight.values, scales, weight.group)
        elif form == "int4pack":
            self.tiles = (Tiles.of(weight),)
        elif form == "pair":
            self.tiles = Tiles.pair(weight)
        for extra in (bias, self.permutation):
            self.nbytes += 0 if extra is None else extra.numel() * extra.element_size()

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, dequantised anew at each call: [O, I] of `dtype`, inputs in order."""
        read = self._readable()
        whole = torch.cat([read(part, self.dtype) for part in blocks(self.shape)])
        if self.permutation is None:
            return whole
        apart = torch.empty_like(whole)
        apart[:, self.permutation] = whole
        return apart

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Dequantise the rows that int64 indices [...] name: [..., I] of `dtype`. For embeddings,
        in any form but "digits" and "vnni", without a permutation.
        """
        found = self._readable()(rows.flatten(), self.dtype)
        return found.view(*rows.shape, self.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I]: [..., O] of x's dtype, contiguous."""
        flat = self.ordered(x.reshape(-1, self.shape[1]))
        if self.native:
            assert self.panels is not None
            out = multiply_panels(flat.contiguous(), self.panels, self.bias)
            return out.view(*x.shape[:-1], self.shape[0])
        if self.words is not None and not self.dequantises:
            if flat.shape[0] <= MOST_ROWS or flat.dtype != torch.float32:
                out = multiply_words(flat, self.words, self.bias)
                return out.view(*x.shape[:-1], self.shape[0])
        held = self.words is not None or self.panels is not None
        if flat.shape[0] > self.few or held or self._rounds(flat):
            return self._blocks(flat).view(*x.shape[:-1], self.shape[0])
        if self.form in DIGITS:
            wide = flat.float()
            out = self.digits.multiply(wide)
            if self.sparse is not None:
                out += self.sparse.multiply(wide)
        elif self.form == "int8pack":
            assert self.stored is not None
            out = torch._weight_int8pack_mm(flat, self.stored.values, self.stored.scales[:, 0])
            if self.sparse is not None:
                out = out + self.sparse.multiply(flat.float())
        else:
            narrow = flat.to(torch.bfloat16)
            out = self.tiles[0].multiply(narrow)
            for more in self.tiles[1:]:
                # the high bits' sum, rounded to bfloat16, would swallow the low bits'
                out = out.float() + more.multiply(narrow).float()
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.shape[0])

    @property
    def of_a_row(self) -> FewBits | None:
        """The weight as C++ kernels take it that multiply a row by it themselves; None: none do."""
        if not self.native or self.permutation is not None or self.panels is None:
            return None
        return FewBits(self.panels, self.bias)

    def on_torch(self) -> QuantisedLinear:
        """Return the same weight, of the same memory, multiplied by torch's operators alone."""
        twin = copy(self)
        twin.native = False
        return twin

    def lying_in(self, words: Words, bias: torch.Tensor | None) -> QuantisedLinear:
        """Return the same weight, whose words and bias have been copied to other memory."""
        twin = copy(self)
        twin.words, twin.bias = words, bias
        return twin

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] with its columns in the order in which the weight holds them."""
        return x if self.permutation is None else x[..., self.permutation]

    def _blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """Multiply rows by some rows of the weight at a time, dequantised in a dtype that this
        machine multiplies.
        """
        dtype = flat.dtype if flat.device.type != "cpu" or multiplies(flat.dtype) else torch.float32
        dtype = torch.float32 if self._rounds(flat) else dtype
        size = BLOCK if flat.device.type == "cpu" else 64 * BLOCK
        weight, out = self._readable(), flat.new_empty(flat.shape[0], self.shape[0])
        wide = rounded_rows(flat) if self._rounds(flat) else flat.to(dtype)
        for part in blocks(self.shape, size):
            bias = None if self.bias is None else self.bias[part].to(dtype)
            out[:, part] = F.linear(wide, weight(part, dtype), bias)
        return out

    def _rounds(self, flat: torch.Tensor) -> bool:
        """Whether these rows are rounded to 8 bits."""
        return self.rounds and len(flat) >= ROWS

    def _readable(self) -> Callable[..., torch.Tensor]:
        """A function (rows, dtype) -> dequantised rows, whatever form holds the weight."""
        if self.stored is not None:
            return self._added(self.stored)
        if self.words is not None:
            return self.words.rows
        if self.panels is not None:
            return self.panels.rows
        if self.tiles:
            return self._untiled
        return self._added(self.digits.plain())

    def _added(self, plain: Quantised) -> Callable[..., torch.Tensor]:
        """A function (rows, dtype) -> rows of `plain` with the outliers that are held beside."""
        if self.sparse is None:
            return plain.rows
        return replace(plain, places=self.sparse.places, outliers=self.sparse.outliers).rows

    def _untiled(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise some rows of a tiled weight."""
        wide = [tiles.rows(rows, torch.float32) for tiles in self.tiles]
        return (wide[0] if len(wide) == 1 else wide[0] + wide[1]).to(dtype)
