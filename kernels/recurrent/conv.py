"""The causal convolution of a recurrent layer: each channel over its newest few inputs, then silu.

    conv_step(x, inputs, positions, weight, backend, bias) -> y
    conv_chunk(x, before, weight, backend, bias) -> y

Inputs of the newest tokens are kept, in the model's dtype, in row position % T of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Case
from kernels.recurrent import native
from kernels.recurrent.gpu.conv import convolve


def conv_step(
    x: torch.Tensor,
    inputs: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    backend: str = "auto",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the Q tokens x [B, Q, C] at `positions` int64 [B, Q], which follow each other, with
    weight [C, K], add bias [C] and apply silu: [B, Q, C] in x's dtype.

    inputs [B, T, C]: a ring that holds the K - 1 inputs before, and gets x. T is at least
    K - 1 + Q. Inputs before position 0 are zeros. No index visits the host.
    """
    chosen = choose(backend, x, lambda: native.takes_conv(x, inputs, weight))
    if chosen == "native":
        return native.conv_step(x, inputs, positions, weight, bias)
    width, size = weight.shape[1], inputs.shape[1]
    rows = torch.arange(len(x), device=x.device)[:, None]
    back = positions[:, :1] + torch.arange(1 - width, 0, device=x.device)
    before = inputs[rows, back % size] * (back >= 0)[..., None]
    inputs[rows, positions % size] = x
    return conv_chunk(x, before, weight, chosen, bias)


def conv_chunk(
    x: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    backend: str = "auto",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve x [B, N, C] with weight [C, K], add bias [C] and apply silu: [B, N, C] in x's dtype.
    before [B, K - 1, C]: the inputs before x.
    """
    chosen = choose(backend, x, lambda: native.takes_conv(x, before, weight))
    if chosen == "native":
        return native.conv_chunk(x, before, weight, bias)
    if chosen == "triton":
        return convolve(x, before, weight, bias)
    wide = torch.cat((before, x), 1)
    if chosen == "reference":
        return conv_ref(wide, weight, bias)
    if x.shape[1] > 1:
        out = F.conv1d(wide.transpose(1, 2), weight[:, None], bias, groups=weight.shape[0])
        return F.silu(out).transpose(1, 2)
    # one token: a product and a sum, where a convolution would set up more than it computes
    out = (wide.float() * weight.float().T).sum(1, keepdim=True)
    return F.silu((out if bias is None else out + bias.float()).to(x.dtype))


def conv_ref(
    wide: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference of `conv_chunk`, on the inputs and those before them, wide [B, K - 1 + N, C]."""
    taps = weight.shape[1]
    count = wide.shape[1] - taps + 1
    out = sum(wide[:, i : i + count].float() * weight[:, i].float() for i in range(taps))
    assert isinstance(out, torch.Tensor)
    return F.silu((out if bias is None else out + bias.float()).to(wide.dtype))


@native.CONV.self_test
def _steps() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 3, 40, generator=draw), torch.randn(40, 4, generator=draw)
    bias = torch.randn(40, generator=draw)
    for dtype in FLOATS:
        for first in (0, 30):  # before position 0 are zeros; the ring has 32 rows
            rings = torch.ones(2, 2, 32, 40, dtype=dtype).unbind()
            positions = torch.arange(first, first + 3).expand(2, -1)
            given = x.to(dtype), positions, weight.to(dtype)
            more = bias.to(dtype) if first else None
            found = native.conv_step(given[0], rings[0], *given[1:], more)
            expected = conv_step(given[0], rings[1], *given[1:], "reference", more)
            yield f"a convolution in {dtype}", found, expected, dtype
            yield f"a convolution's ring in {dtype}", rings[0], rings[1], dtype


@native.CONV.self_test
def _chunks() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(2)
    for channels, taps, counts in ((40, 4, (1, 2, 3, 4, 19)), (529, 3, (5,)), (7, 1, (2,))):
        weight, bias = torch.randn(channels, taps + 1, generator=draw).split((taps, 1), 1)
        for count, dtype in product(counts, FLOATS):
            rows = torch.randn(2, taps - 1 + count, 2 * channels, generator=draw) * 40
            rows, given = rows.to(dtype)[..., :channels], weight.to(dtype).contiguous()
            before, x = rows[:, : taps - 1].contiguous(), rows[:, taps - 1 :]
            more = bias[:, 0].to(dtype).contiguous() if count % 2 else None
            found = native.conv_chunk(x, before, given, more)
            expected = conv_chunk(x, before, given, "reference", more)
            yield f"a prompt's convolution in {dtype}", found, expected, dtype
