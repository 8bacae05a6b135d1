"""The queries of a layer, made a layer before: of what that one takes, which changes little from
layer to layer. A method that chooses by them can bring rows while the layer before computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.bank.base import Attends, Foresees, Step
from engine.forward.layer import LayerForm, one_by_one, split_rows
from engine.forward.native_layer import NativeLayer
from engine.model.llama import pre_attention

Turns = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]  # (cos, sin) [sequence][layer]


def foreseeing(runtimes: Sequence[Attends]) -> dict[int, Foresees]:
    """{sequence: its runtime} of those that choose one layer ahead."""
    seers = ((i, runtime) for i, runtime in enumerate(runtimes) if isinstance(runtime, Foresees))
    return {i: runtime for i, runtime in seers if runtime.ahead}


def foresee(
    form: LayerForm,
    number: int,
    x: torch.Tensor,
    seers: dict[int, Foresees],
    steps: Sequence[Step],
    turns: Turns,
) -> None:
    """Tell those who choose in layer number + 1 its queries of x [B, Q, hidden], which layer
    `number` takes: in one product for all of them.
    """
    after = number + 1
    wanted = [i for i, runtime in seers.items() if after in runtime.ahead]
    if not wanted:
        return
    form.model.arrive(after)
    parts = [rows for (rows,) in split_rows(steps, x)]
    rows = torch.cat([parts[i] for i in wanted], dim=1)
    cos, sin = (torch.cat(same, dim=1) for same in zip(*(turns[i][after] for i in wanted)))
    queries = queries_ahead(form, number, rows, cos, sin)
    own = [steps[i] for i in wanted]
    for i, (q,) in zip(wanted, split_rows(own, queries)):
        seers[i].foresee(after, q, steps[i])


def queries_ahead(
    form: LayerForm, number: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotated queries [B, Q, H, D] of layer number + 1, made of x [B, Q, hidden] as layer `number`
    norms it. cos, sin float32 [B, Q, R/2]: of layer number + 1. A product of their own: K and V
    are made too, and dropped.
    """
    if isinstance(form, NativeLayer):
        return form.ahead(number, x, cos, sin)
    model, after = form.model, number + 1
    layer, before = model.layers[after], model.layers[number].input_norm
    # a layer without attention may norm elsewhere
    layer = layer if before is None else replace(layer, input_norm=before)
    half = one_by_one(pre_attention) if form.backend == "reference" else pre_attention
    found: tuple[torch.Tensor, ...] = half(layer, x, cos, sin, *model.config.sizes_of(after))
    return found[0]
