"""Check Mamba-2's prompt and the causal convolution: interpreted (tests/kernels) and compiled on a
GPU (tests/cuda). The oracle is a float64 loop over tokens.
"""

from __future__ import annotations

import torch

from kernels.recurrent.conv import conv_chunk
from kernels.recurrent.ssd import ssd_chunk
from tests.kernels.support.kernel_checks import assert_close
from tests.kernels_cpu.test_ssd import inputs, loop

HOSTILE = ("plain", "kept", "forgotten", "mixed", "long decay", "zero keys")


def tokens(device, count, shape, dtype, kind, batch):
    """(c, b, x, g, dt, skip, state): x, b and c are parts of one row, as a convolution leaves
    them; kind: of HOSTILE.
    """
    groups, each, ds, dh = shape
    c, b, x, g, dt, skip, state = inputs(count, shape, batch)
    if kind == "kept":
        g.mul_(1e-6)
    elif kind == "forgotten":
        g.sub_(30)
    elif kind == "mixed":  # sums of -60,000 in a chunk: a difference of float32 is off by 0.004
        g[:, ::3] *= 1e-5
        g[:, 1::3] -= 2000
    elif kind == "long decay":
        g.mul_(0.02)
    elif kind == "zero keys":
        b[:, ::2] = 0
    rows = torch.cat([t.flatten(2) for t in (x, b, c)], 2).to(dtype)
    parts = rows.split([groups * each * dh, groups * ds, groups * ds], 2)
    x, b, c = (part.unflatten(2, (-1, d)) for part, d in zip(parts, (dh, ds, ds)))
    return tuple(t.to(device) for t in (c, b, x, g, dt, skip, state))


def check_ssd_chunk(device, shape, dtype, kind, count, keep, batch=1):
    """Compare a prompt with the oracle and with plain torch, and what is kept."""
    given = tokens(device, count, shape, dtype, kind, batch)
    before = given[-1].clone()
    exact, added, states = loop(*given)
    found, plain = (ssd_chunk(*given, keep, backend) for backend in ("triton", "cpu"))
    what = f"{kind} {shape} {dtype} {count} tokens, {keep} kept"
    assert torch.equal(given[-1], before), what
    for oracle, mine, theirs in zip((exact, states[count - keep]), found[:2], plain[:2]):
        assert_close(mine, oracle, theirs, torch.float32, what)
    assert [part.shape[2] for part in found[2]] == [keep] * 3
    for mine, theirs in zip(found[2], plain[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def check_convolution(device, channels, taps, biased, dtype, count):
    """Compare a prompt's convolution with float64 and with plain torch: tokens are parts of longer
    rows, and a sequence's first ones see the inputs before.
    """
    draw = torch.Generator().manual_seed(count)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw).to(device, dtype)

    before, weight = normal(2, taps - 1, channels), normal(channels, taps)
    bias = normal(channels) if biased else None
    x = normal(2, count, channels + 24)[..., :channels]
    found, plain = (conv_chunk(x, before, weight, way, bias) for way in ("triton", "reference"))
    wide = torch.cat((before, x), 1).double()
    exact = sum(wide[:, i : i + count] * weight[:, i].double() for i in range(taps))
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype == dtype and found.is_contiguous()
    assert_close(found, exact * exact.sigmoid(), plain, dtype, f"{count} tokens")
