"""The rows of a bank: floats, or packed in fewer bits. What a writer or reader in torch calls.

The dtype of rows says their form: int8 is kernels/rows/int8.py, uint8 kernels/rows/int4.py,
float8_e4m3fn kernels/rows/fp8.py, any wider float dtype rows as they are. A packed row is one run
of bytes that ends with a scale, so that whatever moves a row (a gather, a write-back, a file) need
not know what is in it; rows of K and of V may differ in length. An element is value * scale, where
a value has 8 bits at most and is exact in 16-bit floats. Rows of K hold the elements of the
transformed row (kernels/rows/hadamard.py), rows of V their own, in 4 bits those of the transformed
row too.

A reader takes rows by `floats` and `unpack` (of K `key_floats` and `unpack_keys`, which transform
back), or values and scales apart: a product over D is scaled per row afterwards, one over rows has
its weights scaled before. Readers that multiply K as it is stored transform their queries first, by
`stored_queries`, and those that add up V as it is stored transform the sums back, by `value_sums`.
Kernels in Triton read and write rows by kernels/rows/tiles.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from kernels.rows import fp8, int4, int8
from kernels.rows.hadamard import (
    query_factor,
    signs,
    transformed_queries,
    turn_back,
    wide_queries,
)

# elements of K that are float32 before they are transformed back: 1 MB stays in a core's cache
AT_ONCE = {"cpu": 2**18, "cuda": 2**24}
Rows = Callable[[torch.Tensor], torch.Tensor]


class Side(NamedTuple):
    """How rows of K, or of V, are packed. width: elements of a row of a head dimension; dim: the
    reverse; pack: from floats [.., D], by a backend's kernels ("auto"); values: [.., D] of 8 bits
    each; widen: those as float32 into a tensor; scales: float32 [..].
    """

    width: Callable[[int], int]
    dim: Callable[[int], int]
    pack: Callable[..., torch.Tensor]
    values: Rows
    widen: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    scales: Rows


class Form(NamedTuple):
    """A form of packed rows. name: of a bank that holds them; D is a multiple of `multiple`, and
    `most` at most; turned: rows of V hold the transformed row, as those of K do.
    """

    name: str
    multiple: int
    most: int
    keys: Side
    values: Side
    turned: bool = False


def _side(module: ModuleType, side: str = "") -> Side:
    return Side(*(getattr(module, side + name) for name in Side._fields))


_INT8, _FP8 = _side(int8), _side(fp8)
FORMS = {
    torch.int8: Form(
        "int8",
        int8.ALIGNED,
        1024,
        _INT8._replace(pack=int8.pack_keys),
        _INT8._replace(pack=int8.pack_values),
    ),
    torch.uint8: Form(
        "int4",
        int4.MULTIPLE,
        int4.MOST,
        _side(int4, "key_"),
        _side(int4, "value_"),
        turned=True,
    ),
    fp8.KIND: Form("fp8", int8.ALIGNED, 1024, _FP8._replace(pack=fp8.pack_keys), _FP8),
}
ZEROS = {torch.int8: int8.ZEROS, fp8.KIND: int8.ZEROS}  # bytes at the end of a row that say nothing
DTYPES = {form.name: dtype for dtype, form in FORMS.items()}  # of packed rows, by the bank's name


def row_widths(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Count the elements of a head's row of K and of V in `dtype`."""
    form = FORMS.get(dtype)
    if form is None:
        return head_dim, head_dim
    return form.keys.width(head_dim), form.values.width(head_dim)


def with_zeros(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [.., width] that came without the zeros at their end as rows of a bank."""
    zeros = ZEROS.get(rows.dtype, 0)
    if not zeros:
        return rows
    return torch.nn.functional.pad(rows.view(torch.uint8), (0, zeros)).view(rows.dtype)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View rows of 8-bit floats as bytes, for operators of torch that do not know their dtype."""
    return rows.view(torch.uint8) if rows.dtype == fp8.KIND else rows


def is_packed(rows: torch.Tensor) -> bool:
    """Tell packed rows from rows of floats [.., D]."""
    return rows.dtype in FORMS


def widen_keys(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write rows of K into out [.., D] float32 and return it: of packed rows the values."""
    return FORMS[rows.dtype].keys.widen(rows, out) if is_packed(rows) else out.copy_(rows)


def widen_values(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write rows of V [.., width] into out [.., D] float32, as `widen_keys` those of K."""
    return FORMS[rows.dtype].values.widen(rows, out) if is_packed(rows) else out.copy_(rows)


def key_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the scales of packed rows of K: float32 [..]."""
    return FORMS[rows.dtype].keys.scales(rows)


def value_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the scales of packed rows of V: float32 [..]."""
    return FORMS[rows.dtype].values.scales(rows)


def unpack(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return packed rows of V as floats [.., D] in `dtype`, rounded once; rows of floats as they
    are.
    """
    if not is_packed(rows):
        return rows
    form = FORMS[rows.dtype]
    if form.turned:
        return _turned_back(rows, form.values, dtype)
    return _stored_floats(rows, form.values).to(dtype)


def unpack_keys(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return packed rows of K as floats [.., D] in `dtype`, transformed back and rounded once; rows
    of floats as they are.
    """
    return _turned_back(rows, FORMS[rows.dtype].keys, dtype) if is_packed(rows) else rows


def _turned_back(rows: torch.Tensor, side: Side, dtype: torch.dtype) -> torch.Tensor:
    """Unpack rows that hold the transformed row.

    The sums are whole numbers below 2^24, so float32 holds them in whatever order they are taken;
    those of values in 8-bit floats span more and are taken in float64.
    """
    dim, wide = side.dim(rows.shape[-1]), torch.float32
    if rows.dtype == fp8.KIND:
        wide = torch.float64
    matrix = signs(dim, wide, rows.device)
    out = torch.empty(*rows.shape[:-1], dim, dtype=dtype, device=rows.device)
    size = max(1, AT_ONCE.get(rows.device.type, AT_ONCE["cuda"]) // (rows.shape[:-2].numel() * dim))
    for first in range(0, rows.shape[-2], size):
        part = rows[..., first : first + size, :]
        scale = (side.scales(part) / query_factor(dim)).unsqueeze(-1)
        found = out[..., first : first + size, :]
        torch.mul((side.values(part).to(wide) @ matrix).float(), scale, out=found)
    return out


def _stored_floats(rows: torch.Tensor, side: Side) -> torch.Tensor:
    return side.values(rows).float().mul_(side.scales(rows).unsqueeze(-1))


def floats(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of V of any form in float32 [.., D]."""
    return unpack(rows, torch.float32) if is_packed(rows) else rows.float()


def stored_key_floats(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of K of any form in float32 [.., D] as they are stored: for products with
    `stored_queries`.
    """
    return _stored_floats(rows, FORMS[rows.dtype].keys) if is_packed(rows) else rows.float()


def key_floats(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of K of any form in float32 [.., D]."""
    return unpack_keys(rows, torch.float32) if is_packed(rows) else rows.float()


def stored(x: torch.Tensor, bank: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Return new rows of V, x [.., D], as `bank` holds rows: packed or as they are; packed rows
    stay.
    """
    return FORMS[bank.dtype].values.pack(x, backend) if is_packed(bank) and not is_packed(x) else x


def stored_keys(k: torch.Tensor, bank: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Return new rows of K, k [.., D], as `stored` returns those of V."""
    return FORMS[bank.dtype].keys.pack(k, backend) if is_packed(bank) and not is_packed(k) else k


def stored_queries(q: torch.Tensor, bank: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Return queries [.., D] for products with the rows of K as `bank` holds them."""
    return transformed_queries(q, backend) if is_packed(bank) else q


def value_sums(out: torch.Tensor, bank: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Return weighted sums [.., D] of the rows of V as `bank` holds them as sums of V itself."""
    if is_packed(bank) and FORMS[bank.dtype].turned:
        return transformed_queries(out, backend)
    return out


def step_value_sums(out: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
    """Return `value_sums` of a step's out [B, Q, H, D], contiguous, by a Triton kernel in place."""
    return turn_back(out) if is_packed(bank) and FORMS[bank.dtype].turned else out


def wide_stored_queries(q: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
    """Return a step's queries [B, Q, H, D] as a Triton kernel wants them for `key_product`: of
    packed rows transformed and float32.
    """
    return wide_queries(q) if is_packed(bank) else q
