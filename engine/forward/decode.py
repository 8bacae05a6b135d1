"""The decode step: one function from new tokens to logits, the same for eager, compiled and
graph-captured runs, on CPU and GPU.

A step writes rows at its positions and advances nothing: the session advances. It never waits for
the device, uses no index on the host, and allocates nothing whose size grows with the context
(kernels write into the session's scratch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.bank.base import Attends, Bank, Step
from engine.bank.query_ring import QueryRing
from engine.forward.ahead.queries import foresee, foreseeing
from engine.forward.layer import LayerForm, TorchLayer, begin, enter, refine
from engine.forward.recurrent.mixer import beside, recur_step
from engine.model.llama import Llama
from engine.model.rope import Rotary


class SequenceStep(NamedTuple):
    """One sequence's part of a step: its new tokens int64 [B, Q], its runtime, and its Step."""

    tokens: torch.Tensor
    runtime: Attends
    step: Step


def step_together(
    model: Llama, halves: LayerForm, sequences: Sequence[SequenceStep]
) -> torch.Tensor:
    """Run one step of independent sequences: float32 logits [B, Q, vocab], Q being the tokens of
    all sequences, in order.

    Each weight is read once for all of them. Rotation, rows, selection and attention are each
    sequence's own, in its own tensors, and cost the same as when it runs alone.
    """
    steps = [sequence.step for sequence in sequences]
    tokens = _joined([sequence.tokens for sequence in sequences])
    x, more = begin(halves, tokens)
    turns = [step.rotary.of_layers(step.positions) for step in steps]
    seers = foreseeing([sequence.runtime for sequence in sequences])
    angles: dict[int, list[torch.Tensor]] = {}  # of each rope
    for number, layer in model.turns():
        x, predicted = enter(halves, number, x)
        if seers:
            foresee(halves, number, x, seers, steps, turns)
        mixed = recur_step(halves, number, x, steps) if layer.mixer is not None else None
        if mixed is not None and layer.mixer_out is None:
            x = halves.after(number, x, mixed)
            continue
        rope = steps[0].rotary.rope_of(number)
        if rope not in angles:
            angles[rope] = [_joined(same) for same in zip(*(turn[number] for turn in turns))]
        cos, sin = angles[rope]
        queries = halves.before(number, x, cos, sin, steps)
        slides = model.config.windows and model.config.windows[number]
        found = []
        for (_, runtime, step), q in zip(sequences, queries):
            attend = runtime.attend_local if slides else runtime.attend
            found.append(attend(number, q, step))
        attended = _joined(found)
        if mixed is not None:
            attended = beside(model.config, attended, mixed)
        x = refine(halves, number, halves.after(number, x, attended), more, predicted)
    return halves.logits(x)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=1)


class Decoder:
    """Runs decode steps with one runtime. halves: the form of a layer's work beside attention;
    steps of more rows than it takes run on torch's operators.
    """

    def __init__(
        self,
        model: Llama,
        rotary: Rotary,
        runtime: Attends,
        query_ring: QueryRing,
        halves: LayerForm | None = None,
    ):
        self.model, self.rotary, self.runtime, self.query_ring = model, rotary, runtime, query_ring
        self._plain = TorchLayer(model)
        self.halves = halves or self._plain

    def step(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        bank: Bank,
        bucket: int | None = None,
    ) -> torch.Tensor:
        """tokens int64 [B, Q], lengths int32 [B] (tokens already in the bank) -> logits float32
        [B, Q, vocab].

        Writes the rows of the new tokens at lengths .. lengths + Q - 1. bucket: rows that the
        kernels may look at, at least every length + Q (default: the bank's capacity).
        """
        halves = self.halves if tokens.numel() <= self.halves.most_rows else self._plain
        return step_together(
            self.model, halves, [self.sequence_step(tokens, lengths, bank, bucket)]
        )

    def sequence_step(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        bank: Bank,
        bucket: int | None = None,
    ) -> SequenceStep:
        """Return this runtime's part of a step; arguments as of `step`."""
        count, ring = tokens.shape[1], self.query_ring
        positions = lengths.long().unsqueeze(1) + torch.arange(count, device=tokens.device)
        rows = bucket or bank.capacity
        step = Step(positions, lengths + count, bank, rows, ring, self.rotary, tokens)
        return SequenceStep(tokens, self.runtime, step)
