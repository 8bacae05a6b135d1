"""Self-test of a gated delta net's kernels: a step and a prompt's tokens against the reference."""

from __future__ import annotations

import torch

from engine.model.llama import Llama
from engine.model.recurrent import DeltaNet
from kernels.launch.tolerance import differs, differs_overall
from kernels.recurrent.delta import Tail, gated_delta_chunk
from kernels.recurrent.step import Held, net_step

COUNTS = (1, 3, 8)  # tokens of the tested steps
PROMPT, KEPT = 133, 5  # tokens of the tested prompt: two whole chunks, and a remainder


def delta_nets(model: Llama) -> list[DeltaNet]:
    """Return the gated delta nets of a model, layer by layer."""
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, DeltaNet)]


def recurrence_failure(net: DeltaNet, eps: float) -> str:
    """Run a layer's steps and a prompt both ways on its device: how they differ, or "". eps: of the
    model's norms.
    """
    results = [_results(net, eps, backend) for backend in ("triton", "reference")]
    for (name, found), (_, wanted) in zip(*results, strict=True):
        if why := differs(name, found, wanted, net.conv.dtype):
            return why
        if why := differs_overall(name, found, wanted):
            return why
    return ""


def launch_recurrence(net: DeltaNet, eps: float) -> None:
    """Launch what the self-test launches, and compare nothing."""
    _results(net, eps, "triton")


def _results(net: DeltaNet, eps: float, backend: str) -> list[tuple[str, torch.Tensor]]:
    """(Name, result) of all that a self-test compares, under one backend."""
    sizes, device, dtype = net.sizes, net.conv.device, net.conv.dtype
    heads, keys, dk, dv = sizes.value_heads, sizes.key_heads, sizes.key_dim, sizes.value_dim
    draw = torch.Generator().manual_seed(1)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device)

    rows = 2 * max(COUNTS)
    tail = Tail(made(1, keys, rows, dk), made(1, heads, rows, dv), -made(1, heads, rows).abs())
    held = Held(made(1, heads, dk, dv), made(1, rows, sizes.channels).to(dtype), tail)
    base = torch.full((1,), 3, dtype=torch.int64, device=device)
    found: list[tuple[str, torch.Tensor]] = []
    for count in COUNTS:
        projected = made(1, count, sizes.channels + sizes.value_size).to(dtype)
        rates = made(1, count, 2 * heads).to(dtype)
        positions = torch.arange(8, 8 + count, device=device)[None]
        where = net.weights, held, base, positions, eps, backend
        out = net_step(projected, rates, *where)
        found += [("a step's output", out), ("a step's delta", tail.deltas[:, :, 8 : 8 + count])]
        found += [("a step's inputs", held.inputs[:, 8 : 8 + count])]
    q, k, v = net.heads(made(1, PROMPT, sizes.channels).to(dtype))
    g, beta = -made(1, PROMPT, heads).abs(), made(1, PROMPT, heads).sigmoid()
    out, state, kept = gated_delta_chunk(q, k, v, g, beta, held.state, KEPT, backend)
    return [
        *found,
        ("a prompt's output", out),
        ("a prompt's state", state),
        *((f"a prompt's {name}", part) for name, part in kept._asdict().items()),
    ]
