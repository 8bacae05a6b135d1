"""A recurrent layer of Mamba-2 (arXiv 2405.21060), as Granite 4, Nemotron-H, Falcon-H1 and Bamba
have it: in place of attention or beside it.

One product makes z, x, B and C of a token, a small one its step dt. x, B and C pass a causal
convolution, the recurrence (kernels/recurrent/ssd.py) adds B (dt x)^T to a state that decays by
dt A, and what C reads of it is gated by z and normed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.model.recurrent import Mixed, Recurrent, Ssd, unrefused
from engine.model.share.mean import DividedMean
from kernels.recurrent.delta import Tail
from kernels.recurrent.ssd import ssd_chunk, ssd_step


@dataclass
class Mamba2:
    """The small weights of one such layer; its two matrices are Layer.qkv and Layer.o, or, beside
    attention, Layer.mixer_in and Layer.mixer_out.
    """

    sizes: Recurrent
    ssd: Ssd
    conv: torch.Tensor  # [C, taps]: channels of x, then B, then C
    conv_bias: torch.Tensor | None  # [C]
    rates: torch.Tensor  # [H, hidden]: dt's rows
    decay: torch.Tensor  # [H], A_log
    bias: torch.Tensor  # [H], dt_bias
    skip: torch.Tensor  # float32 [H], D
    norm: torch.Tensor | None  # [H * dh]
    scales: torch.Tensor | None = None  # [C + H * dh]: factors of x, B, C, and z
    # of the one group, where several ranks divide it
    mean: DividedMean | None = None
    # a self-test refused the Triton kernels of this recurrence
    refused: bool = field(default=False, init=False)

    @classmethod
    def of(cls, sizes: Recurrent, ssd: Ssd, held: dict[str, torch.Tensor]) -> Mamba2:
        """Make one of its tensors by name, as engine/model/tensors.py lists them."""
        scales = None
        if ssd.factors:
            z, x, b, c, _ = ssd.factors
            widths = (x, sizes.value_size), (b, sizes.key_size), (c, sizes.key_size)
            parts = [torch.full((width,), f) for f, width in (*widths, (z, sizes.value_size))]
            scales = torch.cat(parts).to(held["conv"])
        rates, decay, step, skip = (held[name] for name in ("rates", "decay", "step", "skip"))
        conv, bias = held["conv"].squeeze(1), held.get("conv_bias")
        small = rates, decay, step, skip.float()
        return cls(sizes, ssd, conv, bias, *small, held.get("out_norm"), scales)

    @property
    def tensors(self) -> list[torch.Tensor]:
        found = [self.conv, self.rates, self.decay, self.bias, self.skip]
        more = self.conv_bias, self.norm, self.scales
        return found + [tensor for tensor in more if tensor is not None]

    def refuse(self) -> None:
        self.refused = True

    def backend(self, asked: str) -> str:
        return unrefused(asked, self.conv.device, self.refused)

    def mixed(self, x: torch.Tensor, projected: torch.Tensor) -> Mixed:
        sizes, steps = self.sizes, F.linear(x, self.rates).float()
        if self.scales is not None:
            projected, steps = projected * self.scales, steps * self.ssd.factors[4]
        xbc, z = projected.split([sizes.channels, sizes.value_size], -1)
        dt = F.softplus(steps + self.bias.float())
        g = -self.decay.float().exp() * dt
        return Mixed(xbc, z.unflatten(-1, (sizes.value_heads, sizes.value_dim)), g, dt)

    def heads(self, xbc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split convolved xbc [B, S, C] into c, b [B, S, G, ds] and x [B, S, H, dh]."""
        sizes = self.sizes
        x, b, c = xbc.split([sizes.value_size, sizes.key_size, sizes.key_size], -1)
        b, c = (t.unflatten(-1, (sizes.key_heads, sizes.key_dim)) for t in (b, c))
        return c, b, x.unflatten(-1, (sizes.value_heads, sizes.value_dim))

    def step(
        self,
        convolved: torch.Tensor,
        mixed: Mixed,
        state: torch.Tensor,
        tail: Tail,
        base: torch.Tensor,
        positions: torch.Tensor,
        backend: str,
    ) -> torch.Tensor:
        tokens = *self.heads(convolved), mixed.g, mixed.beta, self.skip
        return ssd_step(*tokens, state, tail, base, positions, self.backend(backend))

    def chunk(
        self, convolved: torch.Tensor, mixed: Mixed, state: torch.Tensor, keep: int, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor, Tail]:
        tokens = *self.heads(convolved), mixed.g, mixed.beta, self.skip
        return ssd_chunk(*tokens, state, keep, self.backend(backend))

    def gated(self, out: torch.Tensor, z: torch.Tensor, eps: float, backend: str) -> torch.Tensor:
        """Gate out and norm the heads of each group together, in the order that Ssd.gate says."""
        gate, kind, out = F.silu(z.float()), z.dtype, out.float()
        if self.norm is None:
            return (out * gate).to(kind)
        if self.ssd.gate == "before":
            out = out * gate
        groups = out.flatten(2).unflatten(2, (self.sizes.key_heads, -1))
        squares = groups.square()
        mean = self.mean(squares.sum(-1)) if self.mean else squares.mean(-1)
        normed = (groups * torch.rsqrt(mean[..., None] + eps)).flatten(2)
        if self.ssd.gate == "after":
            normed = normed * gate.flatten(2)
        return (self.norm * normed).to(kind)
