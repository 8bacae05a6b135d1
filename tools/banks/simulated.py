"""A session over a simulated bank: rows of floats that are rounded as a quantiser says, when it
says, and the bits that its format would take.

A prompt reads its own rows as they are, and those before it rounded. What has left the window is
rounded when the prompt is over, and from then on block by block as steps go on; nothing is rounded
again but by a coarser stage of the same quantiser.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

import engine.runner.state
from engine.bank.base import Bank
from engine.bank.device import DeviceBank
from engine.base.errors import SettingError
from engine.model.rope import apply_rope
from engine.session.session import Session
from tools.banks.base import FLOAT, Memo, Quantiser, Run

PROBES = 64  # newest queries that say which tokens matter


def simulated(session: Session, quantiser: Quantiser) -> Session:
    """A copy of a session over a bank on the device whose past `quantiser` rounds from now on.

    The copy cannot go back behind rows that are rounded, nor be copied itself. Raises SettingError
    where the model's layers are not alike, or the session's rows are not floats.
    """
    if session.loaded.config.local_layers or session.bank.tiered:
        raise SettingError("a simulated bank holds layers that see everything, on the device")
    if not session.bank.dtype.is_floating_point:
        raise SettingError("a simulated bank begins with rows of floats: use --bank auto")
    if quantiser.before_rope and len(session.loaded.rotary.ropes) > 1:
        raise SettingError("a quantiser of K before rope needs one rope for all layers")
    make = partial(SimulatedBank, quantiser)
    with mock.patch.object(engine.runner.state, "DeviceBank", make):
        copy = session.fork()
    assert isinstance(copy.bank, SimulatedBank)
    copy.bank.session = copy
    return copy


class SimulatedBank(DeviceBank):
    """A DeviceBank of floats that rounds its rows. `held_bytes` counts what they would take."""

    def __init__(self, quantiser: Quantiser, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.quantiser, self.session = quantiser, None  # type: ignore[var-annotated]
        layers = range(self.num_layers)
        # per layer: the end of what every stage has rounded, bits per token, the quantiser's memo
        self._ends = [[0] * len(quantiser.ages) for _ in layers]
        float_bits = 2 * FLOAT * self.kv_heads * self.widths[0]
        self._bits = torch.full(
            (self.num_layers, self.capacity), float_bits, dtype=torch.float64, device="cpu"
        )
        self._memos: list[Memo] = [{} for _ in layers]
        self._begun = [True] * self.num_layers  # whether a layer has rows of the prompt under way

    def held_bytes(self, length: int) -> int:
        """Bytes that `length` tokens of all layers would take in the quantiser's format."""
        return int(-(-self._bits[:, :length].sum().item() // 8))

    # ---------------------------------------------------------------- when rows are rounded

    @contextlib.contextmanager
    def preparing(self, n: int) -> Iterator[None]:
        self._begun = [False] * self.num_layers
        yield

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        if not self._begun[layer]:  # the prompt's first chunk: the past ends where it begins
            self._begun[layer] = True
            self._settle(layer, start)
        super().write_chunk(layer, k, v, start, backend)

    def before_step(self, n: int) -> None:
        for layer in range(self.num_layers):
            self._settle(layer, n - 1)

    def settle(self, length: int) -> None:
        """Round what is due in a bank of `length` tokens now rather than when it is read next."""
        with torch.inference_mode():
            self.before_step(length + 1)

    def rewind(self, n: int, broken: bool = False) -> None:
        if n < max(ends[0] for ends in self._ends):
            raise SettingError(
                f"a simulated bank cannot go back to {n} tokens: rows beyond are rounded; "
                "copy the session before"
            )
        super().rewind(n, broken)

    def copy_from(self, other: Bank, length: int) -> None:
        if isinstance(other, SimulatedBank):
            raise SettingError("a session over a simulated bank cannot be copied")
        super().copy_from(other, length)

    def _settle(self, layer: int, length: int) -> None:
        """Round the rows of a layer that are due in a bank of `length` tokens."""
        ends, block, coarser = self._ends[layer], self.quantiser.block, 0
        for stage in reversed(range(len(ends))):
            due = max(0, length - self.quantiser.ages[stage]) // block * block
            first = max(ends[stage], coarser)
            if due > first:
                self._round(layer, first, due, stage, length)
            ends[stage] = coarser = max(due, first)

    def _round(self, layer: int, first: int, stop: int, stage: int, length: int) -> None:
        k, v = (rows[0, :, first:stop] for rows in self.kv(layer))
        attention, queries = self._probed(layer, first, stop, length)
        keys = self._turned(layer, k.float(), first, -1)
        run = Run(keys, v.float(), first, attention, queries)
        found = self.quantiser.rounded(run, self._memos[layer], stage)
        k.copy_(self._turned(layer, found.k, first, 1))
        v.copy_(found.v)
        self._bits[layer, first:stop] = found.bits / (stop - first)

    # ---------------------------------------------------------------- what quantisers ask for

    def _turned(self, layer: int, k: torch.Tensor, first: int, way: int) -> torch.Tensor:
        """Keys [H, T, D] at positions from `first` on, turned by rope (way 1) or back (-1) for a
        quantiser that works before it.
        """
        if not self.quantiser.before_rope:
            return k
        positions = torch.arange(first, first + k.shape[1], device=k.device)
        rotary = self.session.loaded.rotary
        return rotary.rotate_by(k.transpose(0, 1), way * positions).transpose(0, 1)

    def _probed(
        self, layer: int, first: int, stop: int, length: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run.attention and Run.queries by the newest queries of a bank of `length` tokens; all
        tokens alike where none are known.
        """
        if not self.quantiser.probes:
            return None, None
        ring, heads = self.session.query_ring, self.kv_heads
        start, end = max(ring.low, ring.high - PROBES), min(ring.high, length)
        if start >= end:
            ones = torch.ones(heads, self.widths[0], device=self.device)
            return torch.ones(stop - first, device=self.device), ones
        positions = torch.arange(start, end, device=self.device)
        turns = self.session.loaded.rotary.at(positions, layer=layer)
        q = apply_rope(ring.read(layer, positions.unsqueeze(0))[0].float(), *turns)
        return probed(q, self.kv(layer, length)[0][0].float(), positions, first, stop)


def probed(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, first: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean weight [T] of tokens first .. stop-1 over the queries that see them and their heads,
    largest magnitude [Hkv, D] of the queries).

    q [W, H, D] at `positions` [W] and k [Hkv, N, D], both rotated.
    """
    heads, count, width = k.shape
    grouped = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, W, D]
    seen = torch.arange(count, device=k.device) <= positions.unsqueeze(-1)  # [W, N]
    logits = (grouped @ k.unsqueeze(1).transpose(2, 3)) * width**-0.5
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).mean((0, 1)).sum(0)
    mean = weights / seen.sum(0).clamp_min(1)
    return mean[first:stop], grouped.abs().amax((1, 2))
