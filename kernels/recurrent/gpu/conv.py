"""A prompt's causal convolution with silu on a GPU, in one launch.

Torch's operators join the inputs before with the new ones, convolve channel after channel and leave
the result so: four launches, and six passes over the tokens. Here a program has a tile of tokens
and channels, whose neighbours it reads again from the L1.
"""

from __future__ import annotations

import torch

from kernels.launch.triton import tl, triton

ROWS, COLUMNS = 32, 128  # tokens and channels of one program


def convolve(
    x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`conv_chunk` of kernels/recurrent/conv.py, same arguments: [B, N, C] in x's dtype, a token's
    channels together. A token of x may be part of a longer row.
    """
    batch, count, channels = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    before, weight = before.contiguous(), weight.contiguous()
    out = torch.empty(batch, count, channels, dtype=x.dtype, device=x.device)
    conv_kernel[(-(-channels // COLUMNS), -(-count // ROWS), batch)](
        x, before, weight, bias, out, count, channels, *x.stride()[:2],
        TAPS=weight.shape[1], BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def conv_kernel(
    x,
    before,
    weight,
    bias,
    out,
    count,
    channels,
    x_batch,
    x_row,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Convolve a tile: grid (tiles of channels, tiles of tokens, sequences). What is added is
    rounded to the model's dtype before silu, as torch does.
    """
    kind = out.dtype.element_ty
    b = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within, live = c < channels, (n < count)[:, None]
    x += b * x_batch
    before += b * (TAPS - 1) * channels
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        place = (n + (tap - (TAPS - 1)))[:, None]
        inside = live & within[None, :]
        new = tl.load(x + place.to(tl.int64) * x_row + c, mask=inside & (place >= 0), other=0.0)
        at = before + (place + (TAPS - 1)) * channels + c
        old = tl.load(at, mask=inside & (place < 0), other=0.0)
        one = tl.load(weight + c * TAPS + tap, mask=within, other=0.0)
        total += tl.where(place >= 0, new, old).to(tl.float32) * one.to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + c, mask=within, other=0.0).to(tl.float32)[None, :]
    total = total.to(kind).to(tl.float32)
    at = out + (b * count + n.to(tl.int64))[:, None] * channels + c
    tl.store(at, (total / (1.0 + tl.exp(-total))).to(kind), mask=live & within[None, :])
