"""A recurrent layer beside its MLP: a step's tokens, or a prompt's chunk, through the state that
the bank holds of it.

The products before and after run on the tokens of all sequences together; the convolution and the
delta rule on each sequence's own, in its own state (engine/bank/recurrent/state.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.bank.base import Step
from engine.bank.recurrent.state import RecurrentState
from engine.forward.layer import LayerForm, split_rows
from engine.model.config.config import ModelConfig
from engine.model.llama import Layer, Llama, pre_recurrence, rms_norm
from engine.model.recurrent import DeltaNet, Mixed
from kernels.launch.dispatch import choose_for


def recur_step(
    form: LayerForm, number: int, x: torch.Tensor, steps: Sequence[Step]
) -> torch.Tensor:
    """Return what layer `number` adds in place of attention, before its output projection: x
    [B, Q, hidden] -> [B, Q, Hv, dv]. The rows of each of `steps` go to its own bank.
    """
    model = form.model
    layer, eps = model.layers[number], model.config.rms_norm_eps
    assert layer.mixer is not None
    if isinstance(layer.mixer, DeltaNet) and _on_triton(layer.mixer, form.backend):
        return _whole_step(layer, layer.mixer, number, x, steps, eps, form.backend)
    mixed = form.recurrence(number, x)
    out = []
    for step, parts in zip(steps, split_rows(steps, *mixed)):
        state = step.bank.recurrent
        assert state is not None, "a bank without the state of recurrent layers"
        given = number, layer.mixer, Mixed(*parts), step.positions
        out.append(state.step(*given, form.backend))
    joined = out[0] if len(out) == 1 else torch.cat(out, dim=1)
    return layer.mixer.gated(joined, mixed.z, eps, form.backend)


def _on_triton(net: DeltaNet, backend: str) -> bool:
    return choose_for(net.backend(backend), net.conv.device) == "triton"


def _whole_step(
    layer: Layer,
    net: DeltaNet,
    number: int,
    x: torch.Tensor,
    steps: Sequence[Step],
    eps: float,
    backend: str,
) -> torch.Tensor:
    """`recur_step` of a gated delta net on our own kernels: between its products each sequence has
    one launch.
    """
    assert layer.input_norm is not None
    x = rms_norm(x, layer.input_norm, eps, layer.block)
    products = layer.qkv(x), F.linear(x, net.rates)
    out = []
    for step, (projected, rates) in zip(steps, split_rows(steps, *products)):
        state = step.bank.recurrent
        assert state is not None, "a bank without the state of recurrent layers"
        given = number, net, projected, rates, step.positions, eps
        out.append(state.whole_step(*given, backend))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def beside(config: ModelConfig, attended: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """Join what a layer's attention and the mixer beside it bring, each times its factor, for
    `post_attention`: attended [B, S, H, D], mixed [B, S, ...] -> [B, S, H * D + Hv * dv].
    """
    ssd = config.beside
    assert ssd is not None
    return torch.cat((attended.flatten(2) * ssd.attended, mixed.flatten(2) * ssd.added), -1)


def recur_chunk(
    model: Llama,
    number: int,
    x: torch.Tensor,
    state: RecurrentState | None,
    start: int,
    keep: bool,
    backend: str,
) -> torch.Tensor:
    """As `recur_step`, of a prompt's chunk x [B, C, hidden] from position `start` on. keep: a
    commit of `state` takes what the chunk changes.
    """
    layer, eps = model.layers[number], model.config.rms_norm_eps
    assert layer.mixer is not None and state is not None
    mixed = pre_recurrence(layer, x, eps)
    out = state.chunk(number, layer.mixer, mixed, start, keep, backend)
    return layer.mixer.gated(out, mixed.z, eps, backend)
