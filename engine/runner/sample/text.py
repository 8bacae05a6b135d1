"""A sample that a loaded model reads once, so that a method learns what its queries and keys are
like: SAMPLED tokens, drawn evenly from the vocabulary, by full attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Bank
from engine.bank.device import DeviceBank
from engine.forward.prefill import run_chunk
from engine.load.loaded import Loaded
from engine.methods.base import SAMPLED, Found, Runtime, Setup
from engine.methods.full import Full
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.rows.forms import unpack_keys


def sampled(loaded: Loaded, backend: str, name: str, found: Found) -> dict[int, Any]:
    """{layer: found(layer, q, k)} of every layer that sees everything; kept with the model. On the
    launchers of `backend`: what the reference learns, its last bits too, is the reference's own.
    """
    name = f"{name} on the reference" if backend == "reference" else name
    if name not in loaded.learnt:
        loaded.learnt[name] = _read(loaded, backend, found)
    return loaded.learnt[name]


@dataclass(frozen=True)
class _Watched(Full):
    """Full attention of every query, also in the last layer."""

    named = False

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        return replace(super().needs(plan, config, capacity, itemsize), every_query=True)


class _Watching(Runtime):
    """Shows `found` the queries and keys of a chunk."""

    def __init__(self, method: _Watched, setup: Setup, found: Found):
        super().__init__(method, setup)
        self.learnt: dict[int, Any] = {}
        self._found = found

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        if layer not in self.learnt:  # the last layer's newest query comes once more
            k = bank.newest_rows(layer, 0, q.shape[1])[0][0]
            self.learnt[layer] = self._found(layer, q[0], unpack_keys(k, q.dtype))
        return super().attend_prompt(layer, q, bank, start)


def _read(loaded: Loaded, backend: str, found: Found) -> dict[int, Any]:
    config, method = loaded.config, _Watched()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, SAMPLED), generator=generator)
    where, dtype, sinks = loaded.device, loaded.dtype, loaded.model.sinks
    setup = Setup.of(
        config, method, SAMPLED, device=where, dtype=dtype, backend=backend, sinks=sinks
    )
    bank = DeviceBank(config, setup.plan, SAMPLED, dtype, where)
    runtime = _Watching(method, setup, found)
    given = loaded.model, loaded.rotary, runtime, bank, tokens.to(where), 0, SAMPLED
    with torch.inference_mode():
        run_chunk(*given, backend=backend)
    return runtime.learnt
