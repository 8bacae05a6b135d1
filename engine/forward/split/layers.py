"""The halves of a layer of a model in parts: each part has its own, in the form for its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.bank.base import Step
from engine.base.device import current
from engine.forward.layer import LayerForm, TorchLayer
from engine.model.llama import Llama, post_attention, pre_attention
from engine.model.parts.parted import joined_parts
from engine.model.recurrent import Mixed
from engine.plan.split.cut import found_in


class SplitLayers:
    """The forms `parts` of a model's parts. A step's loop runs over one part at a time, with its
    form; by a layer's number in the whole model the part is found.
    """

    def __init__(self, model: Llama, parts: Sequence[LayerForm]) -> None:
        self.parts = tuple(parts)
        self.model = joined_parts(model, [part.model for part in parts])
        self.most_rows = min(part.most_rows for part in parts)
        self.backend = parts[0].backend
        counts = [len(part.model.layers) for part in parts]
        self._starts = [sum(counts[:i]) for i in range(len(counts) + 1)]

    def _of(self, layer: int) -> tuple[LayerForm, int, int]:
        part, number = found_in(self._starts, layer)
        return self.parts[part], number, part

    def before(
        self,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        steps: Sequence[Step],
    ) -> list[torch.Tensor]:
        """As LayerForm."""
        form, own, part = self._of(number)
        return form.before(own, x, cos, sin, [step.parts[part] for step in steps])

    def recurrence(self, number: int, x: torch.Tensor) -> Mixed:
        """As LayerForm."""
        form, own, _ = self._of(number)
        return form.recurrence(own, x)

    def after(self, number: int, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """As LayerForm."""
        form, own, _ = self._of(number)
        return form.after(own, x, attended)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As LayerForm."""
        return self.parts[-1].logits(x)


def on_parts(model: Llama, form: Callable[[Llama], LayerForm]) -> LayerForm:
    """`form` of a model, or of each of its parts."""
    if not model.parts:
        return form(model)
    made = []
    for part in model.parts:
        with current(part.device):
            made.append(form(part))
    return SplitLayers(model, made)


def torch_layer(
    model: Llama,
    pieces: tuple[Callable, Callable] = (pre_attention, post_attention),
    backend: str = "auto",
) -> LayerForm:
    """TorchLayer of a model, or of each of its parts."""
    return on_parts(model, lambda part: TorchLayer(part, pieces, backend))
