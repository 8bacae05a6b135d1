"""What stands around the gated delta rule: gates before it, a gated norm after it (arXiv
2412.06464, section 3.4; as in transformers' Qwen3-Next).

    gates(rates, decay, bias) -> (g, beta)
    gated_norm(out, z, weight, eps, backend) -> y
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Case
from kernels.recurrent import native_gates


def gates(
    rates: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decays g = -exp(decay) * softplus(a + bias), at most 0, and rates
    beta = sigmoid(b), both float32 [.., Hv]. rates [.., 2 * Hv]: b of all heads, then a; decay
    and bias [Hv].
    """
    b, a = rates.chunk(2, -1)
    # as in transformers: beta in the model's dtype, g in float32
    return -decay.float().exp() * F.softplus(a.float() + bias), b.sigmoid().float()


def gated_norm(
    out: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Divide each head of out [.., dv] by its root mean square, scale it by weight [dv] and gate it
    by silu(z): in the dtype of z, which has the shape of out. weight: in z's dtype, or float32.
    """
    if choose(backend, out, lambda: native_gates.takes_norm(out, z, weight)) == "native":
        return native_gates.gated_norm(out, z, weight, eps)
    out = out.to(z.dtype).float()
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(z.dtype) * F.silu(z.float())).to(z.dtype)


@native_gates.NORM.self_test
def _norms() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(1)
    for heads, size in ((3, 40), (2, 16), (1, 5)):
        out = torch.randn(2, 3, heads, size, generator=draw)
        z = 50 * torch.randn(2, 3, 2 * heads, size, generator=draw)
        weight = torch.randn(size, generator=draw)
        for dtype in FLOATS:
            for given in {dtype: weight.to(dtype), torch.float32: weight}.values():
                gate = z.to(dtype)[:, :, heads:]
                found = native_gates.gated_norm(out, gate, given, 1e-6)
                expected = gated_norm(out, gate, given, 1e-6, "reference")
                yield f"a gated norm in {dtype}", found, expected, dtype
