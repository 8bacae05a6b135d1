"""A layer of a decode step as a chain takes it, and what a step tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.chain.matrix import Matrix
from kernels.experts.native_experts import NativeExperts
from kernels.launch.softmax import Softmax

NORMS = "input", "post", "q", "k", "o", "down"  # of a layer, as `Layer` of layers.cpp has them


class Reading(NamedTuple):
    """What attention of one query reads in a layer of one sequence, and leaves.

    index int32 [1, 1, K], counts int32 [1]: what was chosen for it, which it reads with the tail;
    None: it reads everything. kind: "softmax" or "raw" scores of what it reads, by which it chooses
    for others, into index and counts, and which it leaves in scores float32 [1, T]; "": it chooses
    nothing.
    """

    # hides tuple.index
    index: torch.Tensor | None = None  # type: ignore[assignment]
    counts: torch.Tensor | None = None
    kind: str = ""
    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class ChainedLayer:
    """A layer as a Chain takes it.

    qkv makes [(heads + 2 kv_heads) * dim], gate_up [2 * inner]. k, v [kv_heads, T, dim or bytes of
    a packed row], of the model's dtype or packed, last dim contiguous; ring [slots, heads, dim]
    contiguous. window: tokens that it sees, of k and v [kv_heads, 2 * size, ..], a ring of `size`
    rows held twice; 0: all. angles: the number of its rope among those of a step.

    o_norm, down_norm [hidden]: of what a half adds to x, or None; residual: what that is multiplied
    by. activation: between gate and up and down, one of ACTIVATIONS without bounds of its own.
    widths: q_norm and k_norm are of all heads at once. mixture: experts in place of gate_up and
    down, which are None then.
    """

    qkv: Matrix
    o: Matrix
    gate_up: Matrix | None
    down: Matrix | None
    input_norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    ring: torch.Tensor
    heads: int
    reading: Reading
    scale: float
    softmax: Softmax
    window: int = 0
    size: int = 0
    angles: int = 0
    o_norm: torch.Tensor | None = None
    down_norm: torch.Tensor | None = None
    activation: str = "silu"
    residual: float = 1.0
    widths: bool = False
    mixture: NativeExperts | None = None

    @property
    def norms(self) -> tuple[torch.Tensor | None, ...]:
        """Its norms, as `Layer` of layers.cpp has them."""
        return tuple(getattr(self, f"{name}_norm") for name in NORMS)

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.o.inputs // self.heads

    @property
    def inner(self) -> tuple[int, int]:
        """Elements that gate and up make, and that down takes."""
        if self.gate_up is None or self.down is None:
            return 0, 0
        return self.gate_up.outputs, self.down.inputs

    @property
    def matrices(self) -> tuple[Matrix | None, ...]:
        """Its matrices, as `Layer` of layers.cpp has them."""
        return self.qkv, self.o, self.gate_up, self.down


class Now(NamedTuple):
    """What a step tells the layers of a chain.

    n: tokens, the new one too; tail: where their tail begins; budget: tokens to choose; position
    int64 [1, 1]; angles: (cos, sin) float32 [1, 1, pairs] of each rope.
    """

    n: int
    tail: int
    budget: int
    position: torch.Tensor
    angles: Sequence[tuple[torch.Tensor, torch.Tensor]]
