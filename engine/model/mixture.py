"""A mixture of experts in place of a layer's MLP: a router scores all experts for every token, the
best few of them run, and their outputs are added with the router's weights.

A decode step reads its token's own experts, per_token in each layer. The host decides which run,
one after the other; their products are those of every other matrix (kernels/layer/linear.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.layer.linear import Linear
from kernels.quant.linear import QuantisedLinear

if TYPE_CHECKING:
    Matrix = Linear | QuantisedLinear


@dataclass(frozen=True)
class Clamp:
    """gpt-oss's activation: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit` and up
    within it. Gate and up take turns in an expert's outputs.
    """

    limit: float
    alpha: float

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """[T, 2 * width] -> [T, width]."""
        gate = both[..., ::2].clamp(max=self.limit)
        up = both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(frozen=True)
class Experts:
    """The mixture of a model's layers: `count` experts of `width` in each, of which a token takes
    `per_token`. normalise: whether the weights of the chosen sum to one. dense: layers that have
    the plain MLP of intermediate_size instead. bias: whether router and experts have biases. clamp:
    gpt-oss's activation in place of SwiGLU. stored: how a checkpoint holds experts, each "apart",
    "stacked" in one tensor or in "mxfp4" (engine/model/tensors.py).
    """

    count: int
    per_token: int
    width: int
    normalise: bool
    dense: tuple[int, ...] = ()
    bias: bool = False
    clamp: Clamp | None = None
    stored: str = "apart"

    def parameters(self, hidden: int, read: bool = False) -> int:
        """Weights of one layer's mixture; `read`: those that one token reads."""
        experts = self.per_token if read else self.count
        biases = self.count + experts * (2 * self.width + hidden) if self.bias else 0
        return self.count * hidden + experts * 3 * hidden * self.width + biases


@dataclass(eq=False)
class Mixture:
    """One layer's router, and the two matrices of every expert."""

    experts: Experts
    router: torch.Tensor  # [count, hidden]
    gate_up: Sequence[Matrix]  # [2 * width, hidden]
    down: Sequence[Matrix]  # [hidden, width]
    bias: torch.Tensor | None = None  # of the router, [count]

    @property
    def routers(self) -> list[torch.Tensor]:
        """The router's tensors."""
        return [self.router] if self.bias is None else [self.router, self.bias]

    @property
    def matrices(self) -> list[Matrix]:
        """The experts' matrices."""
        return [*self.gate_up, *self.down]

    def on_torch(self) -> Mixture:
        """Return the same mixture, multiplied by torch's operators alone."""
        gate_up, down = ([m.on_torch() for m in held] for held in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the experts that x [B, S, hidden] chooses: [B, S, hidden]."""
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat)
        if len(flat) == 1:  # a decode step: one activation and one sum for its experts
            numbers = chosen[0].tolist()
            both = torch.cat([self.gate_up[number](flat) for number in numbers])
            mixed = zip(numbers, self._activated(both).split(1))
            parts = torch.cat([self.down[number](part) for number, part in mixed])
            return torch.mm(weights, parts).view_as(x)
        out = torch.zeros_like(flat)
        for number in torch.unique(chosen).tolist():
            rows, place = torch.where(chosen == number)
            part = self.down[number](self._activated(self.gate_up[number](flat[rows])))
            out.index_add_(0, rows, part * weights[rows, place, None])
        return out.view_as(x)

    def _activated(self, both: torch.Tensor) -> torch.Tensor:
        if self.experts.clamp is not None:
            return self.experts.clamp(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def route(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows [T, hidden]: (weights in their dtype, numbers int64), both
        [T, per_token]. The softmax runs in float32, as in transformers.
        """
        best = self.experts.per_token
        logits = F.linear(flat, self.router, self.bias)
        if self.experts.normalise:  # the chosen alone: the same as all, made to sum to one
            logits, chosen = torch.topk(logits, best, dim=-1)
        shares = torch.softmax(logits, dim=-1, dtype=torch.float32)
        if not self.experts.normalise:
            shares, chosen = torch.topk(shares, best, dim=-1)
        return shares.to(flat.dtype), chosen
