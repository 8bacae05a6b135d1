"""Products with weights of few bits on a CPU, and on any device by dequantising in blocks.

A decode step waits for the weights, so a form is judged by one row. Forms:

"digits": int8 with one scale per row, in fbgemm's integer product, which reads a weight once. It
    wants 8-bit activations, and one outlier spoils those (3.7% error, docs/LOG.md, 2026-11-22). So
    a row of x goes in as two rows of 7 bits, the first digits and what they leave: 14 bits, and the
    weights are read once for both. 7 bits also keep AVX2's 16-bit sums from saturating.
"int8pack": the same weights in torch's own product, which reads them as rows of bfloat16.
"int4pack": int4 in groups of 32 to 256, torch's product for bfloat16 rows.
"blocks": rows of the weight are dequantised some at a time and multiplied.

Many rows are bound by arithmetic, so there torch's own products dequantise in blocks. "digits"
stays: fbgemm takes 6 ns a weight to unpack, as long as it multiplies 400 rows.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.isa import isa, multiplies
from kernels.quantised import BLOCK, KINDS, Quantised, blocks, nibbles

FORMS = ("digits", "int8pack", "int4pack", "blocks")
# rows up to which a form's own product beats dequantising, with and without 16-bit products
ALL = 1 << 30
FEW = {"digits": (ALL, ALL), "int8pack": (12, 12), "int4pack": (12, 24), "blocks": (0, 0)}
PIECE = 128  # rows that are digits at a time: they are four float32 copies
HALF = 63.0  # a digit lies in -63..63, stored around 64
GROUPS = (32, 64, 128, 256)  # what the 4-bit product takes
DEPTH = 512  # fbgemm pads the inner dimension to whole blocks of so many columns
TIMED = (2048, 2048)  # a weight of the one-off timing
TRIES = 5
TILE = 64  # rows of a tile of the 4-bit product, at most
SWEEP = 16 << 20  # float32 numbers that are read in between: 64 MiB, more than a core's cache holds


def held_bytes(kind: str, shape: tuple[int, int], group: int, offsets: bool, form: str) -> int:
    """Count the bytes of a weight [O, I] in one of FORMS; scales of 4 bytes per row, 2 per group.

    offsets: whether groups have one beside their scale; int4pack always stores both.
    """
    rows, columns = shape
    if form == "digits":
        # beside the values, per row: its scale, its zero point and its sum, 4 bytes each
        width = 8 if isa() in ("default", "avx2") else 32
        return -(-columns // DEPTH) * DEPTH * -(-rows // width) * width + 12 * rows
    if form == "int8pack":
        return rows * columns + 2 * rows
    groups = -(-columns // group)
    if form == "int4pack":
        return rows * columns // 2 + 4 * rows * groups
    values = rows * columns // 2 if kind == "int4" else rows * columns
    scale = 4 if kind == "int8" and groups == 1 else 2
    return values + scale * rows * groups * (2 if offsets else 1)


def choose_quantised_form(
    kind: str,
    shape: tuple[int, int],
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    plain: bool = True,
) -> str:
    """Choose one of FORMS for weights of a kind: the fastest that can hold them, by a timing of
    once per process.

    dtype: of the activations. plain: no permutation and no table.
    """
    if device.type != "cpu" or not plain:
        return "blocks"
    able = [form for form in rates(kind, dtype) if form != "float"]
    if kind == "int8" and group < shape[1]:
        able = []
    if kind == "int4" and (group not in GROUPS or shape[0] % tile_rows() or shape[1] % group):
        able = []
    if not able:
        return "blocks"
    return min(able, key=rates(kind, dtype).__getitem__)


@functools.cache
def rates(kind: str, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of one row's product on this CPU by form, "blocks" always among them, and under
    "float" that of a weight held in `dtype`.

    Measured once per process in about a quarter of a second, on weights that no cache holds.
    """
    from kernels.linear import pack_linear

    if kind not in KINDS:
        raise ValueError(f"kind: found {kind!r}, expected one of {', '.join(KINDS)}")
    held: dict[str, tuple[Callable, Callable]] = {}
    for form in able_forms(kind, dtype):
        matrix, small = (
            QuantisedLinear(_sample(kind, rows), None, dtype, form) for rows in (TIMED[0], TILE)
        )
        held[form] = matrix, small
    plain, small_plain = (
        pack_linear(torch.zeros(rows, TIMED[1], dtype=dtype)) for rows in (TIMED[0], TILE)
    )
    return _timed(held | {"float": (plain, small_plain)}, dtype)


def able_forms(kind: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The forms that this torch has for weights of a kind and activations of `dtype`, "blocks"
    last. Operators that are missing or wrong here are left out.
    """
    found = []
    if kind == "int8" and _works(_digits_probe):
        found.append("digits")
    # with other activations the two are scalar code, 10 to 20 times slower
    if kind == "int8" and dtype == torch.bfloat16 and hasattr(torch, "_weight_int8pack_mm"):
        found.append("int8pack")
    if kind == "int4" and tile_rows():
        found.append("int4pack")
    return (*found, "blocks")


def speed_note(kind: str, dtype: torch.dtype, form: str) -> str:
    """Say which product runs, and its rate beside the dtype's own; a slower one is named so."""
    found = rates(kind, dtype)
    ratio = found["float"] / found[form]
    name = str(dtype).removeprefix("torch.")
    said = f"{form} products, {ratio:.1f}x {name}'s rate here"
    return said if ratio >= 1 else f"{said}: {kind} saves memory on this CPU, not time"


def _sample(kind: str, rows: int) -> Quantised:
    columns = TIMED[1]
    if kind == "int4":
        values = torch.zeros(rows, columns // 2, dtype=torch.uint8)
        scales = torch.ones(rows, columns // 64, dtype=torch.bfloat16)
        return Quantised(kind, values, scales, 64, scales)
    values = torch.ones(rows, columns, dtype=torch.int8)
    if kind == "fp8":
        values = values.to(torch.float8_e4m3fn)
    return Quantised(kind, values, torch.ones(rows, 1), columns)


def _timed(held: dict[str, tuple[Callable, Callable]], dtype: torch.dtype) -> dict[str, float]:
    """The least of TRIES products of one row, its weight in no cache and its code in all; seconds.

    held: by name, a product and a small one that warms the code. They take turns, so that a busy
    machine slows all of them.
    """
    x, sweep = torch.ones(1, TIMED[1], dtype=dtype), torch.ones(SWEEP)
    best = dict.fromkeys(held, float("inf"))
    for _ in range(TRIES):
        for name, (product, small) in held.items():
            sweep.sum()
            for _ in range(3):
                small(x)
            began = time.thread_time()
            product(x)
            best[name] = min(best[name], time.thread_time() - began)
    return best


def pack_quantised(
    weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype, form: str = "auto"
) -> QuantisedLinear:
    """Hold a weight of few bits [O, I] and a bias [O] or None as a callable.

    dtype: of activations. form: "auto" for this machine's fastest, one of FORMS, or "plain", which
    dequantises in blocks everywhere.
    """
    if form == "auto":
        plain = weight.permutation is None and weight.table is None
        if weight.kind == "int8" and weight.offsets is not None:
            plain = False
        form = choose_quantised_form(
            weight.kind, weight.shape, weight.group, dtype, weight.device, plain
        )
    return QuantisedLinear(weight, bias, dtype, "blocks" if form == "plain" else form)


class QuantisedLinear:
    """A weight of few bits as a callable x [..., I] -> [..., O], beside kernels.linear.Linear.

    `.form` is one of FORMS, `.shape` is (O, I), `.dtype` that of activations, `.nbytes` counts the
    weight and its bias. Raises ValueError where the form cannot hold the weight.
    """

    def __init__(
        self, weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype, form: str
    ) -> None:
        self.form, self.bias, self.dtype = form, bias, dtype
        self.kind, self.group = weight.kind, weight.group
        self.shape: tuple[int, ...] = weight.shape
        self.permutation = weight.permutation
        self.few = FEW[form][not multiplies(dtype)]
        self.stored: Quantised | None = weight if form in ("blocks", "int8pack") else None
        if form in ("digits", "int8pack") and not weight.per_row:
            raise ValueError(f"form {form!r}: found groups of {weight.group}, expected whole rows")
        self.nbytes = held_bytes(
            weight.kind, weight.shape, weight.group, weight.offsets is not None, form
        )
        if form == "blocks":
            self.nbytes = weight.nbytes
        if form == "digits":
            self.packed = _fbgemm(weight)
        elif form == "int8pack":
            # the op takes scales of the activations' dtype: keep these only
            scales = weight.scales.to(dtype)
            self.stored = Quantised("int8", weight.values, scales, weight.group)
        elif form == "int4pack":
            self.packed, self.zeros = _int4_tiles(weight), _scales_and_zeros(weight)
        self.nbytes += 0 if bias is None else bias.numel() * bias.element_size()

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, dequantised anew at each call: [O, I] of `dtype`."""
        read = self._readable()
        return torch.cat([read(part, self.dtype) for part in blocks(self.shape)])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I]: [..., O] of x's dtype, contiguous."""
        flat = x.reshape(-1, self.shape[1])
        if flat.shape[0] > self.few:
            return self._blocks(flat).view(*x.shape[:-1], self.shape[0])
        if self.form == "digits" and flat.shape[0] > PIECE:
            out = flat.new_empty(flat.shape[0], self.shape[0])
            for start in range(0, flat.shape[0], PIECE):
                part = slice(start, start + PIECE)
                out[part] = self._digits(flat[part])
        elif self.form == "digits":
            out = self._digits(flat)
        elif self.form == "int8pack":
            assert self.stored is not None
            out = torch._weight_int8pack_mm(flat, self.stored.values, self.stored.scales[:, 0])
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(
                flat.to(torch.bfloat16), self.packed, self.group, self.zeros
            )
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.shape[0])

    def _digits(self, flat: torch.Tensor) -> torch.Tensor:
        """Multiply rows, each as two rows of 7-bit integers with a scale of its own: float32."""
        rows, wide = flat.shape[0], flat.float()
        scale = wide.abs().amax(1, keepdim=True).clamp_min_(1e-30) / HALF
        wide = wide / scale
        first = wide.round()
        digits = torch.cat((first, ((wide - first) * (2 * HALF)).round_()))
        out = _integer_product(digits, self.packed)
        return (out[:rows] + out[rows:] / (2 * HALF)) * scale

    def _blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """Multiply rows by some rows of the weight at a time, dequantised in a dtype that this
        machine multiplies.
        """
        dtype = flat.dtype if flat.device.type != "cpu" or multiplies(flat.dtype) else torch.float32
        size = BLOCK if flat.device.type == "cpu" else 64 * BLOCK
        weight, out = self._readable(), flat.new_empty(flat.shape[0], self.shape[0])
        wide = flat.to(dtype)
        for part in blocks(self.shape, size):
            bias = None if self.bias is None else self.bias[part].to(dtype)
            out[:, part] = F.linear(wide, weight(part, dtype), bias)
        return out

    def _readable(self) -> Callable[[slice, torch.dtype], torch.Tensor]:
        """A function (rows, dtype) -> dequantised rows, whatever form holds the weight."""
        if self.stored is not None:
            return self.stored.rows
        if self.form == "int4pack":
            return self._untiled
        values, _ = torch.ops.quantized.linear_unpack(self.packed)
        plain, scales = values.int_repr(), values.q_per_channel_scales().float()[:, None]
        return Quantised("int8", plain, scales, self.shape[1]).rows

    def _untiled(self, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise the rows `part` of a tiled 4-bit weight."""
        tile = tile_rows()
        first, last = part.start // tile, -(-part.stop // tile)
        size = self.shape[1] * tile // 2
        both = self.packed.flatten()[first * size : last * size].view(-1, self.shape[1], tile // 2)
        plain = torch.cat((both & 15, both >> 4), 2).transpose(1, 2).flatten(0, 1)
        start = part.start - first * tile
        values = plain[start : start + part.stop - part.start].to(torch.float32)
        # [groups, rows, 2] -> [rows, groups, 2]
        pairs = self.zeros[:, part].float().transpose(0, 1)
        out = values.view(values.shape[0], -1, self.group) - 8
        return (out * pairs[..., :1] + pairs[..., 1:]).flatten(1).to(dtype)


# ---------------------------------------------------------------- torch's operators


def _fbgemm(weight: Quantised) -> torch.Tensor:
    """Pack int8 rows for fbgemm: an opaque object."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # quantised tensors are deprecated; fbgemm has no other door
        made = torch._make_per_channel_quantized_tensor(
            weight.values,
            weight.scales[:, 0].double(),
            torch.zeros(weight.shape[0], dtype=torch.int64),
            0,
        )
        return torch.ops.quantized.linear_prepack(made, None)


def _integer_product(digits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Multiply whole numbers [R, I] in -64..63, held in float32, by packed int8 rows: float32."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        digits, 1.0, 64, packed
    )


def _works(probe: Callable[[], bool]) -> bool:
    """Whether an operator is there and right: `probe` says so, and an error says no."""
    try:
        return probe()
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@functools.cache
def _digits_probe() -> bool:
    """Multiply the largest digits by the largest weights, where sums of 16 bits would saturate."""
    values = torch.full((8, 64), 127, dtype=torch.int8)
    packed = _fbgemm(Quantised("int8", values, torch.ones(8, 1), 64))
    found = _integer_product(torch.full((2, 64), HALF), packed)
    return bool((found == 64 * 127 * HALF).all())


@functools.cache
def tile_rows() -> int:
    """Rows of a tile of the 4-bit product's layout, 64 or 32; 0 where the op is missing or lays its
    nibbles out in another way. A tile holds, for each column, the first half of its rows in the low
    bits and the second half in the high bits.
    """

    def probe() -> int:
        values = torch.arange(128 * 32, dtype=torch.int32).view(128, 32) % 15
        found = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1).flatten()
        for tile in (64, 32, 16):
            halves = values.view(-1, 2, tile // 2, 32).to(torch.uint8)
            expected = (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2)
            if torch.equal(expected.flatten(), found):
                return tile
        return 0

    try:
        return probe()
    except (RuntimeError, AttributeError, NotImplementedError):
        return 0


def _int4_tiles(weight: Quantised) -> torch.Tensor:
    """The values in the 4-bit product's layout, packed some tiles at a time, because the op wants
    32 bits an element.
    """
    rows, columns = weight.shape
    step = max(1, BLOCK // columns // 64) * 64
    out = torch.empty(rows, columns // 2, dtype=torch.uint8)
    for start in range(0, rows, step):
        part = nibbles(weight.values[start : start + step]).int()
        out[start : start + step] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            part, 1
        ).view(-1, columns // 2)
    return out


def _scales_and_zeros(weight: Quantised) -> torch.Tensor:
    """bfloat16 [I / group, O, 2]: the op computes (q - 8) * scale + zero."""
    scales = weight.scales.to(torch.bfloat16).float()
    # q * s + o = (q - 8) * s + (o + 8 s), with s as it is rounded
    zeros = 8 * scales
    if weight.offsets is not None:
        zeros = zeros + weight.offsets.float()
    return torch.stack((scales.t(), zeros.t()), -1).to(torch.bfloat16).contiguous()
