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
from engine.base.device import crossed, current
from engine.forward.ahead.queries import foresee, foreseeing
from engine.forward.chain.layers import LayerChain
from engine.forward.layer import LayerForm, begin, enter, refine
from engine.forward.recurrent.mixer import beside, recur_step
from engine.forward.split.layers import torch_layer
from engine.model.llama import Llama
from engine.model.rope import Rotary


class SequenceStep(NamedTuple):
    """One sequence's part of a step: its new tokens int64 [B, Q], its runtime, and its Step."""

    tokens: torch.Tensor
    runtime: Attends
    step: Step

    def of_part(self, part: int) -> SequenceStep:
        """The same as one part of a model sees it."""
        return SequenceStep(self.tokens, self.runtime.by_part[part], self.step.parts[part])


def step_together(
    model: Llama,
    halves: LayerForm,
    sequences: Sequence[SequenceStep],
    chain: LayerChain | None = None,
) -> torch.Tensor:
    """Run one step of independent sequences: float32 logits [B, Q, vocab], Q being the tokens of
    all sequences, in order; on the model's (first) device.

    Each weight is read once for all of them. Rotation, rows, selection and attention are each
    sequence's own, in its own tensors, and cost the same as when it runs alone. chain: of the only
    sequence, where its layers run in fewer calls.
    """
    if not model.parts:
        return _through(model, halves, sequences, None, chain)
    x: torch.Tensor | None = None
    for part in range(len(model.parts)):
        for one in sequences:
            one.runtime.carry(part)
        x = part_of_step(model, halves, [one.of_part(part) for one in sequences], part, x)
    assert x is not None
    return crossed(x, model.device)


def part_of_step(
    model: Llama,
    halves: LayerForm,
    sequences: Sequence[SequenceStep],
    part: int,
    x: torch.Tensor | None,
) -> torch.Tensor:
    """Run one part of a model in parts, of `sequences` as it sees them: what the part before left,
    x [B, Q, width] as Llama.packed (None: this is the first), to what this one leaves, or to
    logits; on its device, where lists of earlier parts are (`carry`).
    """
    own = model.parts[part]
    with current(own.device):
        x = None if x is None else crossed(x, own.device)
        for one in sequences:
            one.runtime.received(one.step)
        return _through(own, halves.parts[part], sequences, x)


def _through(
    model: Llama,
    halves: LayerForm,
    sequences: Sequence[SequenceStep],
    x: torch.Tensor | None,
    chain: LayerChain | None = None,
) -> torch.Tensor:
    """Run a step through the layers of a model, or of a part: from the tokens where x is None, to
    logits where the head follows.
    """
    steps = [sequence.step for sequence in sequences]
    if x is None:
        x, more = begin(halves, _joined([sequence.tokens for sequence in sequences]))
    else:
        x, more = model.unpacked(x)
    turns = [step.rotary.of_layers(step.positions) for step in steps]
    chain = chain if chain is not None and chain.ready(steps[0]) else None
    seers = foreseeing([sequence.runtime for sequence in sequences]) if chain is None else {}
    angles: dict[int, list[torch.Tensor]] = {}  # of each rope
    done = 0  # layers that a chain has run
    for number, layer in model.turns():
        if number < done:
            continue
        if chain is not None and (end := chain.end(number)):
            x, done = chain(number, x, turns[0], steps[0]), end
            if chain.finishes and end == len(model.layers):
                return x  # logits
            continue
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
    return halves.logits(x) if model.config.ends[1] else model.packed(x, more)


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
        self._plain = torch_layer(model)
        self.halves = halves or self._plain
        self._chain = LayerChain(model, self.halves, runtime, query_ring)

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
        sequence = self.sequence_step(tokens, lengths, bank, bucket)
        return step_together(self.model, halves, [sequence], self._chain)

    def sequence_step(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        bank: Bank,
        bucket: int | None = None,
    ) -> SequenceStep:
        """Return this runtime's part of a step; arguments as of `step`."""
        count, ring = tokens.shape[1], self.query_ring
        positions = lengths.long().unsqueeze(1)
        if count > 1:
            positions = positions + torch.arange(count, device=tokens.device)
        rows = bucket or bank.capacity
        step = Step(positions, lengths + count, bank, rows, ring, self.rotary, tokens)
        if bank.parts:
            step.parts = parts_of(step)
        return SequenceStep(tokens, self.runtime, step)

    def part_step(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        bank: Bank,
        bucket: int,
        part: int,
        x: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run one part of `step`, as part_of_step. lengths int32 [B]: on the part's device."""
        own, count = bank.parts[part], tokens.shape[1]
        positions = lengths.long().unsqueeze(1) + torch.arange(count, device=lengths.device)
        beside = self.query_ring.parts[part], self.rotary.parts[part]
        step = Step(positions, lengths + count, own, min(bucket, own.capacity), *beside, tokens)
        sequence = SequenceStep(tokens, self.runtime.by_part[part], step)
        return part_of_step(self.model, self.halves, [sequence], part, x)


def parts_of(step: Step) -> tuple[Step, ...]:
    """A step as each part of a model sees it, on its device: positions and lengths cross."""
    found = []
    given = zip(step.bank.parts, step.query_ring.parts, step.rotary.parts, strict=True)
    for bank, ring, rotary in given:
        positions, visible = (crossed(t, bank.device) for t in (step.positions, step.visible))
        rows = min(step.bucket, bank.capacity)
        found.append(Step(positions, visible, bank, rows, ring, rotary, step.tokens))
    return tuple(found)
