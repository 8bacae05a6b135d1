"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): what a layer keeps of a
token is one row, from which the keys and values of all heads can be made.

A row is the part of the key that rotates, which all heads share, and then the latent. In a step
keys and values are never made: a head's query goes through its key matrix, into the latent's space,
and what attention sums there goes through its value matrix. So attention has one K/V head whose V
is its K, and its output holds sums over whole rows, of which those of the latent are used. The
rotated part lies first because that is where partial rope expects it (engine/model/rope.py).

A chunk of a prompt may have so many queries that it is cheaper to make the keys and values of some
rows at a time (`opened`), which are shorter than rows: 384 multiply-adds a pair and head in place
of 1,152 in DeepSeek-V2 and V3. Latent.expands counts when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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

    def mapped(self, change: Callable[[Any], Any]) -> LatentHeads:
        """Return the same weights with what `change` makes of the matrix of the queries."""
        return self if self.query is None else replace(self, query=change(self.query))

    def split(
        self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, absorb: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Make queries and rows of the product `projected` [B, S, rows of Layer.qkv]; cos, sin
        float32 [B or 1, S, turned / 2], of Rotary.of_layers. Returns what `pre_attention`
        (engine/model/llama.py) does, v being k. absorb: queries go into the latent's space; else
        they are [B, S, H, head], the part that rotates first.
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
        plain = by_head(plain, self.key) if absorb else plain
        row = _normed(latent, self.norm).unsqueeze(2)
        turned = turned.unsqueeze(2)
        q_pre_rope = torch.cat((q_turned, plain), dim=-1)
        rotated = torch.cat((apply_rope(q_turned, cos, sin), plain), dim=-1)
        k = torch.cat((apply_rope(turned, cos, sin), row), dim=-1)
        return rotated, k, k, q_pre_rope

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """Take queries q [B, S, H, head] of `split`, not absorbed, into the latent's space:
        [B, S, H, width].
        """
        turned = self.sizes.turned
        return torch.cat((q[..., :turned], by_head(q[..., turned:], self.key)), dim=-1)

    def opened(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the keys and values of all heads of rows [B, 1, n, width]: two [B, H, n, opened], a
        key's rotated part first, the shorter of the two filled up with zeros.
        """
        sizes, row = self.sizes, rows[:, 0]
        turned, latent = row.split([sizes.turned, sizes.rank], dim=-1)
        # a head's rows side by side: the CPU's attention reads them a fifth faster than apart
        shape = len(row), len(self.key), row.shape[1], sizes.opened
        k, v = row.new_empty(shape), row.new_empty(shape)
        k[..., : sizes.turned] = turned.unsqueeze(1)
        k[..., sizes.turned : sizes.head] = _of_all(latent, self.key)
        v[..., : sizes.value] = _of_all(latent, self.value.transpose(1, 2))
        k[..., sizes.head :] = 0
        v[..., sizes.value :] = 0
        return k, v

    def attending(self, q: torch.Tensor) -> torch.Tensor:
        """Fill queries q [B, S, H, head] up to the keys of `opened`."""
        return F.pad(q, (0, self.sizes.opened - self.sizes.head))

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Map sums of rows, attended [B, S, H, width], to values [B, S, H, value]."""
        return by_head(attended[..., self.sizes.turned :], self.value)


def by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply x [B, S, H, I] by each head's own matrix [H, I, O]: [B, S, H, O]."""
    batch, length, heads, _ = x.shape
    folded = x.reshape(batch * length, heads, -1).transpose(0, 1)
    return torch.bmm(folded, matrices).transpose(0, 1).reshape(batch, length, heads, -1)


def _of_all(latent: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply latents [B, n, I] by the matrices of all heads [H, O, I]: [B, H, n, O]."""
    made = F.linear(latent, matrices.flatten(0, 1))
    return made.unflatten(-1, matrices.shape[:2]).transpose(1, 2)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of x [.., N], in x's dtype before the weight: transformers' order."""
    return F.rms_norm(x, x.shape[-1:], None, EPS) * weight
