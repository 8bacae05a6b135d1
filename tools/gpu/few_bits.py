"""`make check-gpu`, weights of few bits: the products of a layer against products with the
dequantised weight, then timed against their bytes and against the library's on floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from kernels.quant.linear import QuantisedLinear, pack_quantised
from kernels.quant.matrix import Quantised, packed_nibbles
from tools.gpu.kernels import median_time

# Llama-3-8B's: q/k/v, output, gate and up, down
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SMALL = ((96, 64), (64, 192))
ROWS = (1, 8, 32, 512)
GROUPS = {"int8": 64, "int4": 32}
# of the largest value: a few roundings to bfloat16, which forms of a CPU do in float32 too
ALLOWED = 2**-5


def made(
    kind: str, shape: tuple[int, int], device: str, dtype: torch.dtype
) -> tuple[QuantisedLinear, torch.Tensor]:
    """A random weight as the engine holds it on a device, and the same dequantised."""
    generator = torch.Generator(device).manual_seed(shape[0])
    options: dict[str, Any] = dict(generator=generator, device=device)
    rows, columns = shape
    scales = torch.rand(rows, columns // GROUPS[kind], **options).add_(0.1) * columns**-0.5
    if kind == "int4":
        values = torch.randint(0, 16, shape, dtype=torch.uint8, **options)
        scales = (scales / 5).bfloat16()
        weight = Quantised(kind, packed_nibbles(values), scales, GROUPS[kind], -8 * scales)
    else:
        values = torch.randint(-127, 128, shape, dtype=torch.int8, **options)
        weight = Quantised(kind, values, (scales / 73).bfloat16(), GROUPS[kind])
    return pack_quantised(weight, None, dtype), weight.dense(dtype)


def few_bits(
    small: bool,
    device: str,
    dtype: torch.dtype,
    read: float,
    note: Callable[[dict[str, Any]], None],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """({kind: {difference, allowed, ok}}, rows {kind, rows, us, floor_us, share, library_us, on} of
    a layer's four products). read: bytes a second; the floor is the time of the weights' bytes.
    """
    checks, speed = {}, []
    for kind in GROUPS:
        sums = {rows: dict(us=0.0, floor_us=0.0, library_us=0.0) for rows in ROWS}
        worst = 0.0
        for shape in SMALL if small else SHAPES:
            product, dense = made(kind, shape, device, dtype)
            for rows in ROWS:
                x = torch.randn(rows, shape[1], device=device, dtype=dtype)
                want = linear(x, dense)
                worst = max(worst, float((product(x) - want).abs().max() / want.abs().max()))
                ours = median_time(lambda p=product, x=x: p(x), device)  # type: ignore[misc]
                theirs = median_time(lambda w=dense, x=x: linear(x, w), device)  # type: ignore[misc]
                sums[rows]["us"] += 1e6 * ours
                sums[rows]["library_us"] += 1e6 * theirs
                sums[rows]["floor_us"] += 1e6 * product.nbytes / read
        name = f"{kind} weights ({product.form})"
        checks[name] = {"difference": worst, "allowed": ALLOWED, "ok": worst <= ALLOWED}
        for rows, row in sums.items():
            found = {"kind": kind, "rows": rows, **row, "share": row["floor_us"] / row["us"]}
            found["on"] = torch.device(device).type
            speed.append(found)
            note(found)
    return checks, speed
