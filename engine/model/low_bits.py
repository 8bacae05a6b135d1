"""Weights in few bits: which tensors of a model are held how, made while they stream, and counted
before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.errors import SettingError
from engine.model.llama import targets
from kernels.linear_quantised import choose_quantised_form, held_bytes, speed_note
from kernels.quantise import to_int4, to_int8
from kernels.quantised import Quantised

if TYPE_CHECKING:
    from engine.model.config import ModelConfig

GROUP = 32  # columns under one scale of int4; 64 cost 20 times the divergence (docs/LOG.md)


@dataclass(frozen=True)
class Held:
    """How one matrix is held: its kind, columns under one scale, whether groups have an offset."""

    kind: str
    group: int
    offsets: bool


@dataclass(frozen=True)
class OnTheWay:
    """Float weights that are rounded as they arrive.

    kind: "auto" (as they are), "int8" (one scale per row) or "int4" (groups of `group` columns;
    lm_head int8 as ever). Embeddings, norms and biases stay as they are.
    """

    kind: str
    group: int

    @classmethod
    def of(cls, word: str, config: ModelConfig) -> OnTheWay:
        """What `weights=word` means for a model.

        Raises SettingError where GROUP does not divide the rows.
        """
        widths = {config.hidden_size, config.intermediate_size, config.q_size}
        width = next((width for width in sorted(widths) if width % GROUP), None)
        if word == "int4" and width is not None:
            raise SettingError(
                f"weights: found 'int4', but rows of {width} are no multiple of its groups of "
                f"{GROUP}; use weights='int8'"
            )
        return cls(word, GROUP if word == "int4" else 0)

    def held(self, name: str, columns: int) -> Held | None:
        """How the matrix of a target is held; None: as it is stored."""
        part = name.split(".")[-1]
        if self.kind == "auto" or part not in ("qkv", "o", "gate_up", "down", "lm_head"):
            return None
        if self.kind == "int4" and part != "lm_head":
            return Held("int4", self.group, True)
        return Held("int8", columns, False)

    def stream(
        self, weights: Iterable[tuple[str, torch.Tensor]], tied: bool
    ) -> Iterator[tuple[str, torch.Tensor | Quantised]]:
        """Round each matrix of (target name, tensor) pairs as it comes. A tied embedding comes
        twice: as it is, and rounded as lm_head.
        """
        for name, tensor in weights:
            if name == "embed":
                yield name, tensor
                if tied and self.kind != "auto":
                    yield "lm_head", to_int8(tensor)
                continue
            held = self.held(name, tensor.shape[-1]) if tensor.dim() == 2 else None
            if held is None:
                yield name, tensor
            else:
                yield name, to_int4(tensor, held.group) if held.kind == "int4" else to_int8(tensor)
            del tensor

    def bytes(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: str
    ) -> tuple[int, str] | None:
        """Count the weights' bytes as they will be held, and say how; None for "auto".

        backend: with one that is forced everything is dequantised in blocks.
        """
        if self.kind == "auto":
            return None
        shapes = {
            target.name: (sum(shape[0] for _, shape in target.parts), *target.parts[0][1][1:])
            for target in targets(config)
        }
        if config.tied_embeddings:
            shapes["lm_head"] = shapes["embed"]
        total, forms = 0, {}
        for name, shape in shapes.items():
            held = self.held(name, shape[-1]) if len(shape) == 2 else None
            if held is None:
                total += shape[0] * (shape[1] if len(shape) == 2 else 1) * dtype.itemsize
                continue
            pair = (shape[0], shape[1])
            form = "blocks"
            if backend in ("auto", "cpu"):
                form = choose_quantised_form(held.kind, pair, held.group, dtype, device)
            total += held_bytes(held.kind, pair, held.group, held.offsets, form)
            if not name.endswith("lm_head"):
                forms[held.kind] = form
        bits = f"int4, groups of {self.group}, " if self.kind == "int4" else "int8, "
        return (
            total,
            f"{config.parameters / 1e9:.2f} B parameters, {bits}{_how(forms, dtype, device)}",
        )


def _how(forms: dict[str, str], dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cpu":
        return "dequantised in blocks"
    return "; ".join(speed_note(kind, dtype, form) for kind, form in forms.items())
