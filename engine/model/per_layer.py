"""A token's embeddings for each layer beside its own, as Gemma 3n and 4 have them: one table, and
one product of the first layer's input, give a vector per layer, which gates what the layer adds
last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.model.altup import normed
from kernels.layer.linear import Linear
from kernels.quant.linear import QuantisedLinear


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return a factor of embeddings rounded to a dtype, as transformers' are."""
    return torch.tensor(factor, dtype=dtype).item()


@dataclass
class LayerTable:
    """What makes the embeddings of all layers: L layers of width P."""

    table: torch.Tensor  # [vocab, L * P]; tokens beyond it have its first row
    project: Linear | QuantisedLinear  # [L * P, hidden]
    norm: torch.Tensor  # [P], of the product
    eps: float

    def __post_init__(self) -> None:
        """Round what a token's own embeddings are multiplied by: a step asks no tensor for it."""
        self.scale = rounded(self.norm.shape[0] ** 0.5, self.table.dtype)

    def inputs(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map tokens int64 [B, S], whose embeddings are x [B, S, hidden], to what each layer adds:
        [B, S, L, P].
        """
        width = self.norm.shape[0]
        tokens = torch.where(tokens < len(self.table), tokens, 0)
        own = (self.table[tokens] * self.scale).unflatten(-1, (-1, width))
        made = (self.project(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, width))
        return (normed(made, self.norm, self.eps) + own) * 2.0**-0.5


@dataclass
class PerLayer:
    """The weights of layers' embeddings of width P, and of what is done with them."""

    made: LayerTable | None  # None: a part of a model before this one makes them
    gates: list[Linear | QuantisedLinear]  # [P, hidden] of each layer
    outs: list[Linear | QuantisedLinear]  # [hidden, P] of each layer
    norms: list[torch.Tensor]  # [hidden] of each layer
    eps: float

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The table and the norms."""
        made = [] if self.made is None else [self.made.table, self.made.norm]
        return [*made, *self.norms]

    @property
    def matrices(self) -> list[Linear | QuantisedLinear]:
        """The matrices."""
        made = [] if self.made is None else [self.made.project]
        return [*made, *self.gates, *self.outs]

    def on_torch(self) -> PerLayer:
        """Return the same weights, multiplied by torch's operators alone."""
        gates, outs = ([m.on_torch() for m in held] for held in (self.gates, self.outs))
        made = self.made and replace(self.made, project=self.made.project.on_torch())
        return replace(self, made=made, gates=gates, outs=outs)

    def of_part(self, first: int, stop: int) -> PerLayer:
        """Return those of the layers first .. stop-1; the first ones have the table of all."""
        gates, outs = self.gates[first:stop], self.outs[first:stop]
        made = None if first else self.made
        return PerLayer(made, gates, outs, self.norms[first:stop], self.eps)

    def gated(self, number: int, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the output x [B, S, hidden] of a layer lets through of its inputs [B, S, P],
        as [B, S, hidden].
        """
        gate = F.gelu(self.gates[number](x), approximate="tanh") * inputs
        return normed(self.outs[number](gate), self.norms[number], self.eps)
