"""Muon for stacks of equal matrices: the orthogonalised momentum update of torch.optim.Muon, batched over layers for a
CPU."""

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315  # the quintic iteration's published coefficients


def orthogonalise(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, rows, cols] float32 -> the same shape in bfloat16 with every singular value near one (Newton-Schulz, `steps`
    rounds)."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2).contiguous() if tall else x
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, times lr * sqrt(max(1, rows / cols)); decoupled weight decay. Parameters are stacks
    [n, rows, cols]."""

    def __init__(self, params, lr: float = 0.01, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of every stack that has a gradient."""
        for group in self.param_groups:
            for stack in group["params"]:
                if stack.grad is None:
                    continue
                state = self.state[stack]
                if not state:
                    state["momentum"] = torch.zeros_like(stack)
                momentum = state["momentum"].lerp_(stack.grad, 1 - group["momentum"])
                update = orthogonalise(torch.lerp(stack.grad, momentum, group["momentum"]))
                scale = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
                stack.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    update.to(stack.dtype), alpha=-group["lr"] * scale
                )
