"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): what a layer keeps of a
token is one row, from which the keys and values of all heads can be made.

A row is the part of the key that rotates, which all heads share, and then the latent. Keys and
values are never made: a head's query goes through its key matrix, into the latent's space, and what
attention sums there goes through its value matrix. So attention has one K/V head whose V is its K,
and its output holds sums over whole rows, of which those of the latent are used. The rotated part
lies first because that is where partial rope expects it (engine/model/rope.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.model.config.latent import Latent
from engine.model.rope import apply_rope
from kernels.layer.linear import Linear
from kernels.quant.linear import QuantisedLinear

EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps is: transformers' default


@dataclass
class LatentHeads:
    """The weights of one layer's latent attention beside Layer.qkv, which makes queries (or their
    latent) and the row, and Layer.o.
    """

    sizes: Latent
    key: torch.Tensor  # [H, plain, rank]: from a head's query into the latent's space
    value: torch.Tensor  # [H, rank, value]: from there to a head's value
    norm: torch.Tensor  # [rank]
    query_norm: torch.Tensor | None = None  # [query_rank]
    query: Linear | QuantisedLinear | None = None  # [H * head, query_rank]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All but the matrix of the queries."""
        norms = [self.norm] if self.query_norm is None else [self.norm, self.query_norm]
        return [self.key, self.value, *norms]

    def on_torch(self) -> LatentHeads:
        """Return the same weights, multiplied by torch's operators alone."""
        return self if self.query is None else replace(self, query=self.query.on_torch())

    def split(
        self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make queries and rows of the product `projected` [B, S, rows of Layer.qkv]; cos, sin
        float32 [B or 1, S, turned / 2], of Rotary.of_layers. Returns what `pre_attention`
        (engine/model/llama.py) does, v being k.
        """
        sizes = self.sizes
        q, turned, latent = projected.split(
            [projected.shape[-1] - sizes.width, sizes.turned, sizes.rank], dim=-1
        )
        if self.query is not None:
            assert self.query_norm is not None
            q = self.query(_normed(q, self.query_norm))
        if sizes.stretch is not None:
            cos, times = cos.split([sizes.turned // 2, 1], dim=-1)
            q = (q * times).to(q.dtype)
        plain, q_turned = q.unflatten(-1, (len(self.key), sizes.head)).split(
            [sizes.plain, sizes.turned], dim=-1
        )
        absorbed = by_head(plain, self.key)
        row = _normed(latent, self.norm).unsqueeze(2)
        turned = turned.unsqueeze(2)
        q_pre_rope = torch.cat((q_turned, absorbed), dim=-1)
        rotated = torch.cat((apply_rope(q_turned, cos, sin), absorbed), dim=-1)
        k = torch.cat((apply_rope(turned, cos, sin), row), dim=-1)
        return rotated, k, k, q_pre_rope

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Map sums of rows, attended [B, S, H, width], to values [B, S, H, value]."""
        return by_head(attended[..., self.sizes.turned :], self.value)


def by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply x [B, S, H, I] by each head's own matrix [H, I, O]: [B, S, H, O]."""
    batch, length, heads, _ = x.shape
    folded = x.reshape(batch * length, heads, -1).transpose(0, 1)
    return torch.bmm(folded, matrices).transpose(0, 1).reshape(batch, length, heads, -1)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of x [.., N], in x's dtype before the weight: transformers' order."""
    return F.rms_norm(x, x.shape[-1:], None, EPS) * weight
