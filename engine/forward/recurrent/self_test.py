"""Self-test of a recurrent layer's kernels: a step and a prompt's tokens against the reference."""

from __future__ import annotations

import torch

from engine.model.llama import Llama
from engine.model.recurrent import DeltaNet, Mixed, Mixer
from kernels.launch.tolerance import differs, differs_overall
from kernels.recurrent.conv import conv_chunk
from kernels.recurrent.delta import Tail
from kernels.recurrent.step import Held, net_step

COUNTS = (1, 3, 8)  # tokens of the tested steps
PROMPT, KEPT = 133, 5  # tokens of the tested prompt: two whole chunks, and a remainder


def mixers(model: Llama) -> list[Mixer]:
    """Return the recurrent layers' small weights of a model, layer by layer."""
    return [layer.mixer for layer in model.layers if layer.mixer is not None]


def recurrence_failure(net: Mixer, eps: float) -> str:
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


def launch_recurrence(net: Mixer, eps: float) -> None:
    """Launch what the self-test launches, and compare nothing."""
    _results(net, eps, "triton")


def _results(net: Mixer, eps: float, backend: str) -> list[tuple[str, torch.Tensor]]:
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
    for count in COUNTS if isinstance(net, DeltaNet) else ():
        assert isinstance(net, DeltaNet)
        projected = made(1, count, sizes.channels + sizes.value_size).to(dtype)
        rates = made(1, count, 2 * heads).to(dtype)
        positions = torch.arange(8, 8 + count, device=device)[None]
        where = net.weights, held, base, positions, eps, backend
        out = net_step(projected, rates, *where)
        found += [("a step's output", out), ("a step's delta", tail.deltas[:, :, 8 : 8 + count])]
        found += [("a step's inputs", held.inputs[:, 8 : 8 + count])]
    row = made(1, PROMPT, sizes.channels + sizes.value_size).to(dtype)
    qkv, z = row.split([sizes.channels, sizes.value_size], -1)
    before = held.inputs[:, : sizes.taps - 1]
    convolved = conv_chunk(qkv, before, net.conv, backend, net.conv_bias)
    g, beta = -made(1, PROMPT, heads).abs(), made(1, PROMPT, heads).sigmoid()
    mixed = Mixed(qkv, z.unflatten(-1, (heads, dv)), g, beta)
    out, state, kept = net.chunk(convolved, mixed, held.state, KEPT, backend)
    return [
        *found,
        ("a prompt's convolution", convolved),
        ("a prompt's output", out),
        ("a prompt's state", state),
        *((f"a prompt's {name}", part) for name, part in kept._asdict().items()),
    ]
