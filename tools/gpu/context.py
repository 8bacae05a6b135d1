"""The device of a section of the GPU check, its model, and what it may take."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine import LLM, Full
from engine.methods.base import Method
from engine.model.config.config import ModelConfig
from kernels.launch.pdl import refuse
from tools.bench.floor import Rates, measure_rates
from tools.bench.shapes import shape_config, shape_filters
from tools.bench.suite import SMALL, sharp_stream

# the deepest context and the longest prompt of a rehearsal: beyond the budget, within seconds
REHEARSED, READ = 32768, 4096
BUDGET = 2048  # tokens that a sparse layer reads, also in a rehearsal


@dataclass
class Context:
    """The device of a section, whether shapes are small, the seconds it may take, and where it
    notes its facts so far. results: facts of sections that ran before. One context serves all
    sections of a process, which so keep one model.
    """

    device: str
    small: bool
    seconds: float
    note: Callable[[dict[str, Any]], None] = lambda facts: None
    rates: Rates | None = None
    results: dict[str, Any] = field(default_factory=dict)
    _llm: LLM | None = None

    @property
    def shape(self) -> str:
        """The model shape that is timed."""
        return "small" if self.small else "llama-3-8b"

    @property
    def dtype(self) -> str:
        """Its dtype."""
        return "bfloat16"

    @property
    def filters(self) -> tuple[int, ...]:
        """Its filter layers."""
        return shape_filters(self.shape)

    @property
    def llm(self) -> LLM:
        """The model, made once: the sections share its weights."""
        if self._llm is None:
            self._llm = self.made()
        return self._llm

    def made(self, **settings: Any) -> LLM:
        """A model of this shape of its own, out of random weights."""
        return self.made_of(shape_config(self.shape), self.shape, **settings)

    def made_of(self, config: ModelConfig, name: str, **settings: Any) -> LLM:
        """A model of another shape."""
        named = dict(device=self.device, dtype=self.dtype, step=self.step, offload="device")
        named = {**named, "max_context": SMALL, "method": Full(), **settings}
        return LLM.from_stream(config, sharp_stream, name=name, **named)

    def shared(self, method: Method, room: int, offload: str = "device", **more: Any) -> LLM:
        """An LLM over the weights of `llm`."""
        named = dict(method=method, max_context=room, offload=offload)
        return LLM.sharing(self.llm, **named, **more)

    @property
    def step(self) -> str:
        """The form of decode steps: "plain" where a process of its own found our kernels wrong,
        so that this one does not break over them. Where only dependent launch broke them, that is
        off in this process.
        """
        forms = (self.results.get("compile") or {}).get("forms", {})
        fused, in_turn = (forms.get(name, {}) for name in ("fused", "fused, launched in turn"))
        if not fused.get("fault"):
            return "auto"
        if in_turn.get("fault") == "":
            refuse(torch.device(self.device))
            return "auto"
        return "plain"

    def depth(self, n: int) -> int:
        """The context that is run here for one of n tokens: in a rehearsal a smaller one, beyond
        the budget.
        """
        return min(REHEARSED, max(READ, n // 32)) if self.small else n

    def within(self, sizes: tuple[int, ...], most: int = REHEARSED) -> tuple[int, ...]:
        """Those contexts or prompts that are run here: in a rehearsal none above `most`."""
        return tuple(n for n in sizes if not self.small or n <= most)

    def measured(self) -> Rates:
        """Rates of this device, measured once per process."""
        if self.rates is None:
            self.rates = measure_rates(
                self.device, 2**24 if self.small else None, seconds=0.1 if self.small else 1.0
            )
        return self.rates


def run_section(section: Callable[[Context], dict[str, Any]], ctx: Context) -> dict[str, Any]:
    """Facts of a section, with its seconds; an exception becomes {"error": text} beside the facts
    noted before it.
    """
    noted: dict[str, Any] = {}
    began, keep = time.perf_counter(), ctx.note

    def note(facts: dict[str, Any]) -> None:
        noted.update(facts)
        keep({**facts, "unfinished": True})

    ctx.note = note
    try:
        found = section(ctx)
    except Exception as error:
        said = " ".join(str(error).split())[:400]
        trace = traceback.format_exc().strip().splitlines()[-6:]
        found = {**noted, "error": f"{type(error).__name__}: {said}", "trace": trace}
    finally:
        ctx.note = keep
    return {**found, "seconds": round(time.perf_counter() - began, 1)}
