"""The decode step of a model in parts as CUDA graphs, one for each part."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from engine.base.device import crossed, current
from engine.forward.graphs import GraphedStep, bucket_for, captured


class _Part(NamedTuple):
    """A part's graph, what it writes, and what it reads of the part before; None: the token."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor
    x: torch.Tensor | None


class SplitGraphedStep(GraphedStep):
    """As GraphedStep: of each part one graph for each bucket. They are replayed in order; between
    two, in neither, the hidden vector and the length are copied to where the next one reads them.
    It has run on no machine with two GPUs.
    """

    _parts: dict[int, list[_Part]]
    _lengths: list[torch.Tensor]

    def __call__(self, n: int) -> torch.Tensor:
        if not self.captures:
            return super().__call__(n)
        if not hasattr(self, "_parts"):
            devices = [part.device for part in self._decoder.model.parts]
            self._parts = {}
            self._lengths = [self._length.to(device, copy=True) for device in devices]
        for length in self._lengths:
            length.copy_(self._length, non_blocking=True)
        bucket = bucket_for(n, self._bank.capacity)
        if bucket not in self._parts:
            self._parts[bucket] = self._captured_parts(bucket)
        out = self.token
        for graph, own, x in self._parts[bucket]:
            if x is not None:
                x.copy_(out, non_blocking=True)
            with current(own.device):
                graph.replay()
            out = own
        home = crossed(out, self.token.device)
        return home.clone() if home is out else home

    def _captured_parts(self, bucket: int) -> list[_Part]:
        found: list[_Part] = []
        for number, part in enumerate(self._decoder.model.parts):
            x = crossed(found[-1].out, part.device).clone() if found else None
            given = self.token, self._lengths[number], self._bank, bucket, number, x
            with current(part.device):
                graph, out = captured(part.device, partial(self._decoder.part_step, *given))
            found.append(_Part(graph, out, x))
        return found
