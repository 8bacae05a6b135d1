"""DuoAttention: K/V heads whose gate is high keep every token, the others the first and the newest.

Source: Xiao et al., DuoAttention (ICLR 2025), sections 2.2 to 2.4, and its published code. A gate
per K/V head is learned by distillation (tools/studies/duo_gates.py), or read from the table that
the authors publish (engine/methods/evict/duo_gates.py). Heads of the highest gates are retrieval
heads and see everything; a streaming head's query sees the first `sinks` tokens, the `recent` ones
before it and itself, in prompts too. Tokens keep their true positions. Defaults: the code's 64
sinks, 256 recent tokens, and half of the heads kept whole. Differs: in the code the queries of a
prompt's chunk see all of it in every head; here the window is exact, so that chunks change no
answer. Of equal gates those of earlier layers and heads are the higher, where the code draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import at_most_one, boolean, fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.by_head.kinds import HeadKinds, highest, no_budget
from engine.methods.evict.duo_gates import GATES, HOW, checked_gates, read_gates
from engine.methods.evict.shared.runtime import Chooser, EvictingRuntime
from engine.methods.evict.shared.store import Part, Rows, Sequence
from engine.methods.tables.head_table import Facts, checked_facts, require_model
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.launch.softmax import PLAIN
from kernels.rows.forms import floats, key_floats
from kernels.select.column_sums import tile_floats


@dataclass(frozen=True)
class Duo(HeadKinds):
    """gates: a table [layer][K/V head] of numbers from 0 to 1, or a file that holds one. share: of
    the model's K/V heads, those of the highest gates keep every token; or threshold: those with a
    gate of at least this do. sinks, recent: first and newest tokens that the other heads keep.
    made_for: numbers of the model that the file names. tokens: none.
    """

    named = True

    gates: tuple[Any, ...] | str | Path | None = None
    threshold: float | None = None
    sinks: int = 64
    recent: int = 256
    made_for: Facts = ()

    def __post_init__(self) -> None:
        if self.tokens is not None:
            instead = "share or threshold (the heads that keep everything), sinks and recent"
            raise no_budget("duo", self.tokens, instead)
        at_most_one(self, "share", "threshold")
        boolean("forget", self.forget)
        integer("sinks", self.sinks, 0)
        integer("recent", self.recent, 1)
        if self.threshold is not None:
            fraction("threshold", self.threshold, zero=True)
        else:
            share = 0.5 if self.share is None else fraction("share", self.share, zero=True)
            object.__setattr__(self, "share", share)
        facts, gates = self.made_for, self.gates
        if isinstance(gates, (str, Path)):
            gates, facts = read_gates(Path(gates))
        object.__setattr__(self, "made_for", checked_facts(facts))
        object.__setattr__(self, "gates", None if gates is None else checked_gates(gates))

    @property
    def own_prefill(self) -> bool:
        return True

    @cached_property
    def whole(self) -> tuple[tuple[bool, ...], ...]:
        """Whether each K/V head of each layer keeps every token; empty without gates."""
        assert not isinstance(self.gates, (str, Path))
        rows = self.gates or ()
        if self.threshold is not None:
            return tuple(tuple(gate >= self.threshold for gate in row) for row in rows)
        assert self.share is not None
        chosen = highest(rows, self.share)
        return tuple(tuple((i, j) in chosen for j in range(len(r))) for i, r in enumerate(rows))

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError for another model's gates."""
        if self.gates is not None:
            assert isinstance(self.gates, tuple)
            require_model(self.gates, self.made_for, config, GATES)
        return super().plan(config)

    def validate(self, plan: LayerPlan) -> None:
        """Raise SettingError without gates."""
        if self.gates is None:
            raise SettingError(f"gates: found none, expected a file or a table of them; {HOW}")

    def few(self, length: int) -> int:
        return self.sinks + self.recent

    def waiting(self, capacity: int) -> int:
        """None: what a chunk leaves goes into the store at once."""
        return 0

    def point_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """Those of streaming heads: of whole heads their number is enough."""
        few = min(capacity, self.few(capacity))
        return self.total_bytes(plan, config, itemsize, 0, few)

    def runtime(self, setup: Setup) -> Runtime:
        return DuoRuntime(self, setup)


class DuoRuntime(EvictingRuntime):
    """One session's stores: in each layer Rows for every run of K/V heads of one kind. Rows of
    retrieval heads never change, so that a savepoint has their number.
    """

    method: Duo
    counts_kept = True

    def runs(self, layer: int) -> list[slice]:
        """Neighbouring K/V heads of one kind."""
        found, at = [], 0
        for _, run in groupby(self.method.whole[layer]):
            size = len(list(run))
            found.append(slice(at, at + size))
            at += size
        return found

    def sees_all(self, layer: int, heads: slice) -> bool:
        """Whether the heads of a run are retrieval heads."""
        return self.method.whole[layer][heads.start]

    def live(
        self, layer: int, bank: Bank, stop: int, b: int = 0
    ) -> list[tuple[slice, torch.Tensor, torch.Tensor, int]]:
        """By runs, from the first token on. Whole heads whose store has room take the bank's rows
        behind their own, where they count once they are committed.
        """
        sequence = self.sequences[b]
        if sequence.layers is None:
            ((_, k, v, held),) = super().live(layer, bank, stop, b)
            return [(heads, k[heads], v[heads], held) for heads in self.runs(layer)]
        fresh, found = stop - sequence.since, []
        if not fresh:
            return super().live(layer, bank, stop, b)
        k, v = (t[b] for t in bank.rows(layer, sequence.since, stop))
        for rows in sequence.layers[layer]:
            at, stop_row = rows.held, rows.held + fresh
            if self.sees_all(layer, rows.heads) and rows.k.shape[1] >= stop_row:
                rows.k[:, at:stop_row], rows.v[:, at:stop_row] = k[rows.heads], v[rows.heads]
                both = rows.k[:, :stop_row], rows.v[:, :stop_row]
            else:
                old_k, old_v = rows.kv()
                both = torch.cat([old_k, k[rows.heads]], 1), torch.cat([old_v, v[rows.heads]], 1)
            found.append((rows.heads, *both, at))
        return found

    def _made(self, b: int, layer: int, step: Step | None, choose: Chooser | None) -> list[Rows]:
        """While a prompt is read whole heads have room for all of it, so that no chunk copies
        what was read before it.
        """
        sequence, made = self.sequences[b], []
        assert self.bank is not None
        goal = int(self.total) if self.reading and self.total < math.inf else sequence.length
        for number, (heads, k, v, held) in enumerate(
            self.live(layer, self.bank, sequence.length, b)
        ):
            positions = sequence.positions(layer, number, held, len(k), k.device)
            part = Part(heads, k, v, positions, None)
            if not self.sees_all(layer, heads):
                made.append(Rows.gather(part, self._ends(part)))
                continue
            old = None if sequence.layers is None else sequence.layers[layer][number]
            # in place a layer changes before the others, which a method that forgets allows for
            if old is not None and self.method.forget and old.count_written(part, goal):
                made.append(old)
            else:
                made.append(Rows.copied(part, goal))
        return made

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """A chunk attends to the store and to this prompt's tokens, each run as its kind does."""
        self.bank, out, sequence = bank, [], self.sequences[0]
        for number, (heads, k, v, held) in enumerate(self.live(layer, bank, start + q.shape[1])):
            part, first = self.queries(q, heads), held + start - sequence.since
            if self.sees_all(layer, heads):
                out.append(self.attend_rows(layer, part, k, v, first, start, PLAIN))
                continue
            if held:
                assert sequence.layers is not None
                order = sequence.layers[layer][number].positions[0, :held].long().argsort()
                k, v = (torch.cat([t[:, order], t[:, held:]], 1) for t in (k, v))
            out.append(self._attend_streaming(layer, part, k, v, first, start))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def _attend_streaming(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, start: int
    ) -> torch.Tensor:
        """`attend_rows` of streaming heads: plain attention for the queries that see everything,
        then block by block. Rows k, v [h, T, D] are in order of position, and those behind the
        sinks follow each other without a gap, so that a row's number tells how far away it is.
        """
        sinks, recent = self.method.sinks, self.method.recent
        count = min(q.shape[1], max(0, sinks + recent + 1 - first))
        out = []
        if count:
            seen = first + count
            out.append(
                self.attend_rows(layer, q[:, :count], k[:, :seen], v[:, :seen], first, start, PLAIN)
            )
        block = max(16, tile_floats(q.device) // (q.shape[2] * (sinks + recent + 64)))
        for at in range(count, q.shape[1], block):
            some = q[:, at : at + block]
            out.append(attend_lambda(some, k, v, first + at, sinks, recent, self.scale))
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def _ends(self, part: Part) -> torch.Tensor:
        """Index [h, n] of the sinks and the newest tokens, ascending by position."""
        order = torch.argsort(part.positions, dim=1)
        newest = max(self.method.sinks, order.shape[1] - self.method.recent)
        return torch.cat([order[:, : self.method.sinks], order[:, newest:]], 1)

    def forget_read(self, b: int, sequence: Sequence) -> None:
        """Of a chunk the next one sees no more in streaming heads."""
        sequence.allot(self.method.budgets(self.plan, sequence.length))
        self.fold(b, None, None)

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """Drop the oldest token of streaming heads that is no sink."""
        kept = self.method.sinks + self.method.recent
        if rows.held > kept and not self.sees_all(layer, rows.heads):
            rows.drop_least(self.setup.backend, keep_below=self.method.sinks)
        return rows

    def savepoint(self) -> Any:
        return self.state_of(self._kept_of)

    def _kept_of(self, layer: int, rows: Rows) -> Any:
        grown = self.method.forget and self.sees_all(layer, rows.heads)
        return rows.count() if grown else rows.state(self.method.forget)

    def rebuilt(self, layer: int, number: int, state: Any, most: int | None) -> Rows:
        if type(state[2]) is not int:
            return super().rebuilt(layer, number, state, most)
        layers = self.sequences[0].layers
        if layers is None:
            raise ValueError("layers")  # of a file: no session goes back to rows that it dropped
        return layers[layer][number].first(state)

    def restored(self, state: Any, length: int) -> Any:
        """Of both kinds no other rows than they keep."""
        state, most = super().restored(state, length), self.method.sinks + self.method.recent
        for layer, parts in enumerate(state[3] or ()):
            for part, heads in zip(parts, self.runs(layer), strict=True):
                held = length if self.sees_all(layer, heads) else min(length, most)
                whole = type(part[2]) is int
                if whole and not self.sees_all(layer, heads):
                    raise ValueError("heads")
                count = part[2] if whole else part[2].shape[1]
                if part[:2] != (heads.start, heads.stop) or count != held:
                    raise ValueError("heads")
        return state


def attend_lambda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    sinks: int,
    recent: int,
    scale: float,
) -> torch.Tensor:
    """Attention of queries q [1, C, H', D] at rows from `first` on of k, v [h, T, D]: query j sees
    the first `sinks` rows, the `recent` before row first + j, and that.
    """
    count, stop = q.shape[1], first + q.shape[1]
    far = min(sinks, stop)
    near = max(far, first - recent)
    rows = torch.arange(near - far, stop, device=q.device)
    rows[:far] = torch.arange(far, device=q.device)
    keys, values = (torch.cat([t[:, :far], t[:, near:stop]], 1) for t in (k, v))
    age = torch.arange(first, stop, device=q.device).unsqueeze(1) - rows
    unseen = (age < 0) | ((age > recent) & (rows >= sinks))
    folded = q[0].float().view(count, k.shape[0], -1, q.shape[3])
    logits = torch.einsum("chgd,htd->hgct", folded, key_floats(keys)) * scale
    weights = torch.softmax(logits.masked_fill(unseen, float("-inf")), -1)
    return torch.einsum("hgct,htd->chgd", weights, floats(values)).reshape(q.shape).to(q.dtype)
