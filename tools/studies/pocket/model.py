"""The shipped model while it trains: the Llama architecture with all layers' matrices in stacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PLAIN_UNTIL = 512  # tokens up to which `plain_attention` trains faster on a CPU
Table = tuple[Tensor, Tensor]  # cos and sin
# query [B, Hkv, G, L, D], key [B, Hkv, L, D] -> what each row sees [B, L, L] bool
Chooser = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes; the names of config.json in short."""

    vocab: int = 5120
    hidden: int = 256
    inner: int = 512
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    theta: float = 1e9
    eps: float = 1e-5
    positions: int = 32768


class Pocket(nn.Module):
    """Causal language model, tied embeddings. Matrices are [layers, out, in] (see Muon)."""

    def __init__(self, shape: Shape):
        super().__init__()
        s = self.shape = shape
        self.dtype = torch.float32  # of the products; compute_dtype() names the fast one
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        zeros = lambda *size: nn.Parameter(torch.zeros(s.layers, *size))  # noqa: E731
        self.embed = nn.Parameter(torch.zeros(s.vocab, s.hidden))
        self.q, self.k, self.v, self.o = (
            zeros(q, s.hidden),
            zeros(kv, s.hidden),
            zeros(kv, s.hidden),
            zeros(s.hidden, q),
        )
        self.gate, self.up, self.down = (
            zeros(s.inner, s.hidden),
            zeros(s.inner, s.hidden),
            zeros(s.hidden, s.inner),
        )
        self.norm1 = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.norm2 = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.norm = nn.Parameter(torch.ones(s.hidden))

    def matrices(self) -> list[nn.Parameter]:
        """The stacks that Muon trains."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def others(self) -> list[nn.Parameter]:
        """What AdamW trains: embeddings and norms."""
        return [self.embed, self.norm1, self.norm2, self.norm]

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        chooser: tuple[int, Chooser] | None = None,
    ) -> Tensor:
        """Final normed states [B, L, hidden] (self.dtype) of tokens [B, L] at positions [B, L].

        chooser: (layer, what its queries and keys choose): layers behind it see only that.
        """
        s = self.shape
        cos, sin = rope_table(positions, s)
        table = cos.to(self.dtype), sin.to(self.dtype)
        # the residual stream stays float32; products are in self.dtype
        x = F.embedding(tokens, self.embed).flatten(0, 1)
        stacks = [m.to(self.dtype).unbind(0) for m in self.matrices()] + [
            self.norm1.unbind(0),
            self.norm2.unbind(0),
        ]
        seen = None
        for layer, weights in enumerate(zip(*stacks, strict=True)):
            choose = chooser[1] if chooser and chooser[0] == layer else None
            x, chosen = block(x, tokens.shape[0], table, s, seen, choose, *weights)
            seen = chosen if choose else seen
        return rms(x, self.norm, s.eps).to(self.dtype).view(*tokens.shape, -1)

    def logits(self, states: Tensor) -> Tensor:
        """[..., vocab] float32."""
        return (states @ self.embed.to(self.dtype).T).float()


def compute_dtype(device: str) -> torch.dtype:
    """bfloat16 where the processor multiplies it, else float32. One core makes 475 GFLOP/s of
    bfloat16 and 100 of float32 with AVX512_BF16 (EPYC Turin), 31 and 150 with neither that nor AMX.
    """
    cpu = torch.cpu
    fast = device != "cpu" or cpu._is_amx_tile_supported() or cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, statistics in float32."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_table(positions: Tensor, s: Shape) -> Table:
    """cos and sin [B * L, 1, head_dim] float32 for the half-split layout."""
    half = s.head_dim // 2
    frequency = s.theta ** (
        -torch.arange(half, dtype=torch.float32, device=positions.device) / half
    )
    angle = positions.reshape(-1, 1, 1).float() * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotary embedding of x [B * L, H, D]."""
    a, b = x.chunk(2, -1)
    return x * table[0] + torch.cat((-b, a), -1) * table[1]


def pre_attention(
    x: Tensor, table: Table, s: Shape, q: Tensor, k: Tensor, v: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer up to its attention, on flat tokens x [N, hidden]: rotated queries [N, H, D], keys
    and values [N, Hkv, D].

    Flat, so that one compiled form serves every row length of the same number of tokens (a
    compilation takes minutes on a busy CPU).
    """
    h = rms(x, norm, s.eps).to(q.dtype)
    query, key, value = ((h @ w.T).view(x.shape[0], -1, s.head_dim) for w in (q, k, v))
    return rotate(query, table), rotate(key, table), value


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention: query [B, Hkv, G, L, D], key and value [B, Hkv, L, D] -> the shape of query.

    mask [1 or B, 1, 1, L, L] is added to the scores.
    """
    scores = query @ (key.unsqueeze(2).transpose(-1, -2) * query.shape[-1] ** -0.5)
    return (scores + mask).softmax(-1) @ value.unsqueeze(2)


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Causal attention in the shapes of plain_attention, by whichever form trains faster. seen
    [B, L, L] bool: what each row sees (default: all before it).

    On a CPU that is the plain one to 512 tokens, torch's fused one above (measured at 1,024: 62
    against 80 ms a layer).
    """
    batch, kv_heads, group, length, dim = query.shape
    if length > PLAIN_UNTIL or query.is_cuda:
        flat_key, flat_value = (
            x.unsqueeze(2).expand_as(query).reshape(batch, kv_heads * group, length, dim)
            for x in (key, value)
        )
        return F.scaled_dot_product_attention(
            query.flatten(1, 2),
            flat_key,
            flat_value,
            attn_mask=None if seen is None else seen[:, None],
            is_causal=seen is None,
        ).view_as(query)
    if seen is None:
        seen = torch.ones(1, length, length, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -math.inf)
    return plain_attention(query, key, value, mask[:, None, None])


def post_attention(
    x: Tensor,
    mixed: Tensor,
    s: Shape,
    o: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm: Tensor,
) -> Tensor:
    """The rest of a layer on flat tokens: x [N, hidden], mixed [N, H * D]."""
    x = x + mixed @ o.T
    h = rms(x, norm, s.eps).to(gate.dtype)
    return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def block(
    x: Tensor,
    batch: int,
    table: Table,
    s: Shape,
    seen: Tensor | None,
    choose: Chooser | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    norm1: Tensor,
    norm2: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """One decoder layer on x [batch * L, hidden], whose rows see `seen`; with it what it chooses
    for those behind it.
    """
    query, key, value = pre_attention(x, table, s, q, k, v, norm1)
    key, value = (y.view(batch, -1, s.kv_heads, s.head_dim).transpose(1, 2) for y in (key, value))
    query = query.view(batch, -1, s.heads, s.head_dim).transpose(1, 2)
    query = query.unflatten(1, (s.kv_heads, s.heads // s.kv_heads))
    chosen = choose(query, key) if choose else None
    mixed = attend(query, key, value, seen)
    mixed = mixed.flatten(1, 2).transpose(1, 2).reshape(x.shape[0], s.heads * s.head_dim)
    return post_attention(x, mixed, s, o, gate, up, down, norm2), chosen
