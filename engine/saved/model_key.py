"""What decides the rows of a bank: those of other weights, rotation, precision or layout mean
nothing here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from engine.saved.container import raw

if TYPE_CHECKING:
    from engine.llm import LLM

# by kind of bank; one changes when its rows or pieces are laid out otherwise
BANK_FORMATS = {"model": "kv-1", "int8": "kv-2, int8", "int4": "kv-2, int4", "fp8": "kv-2, fp8"}
SAMPLES = 4096  # elements of a weight that are hashed, evenly spread


class WeightsDigest:
    """The sha256 of a stream of weights, as they are loaded: names, shapes, and SAMPLES elements of
    each, so that it costs no second reading.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def watch(self, stream: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass a stream of (name, weight) through."""
        for name, weight in stream:
            for label, tensor in _tensors(weight):
                self._sha.update(f"\n{name}{label} {tuple(tensor.shape)} {tensor.dtype} ".encode())
                self._sha.update(_sample(tensor))
            yield name, weight

    @property
    def hexdigest(self) -> str:
        """Of what has passed."""
        return self._sha.hexdigest()


def _tensors(weight: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a weight: itself, those of its fields (a quantised one), of its parts."""
    if isinstance(weight, torch.Tensor):
        yield "", weight
        return
    parts = vars(weight) if hasattr(weight, "__dict__") else dict(enumerate(weight))
    for name, value in sorted(parts.items(), key=lambda item: str(item[0])):
        if isinstance(value, (torch.Tensor, tuple)):
            for label, tensor in _tensors(value):
                yield f".{name}{label}", tensor


def _sample(tensor: torch.Tensor) -> bytes:
    step = max(1, tensor.numel() // SAMPLES)
    # an odd step walks over all columns of a matrix whose width is a power of two
    some = tensor.detach().reshape(-1)[:: step | 1].cpu().contiguous()
    return raw(some).tobytes()


def model_key(llm: LLM) -> dict[str, str]:
    """{what: value} of everything that a bank's rows depend on beside the tokens and the method."""
    config = llm.config
    sizes = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    # what ends an answer changes no row
    kept = dataclasses.replace(config, bos_token_id=None, eos_token_ids=())
    return {
        "bank format": BANK_FORMATS[config.bank],
        "sizes": f"{'x'.join(map(str, sizes))}, vocabulary {config.vocab_size}",
        "rope": repr(config.rope),
        "config": hashlib.sha256(repr(kept).encode()).hexdigest(),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "weights": llm.weights_digest,
        "held": llm.options.weights,
    }
