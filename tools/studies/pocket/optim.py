"""Muon for stacks of equal matrices: the orthogonalised momentum update of torch.optim.Muon,
batched over layers for a CPU; two processes orthogonalise half the layers each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_A, _B, _C = 3.4445, -4.7750, 2.0315  # the quintic iteration's published coefficients


def orthogonalise(
    stack: torch.Tensor, steps: int = 5, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[n, rows, cols] float32 -> the same shape in `dtype` with every singular value near one
    (Newton-Schulz, `steps` rounds).
    """
    tall = stack.shape[1] > stack.shape[2]
    x = stack.transpose(1, 2) if tall else stack
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype).contiguous()
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum times lr * sqrt(max(1, rows / cols)), with decoupled weight decay.

    params: stacks [n, rows, cols], n divisible by `world`, the number of processes that hold the
    same gradients. dtype: of the products.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world: int = 1,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype, self.rank, self.world = dtype, rank, world

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every stack that has a gradient."""
        for group in self.param_groups:
            stacks = [stack for stack in group["params"] if stack.grad is not None]
            mine = [self._mine(stack, group["momentum"]) for stack in stacks]
            for stack, update in zip(stacks, self._shared(stacks, mine), strict=True):
                scale = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
                stack.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    update, alpha=-group["lr"] * scale
                )

    def _mine(self, stack: torch.Tensor, momentum: float) -> torch.Tensor:
        """This process's layers of the update, float32."""
        state, gradient = self.state[stack], stack.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(stack)
        kept = state["momentum"].lerp_(gradient, 1 - momentum)
        part = slice(
            self.rank * len(stack) // self.world, (self.rank + 1) * len(stack) // self.world
        )
        return orthogonalise(
            torch.lerp(gradient[part], kept[part], momentum), dtype=self.dtype
        ).float()

    def _shared(self, stacks: list[torch.Tensor], mine: list[torch.Tensor]) -> list[torch.Tensor]:
        """All processes' layers, stack by stack."""
        if self.world == 1:
            return mine
        flat = torch.cat([part.flatten() for part in mine])
        parts = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(parts, flat)
        sizes = [part.numel() for part in mine]
        split = [part.split(sizes) for part in parts]
        return [torch.cat([s[i] for s in split]).view_as(stack) for i, stack in enumerate(stacks)]
