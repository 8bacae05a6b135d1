"""A recurrent layer: what every kind of it is to the rest of the engine, and a gated delta net
(arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it. engine/model/mamba.py is the other kind.

One product makes q, k, v and z of a token, a small one its rate and its decay. q, k and v pass a
causal convolution over their newest tokens, the delta rule (kernels/recurrent/delta.py) reads and
changes a state of constant size, and what it reads is normed and gated by z.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from kernels.launch.dispatch import choose_for
from kernels.recurrent.delta import Tail, gated_delta_chunk, gated_delta_step
from kernels.recurrent.gates import gated_norm, gates
from kernels.recurrent.step import NetWeights


class Ssd(NamedTuple):
    """What layers of Mamba-2 have where a gated delta net has something else.

    conv_bias: whether the convolution has a bias. gate: whether z gates the output "before" its
    norm or "after" it, or there is no norm ("alone"). beside: such a layer attends as well, and
    adds both. factors: of z, x, B, C and dt; () for ones. added, attended: factors of what the
    recurrence and attention bring to the layer's output, where both do.
    """

    conv_bias: bool = True
    gate: str = "before"
    beside: bool = False
    factors: tuple[float, ...] = ()
    added: float = 1.0
    attended: float = 1.0


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a model: their numbers, heads and head dimensions of keys (and
    queries) and of values, and the tokens that the convolution sees. interleaved: a checkpoint
    stores the projection's rows key head by key head (Qwen3-Next). ssd: they are Mamba-2's, whose
    groups of B and C are the key heads; None: gated delta nets.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    interleaved: bool = False
    ssd: Ssd | None = None

    @property
    def key_size(self) -> int:
        """Width of k of all heads."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of v of all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of q, k and v together: the channels of the convolution."""
        return 2 * self.key_size + self.value_size

    def parameters(self, hidden: int) -> int:
        """Weights of one recurrent layer beside its norms and its MLP."""
        rates = 2 if self.ssd is None else 1
        projections = hidden * (self.channels + 2 * self.value_size + rates * self.value_heads)
        found = projections + self.channels * self.taps + 2 * self.value_heads
        if self.ssd is None:
            return found + self.value_dim
        norm = 0 if self.ssd.gate == "alone" else self.value_size
        return found + self.value_heads + norm + (self.channels if self.ssd.conv_bias else 0)


class Mixed(NamedTuple):
    """What a recurrent layer makes of tokens before its convolution: q, k, v joined [B, S, C] and z
    [B, S, Hv, dv] in the model's dtype, log decays g and rates beta (Mamba-2: dt) float32
    [B, S, Hv].
    """

    qkv: torch.Tensor
    z: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class Mixer(Protocol):
    """The small weights of one recurrent layer, and its recurrence. A state is S, float32
    [B, Hv, dk, dv], and a ring of rows of the tokens since (kernels/recurrent/delta.py).
    """

    sizes: Recurrent
    conv: torch.Tensor  # [C, taps]
    conv_bias: torch.Tensor | None  # [C]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        ...

    def refuse(self) -> None:
        """Run on torch's operators where Triton's kernels would run."""
        ...

    def backend(self, asked: str) -> str:
        """Return the backend of this layer's launchers where a model's is `asked`."""
        ...

    def mixed(self, x: torch.Tensor, projected: torch.Tensor) -> Mixed:
        """Split the product `projected` [B, S, C + Hv * dv] of the normed x [B, S, hidden], and
        compute rates and decays.
        """
        ...

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
        """Run a step's tokens at positions int64 [B, Q], convolved [B, Q, C], as
        `gated_delta_step`: float32 [B, Q, Hv, dv].
        """
        ...

    def chunk(
        self, convolved: torch.Tensor, mixed: Mixed, state: torch.Tensor, keep: int, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor, Tail]:
        """Run a prompt's tokens, convolved [B, N, C], as `gated_delta_chunk`."""
        ...

    def gated(self, out: torch.Tensor, z: torch.Tensor, eps: float, backend: str) -> torch.Tensor:
        """Norm out [B, S, Hv, dv] and gate it by z, in z's dtype."""
        ...


def unrefused(asked: str, device: torch.device, refused: bool) -> str:
    """Return the backend of a recurrent layer's launchers where a model's is `asked`: torch's
    operators in place of Triton's kernels that a self-test has refused.
    """
    return "cpu" if refused and choose_for(asked, device) == "triton" else asked


@dataclass
class DeltaNet:
    """The small weights of one recurrent layer; its two matrices are Layer.qkv and Layer.o."""

    sizes: Recurrent
    conv: torch.Tensor  # [C, taps]
    rates: torch.Tensor  # [2 * Hv, hidden]: beta's rows, then the decay's
    decay: torch.Tensor  # [Hv], A_log
    bias: torch.Tensor  # [Hv], dt_bias
    norm: torch.Tensor  # [dv]
    conv_bias: torch.Tensor | None = None
    # a self-test refused the Triton kernels of this recurrence
    refused: bool = field(default=False, init=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.conv, self.rates, self.decay, self.bias, self.norm]

    @property
    def weights(self) -> NetWeights:
        """What a step in one launch reads beside its products."""
        return NetWeights(self.conv, self.decay, self.bias, self.norm)

    def refuse(self) -> None:
        self.refused = True

    def backend(self, asked: str) -> str:
        return unrefused(asked, self.conv.device, self.refused)

    def mixed(self, x: torch.Tensor, projected: torch.Tensor) -> Mixed:
        sizes = self.sizes
        qkv, z = projected.split([sizes.channels, sizes.value_size], -1)
        g, beta = gates(F.linear(x, self.rates), self.decay, self.bias)
        z = z.unflatten(-1, (sizes.value_heads, sizes.value_dim))
        return Mixed(qkv, z, g, beta)

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split convolved qkv [B, S, C] into q, k [B, S, Hk, dk] and v [B, S, Hv, dv]."""
        sizes = self.sizes
        q, k, v = qkv.split([sizes.key_size, sizes.key_size, sizes.value_size], -1)
        q, k = (t.unflatten(-1, (sizes.key_heads, sizes.key_dim)) for t in (q, k))
        return q, k, v.unflatten(-1, (sizes.value_heads, sizes.value_dim))

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
        tokens = *self.heads(convolved), mixed.g, mixed.beta
        return gated_delta_step(*tokens, state, tail, base, positions, self.backend(backend))

    def chunk(
        self, convolved: torch.Tensor, mixed: Mixed, state: torch.Tensor, keep: int, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor, Tail]:
        tokens = *self.heads(convolved), mixed.g, mixed.beta
        return gated_delta_chunk(*tokens, state, keep, self.backend(backend))

    def gated(self, out: torch.Tensor, z: torch.Tensor, eps: float, backend: str) -> torch.Tensor:
        """Norm each head of out, then gate it."""
        return gated_norm(out, z, self.norm, eps, self.backend(backend))
