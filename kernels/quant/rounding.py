"""Rounding a matrix to few bits: int8 with a scale per row, int4 with a scale and an offset per
group, both found by least squares.
"""

from __future__ import annotations

import torch

from kernels.quant.matrix import Quantised, blocks, packed_nibbles

# shares of a group's range that are tried; a smaller range rounds finer and cuts the ends off
SHARES = (1.0, 0.9, 0.8)
LEVELS = 15
# what a group's largest int8 value may be; half a step apart, so that the others round otherwise
TOPS = tuple(127 - 0.5 * step for step in range(8))


def to_int8(
    weight: torch.Tensor | Quantised,
    group: int | None = None,
    outliers: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Quantised:
    """Round a matrix [O, I] to int8, symmetrically: scale = absmax / 127, in `dtype`; of groups
    shorter than a row that of absmax / TOPS whose squared error is least.

    group: columns under one scale; None for whole rows. outliers: of each row, so many of the
    largest weights are left out of its scale and kept beside, in float32 (whole rows only). A group
    of zeros has scale 1. Values are rounded against the scale as `dtype` holds it. A Quantised
    matrix is rounded again, some rows at a time, so that only its int8 copy comes to live beside
    it. Raises ValueError unless `group` divides I.
    """
    shape, device = (int(weight.shape[0]), int(weight.shape[1])), weight.device
    group = shape[1] if group is None else group
    if group < 1 or shape[1] % group or outliers and group != shape[1]:
        raise ValueError(f"group: found {group}, expected a divisor of {shape[1]} columns")
    values = torch.empty(shape, dtype=torch.int8, device=device)
    scales = torch.empty(shape[0], shape[1] // group, dtype=dtype, device=device)
    places = beyond = None
    if outliers:
        places = torch.empty(shape[0], outliers, dtype=torch.int32, device=device)
        beyond = torch.empty(shape[0], outliers, device=device)
    for part in blocks(shape):
        if isinstance(weight, Quantised):
            wide = weight.rows(part, torch.float32)
        else:
            wide = weight[part].float()
        grouped = wide.view(len(wide), -1, group)
        largest = grouped.abs()
        if outliers:
            top, where = largest.topk(outliers + 1, dim=2)
            most, where = top[..., -1], where[:, 0, :outliers].sort(1).values
        else:
            most = largest.amax(2)
        scale, whole = _stepped(grouped, most, dtype, TOPS if group < shape[1] else TOPS[:1])
        whole = whole.view_as(wide)
        scales[part], values[part] = scale, whole.to(torch.int8)
        if places is not None and beyond is not None:
            places[part] = where.int()
            beyond[part] = wide.gather(1, where) - scale * whole.gather(1, where)
    return Quantised("int8", values, scales, group, places=places, outliers=beyond)


def _stepped(
    grouped: torch.Tensor, most: torch.Tensor, dtype: torch.dtype, tops: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, values) of groups [R, G, group] whose largest magnitudes are `most`, the best of all
    `tops`.
    """
    best = least = None
    for top in tops:
        # below float32's normal numbers 127 / scale would overflow: such a group is zero
        scale = torch.where(most > 1e-30, most / top, torch.ones_like(most)).to(dtype).float()
        whole = (grouped / scale[..., None]).round_().clamp_(-127, 127)
        if len(tops) == 1:
            return scale, whole
        error = (whole * scale[..., None]).sub_(grouped).square_().sum(2)
        if best is None or least is None:
            best, least = (scale, whole), error
            continue
        less = error < least
        torch.where(less, error, least, out=least)
        torch.where(less, scale, best[0], out=best[0])
        torch.where(less[..., None], whole, best[1], out=best[1])
    assert best is not None
    return best


def few_mantissa_bits_to_int8(weight: torch.Tensor, group: int) -> Quantised:
    """Hold a matrix [O, I] whose groups of columns are small integers times a power of two in int8,
    without rounding: MXFP4's values, which times 2 are 0 to 12 times such a power.

    The scale is the power of two under which the largest value of a group lies in 64 to 127, in
    bfloat16, which holds any of them; so up to 7 bits below the largest value are kept. A group of
    zeros has scale 1, and scales end at 2 ** -126.
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=torch.bfloat16, device=weight.device)
    for part in blocks(weight.shape):
        grouped = weight[part].float().view(-1, columns // group, group)
        # absmax = m * 2 ** e with m in [.5, 1)
        most = grouped.abs().amax(2)
        exponent = torch.frexp(most).exponent - 7
        scale = torch.ldexp(torch.ones_like(most), exponent.clamp(min=-126))
        scale.masked_fill_((grouped == 0).all(2), 1.0)
        scales[part] = scale
        values[part] = (grouped / scale.unsqueeze(2)).round().view(-1, columns).to(torch.int8)
    return Quantised("int8", values, scales, group)


def to_int4(
    weight: torch.Tensor, group: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Quantised:
    """Round a matrix [O, I] to int4 in groups of columns, each with a scale and an offset of
    `dtype`.

    For every group the range min..max and narrower ones (SHARES) are tried; for each the values are
    rounded, scale and offset refitted by least squares, and the values rounded again. The least
    squared error wins. Raises ValueError unless `group` is even and divides I.
    """
    rows, columns = weight.shape
    if group < 2 or group % 2 or columns % group:
        raise ValueError(f"group: found {group}, expected an even divisor of {columns} columns")
    values = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=dtype, device=weight.device)
    offsets = torch.empty_like(scales)
    for part in blocks(weight.shape):
        wide = weight[part].float().view(-1, columns // group, group)
        q, scale, offset = _fitted(wide, dtype)
        values[part] = packed_nibbles(q.view(-1, columns))
        scales[part], offsets[part] = scale, offset
    return Quantised("int4", values, scales, group, offsets)


def _fitted(
    wide: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, scales, offsets) of groups [R, G, group], the best of all tries."""
    low, high = wide.amin(-1), wide.amax(-1)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[torch.Tensor, ...] | None = None
    for share in SHARES:
        scale = _sound(2 * share * reach / LEVELS)
        offset = middle - share * reach
        scale, offset = _refit(wide, _rounded(wide, scale, offset))
        # as they will be stored, so that the values are rounded against what multiplies them
        scale, offset = _sound(scale.to(dtype).float()), offset.to(dtype).float()
        q = _rounded(wide, scale, offset)
        error = (q * scale[..., None] + offset[..., None] - wide).square_().sum(-1)
        if best is None:
            best = (error, q, scale, offset)
            continue
        less = error < best[0]
        best = (
            torch.where(less, error, best[0]),
            torch.where(less[..., None], q, best[1]),
            torch.where(less, scale, best[2]),
            torch.where(less, offset, best[3]),
        )
    assert best is not None
    return best[1].to(torch.uint8), best[2], best[3]


def _sound(scale: torch.Tensor) -> torch.Tensor:
    """A scale that can be divided by: 1 for groups of one value."""
    return torch.where(scale.abs() > 1e-30, scale, torch.ones_like(scale))


def _rounded(wide: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return ((wide - offset[..., None]) / scale[..., None]).round_().clamp_(0, LEVELS)


def _refit(wide: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset of least squared error for given values: a line through (q, w)."""
    mean_q, mean_w = q.mean(-1), wide.mean(-1)
    apart = q - mean_q[..., None]
    spread = apart.square().sum(-1)
    slope = (apart * wide).sum(-1) / torch.where(spread > 0, spread, torch.ones_like(spread))
    return slope, mean_w - slope * mean_q
