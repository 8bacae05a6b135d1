"""What stands around the gated delta rule, in torch's operators: gates before it, a gated norm
after it (arXiv 2412.06464, section 3.4; as in transformers' Qwen3-Next).

    gates(rates, decay, bias) -> (g, beta)
    gated_norm(out, z, weight, eps) -> y
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    out: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Divide each head of out [.., dv] by its root mean square, scale it by weight [dv] and gate it
    by silu(z): in the dtype of z, which has the shape of out.
    """
    out = out.to(z.dtype).float()
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(z.dtype) * F.silu(z.float())).to(z.dtype)
