"""What window, StreamingLLM and LM-Infinite share: the first `sink` tokens and the newest ones are
kept, chosen by position alone.

The three differ in how far away the sinks seem. A query sees the newest w tokens at their true
distance; a sink that is further than the method allows is seen at a clipped distance, by turning
query and K (engine.model.rope.Rotary.rotate_by) from where they were rotated to. Prompts are read
in the same way, so a token's K and V are those of a model that never saw more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Rows, Sequence
from engine.methods.evict.shared.windows import seeing_alone, spread
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.attention.native import attend, attends
from kernels.kept.step import Turned, kept_step
from kernels.launch.dispatch import choose
from kernels.launch.softmax import Softmax
from kernels.prefill.dense import prefill_dense
from kernels.prefill.window import BLOCK, prefill_window_lse
from kernels.rows.forms import floats, key_floats
from kernels.select.column_sums import tile_floats


@dataclass(frozen=True)
class Windowed(Evicting):
    """Budget tokens | share: sinks and window together, window = budget - sinks."""

    named = False

    @property
    def own_prefill(self) -> bool:
        return True

    @property
    def clips(self) -> bool:
        """Whether sink distances are clipped, which dynamic rope does not allow."""
        return True

    def sinks(self, budget: int, length: int) -> int:
        """How many of a budget's tokens are sinks, where the latest prefill ended at `length`."""
        return 0

    def clip_from(self, sinks: int, window: int) -> int:
        """First position at which distances must be clipped; below it plain attention is exact."""
        raise NotImplementedError

    def sink_logits(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        at: torch.Tensor,
        sinks: int,
        window: int,
        rotary: Rotary,
    ) -> torch.Tensor:
        """Unscaled logits float32 [h, G, C, s] of queries q [C, h, G, D] at positions `at` [C] on
        the K [h, s, D] of the sinks; by default there are none.
        """
        return q.new_zeros(k.shape[0], q.shape[2], len(at), 0)

    def sink_turns(self, at: int, sinks: int, window: int) -> torch.Tensor | None:
        """Positions int64 [1, or one of each sink] by which the query at `at` is turned where it
        meets a sink's K as it lies: what `sink_logits` does in one step; None: it does otherwise.
        """
        return None

    def streamed(self, config: ModelConfig) -> Method:
        """A number of tokens, prompts read within them, and nothing else kept."""
        if not self.own_prefill:
            return super().streamed(config)
        if self.tokens is None:
            raise self.no_stream(f"has share={self.share}, a budget that grows with the text")
        if config.local_layers:
            raise self.no_stream("has no stream over sliding-window layers")
        if config.rope.kind == "dynamic":
            raise self.no_stream("meets dynamic rope here, which changes with the text's length")
        return replace(self, forget=True)

    def forgotten(self, length: int) -> str:
        if self.tokens is None or length <= self.tokens:
            return ""
        sinks = self.sinks(self.tokens, length)
        first = f"{sinks} sinks and " if sinks else ""
        return (
            f"from here on the oldest tokens beyond {first}the newest {self.tokens - sinks:,} are "
            "forgotten"
        )

    def plan(self, config: ModelConfig) -> LayerPlan:
        seeing = seeing_alone(config)
        if self.clips and (seeing or config).rope.kind == "dynamic":
            raise SettingError(
                f"{self.name}: clips distances, which this model's dynamic rope does not allow; "
                "use another method"
            )
        if self.clips and seeing is None:
            raise SettingError(
                f"{self.name}: clips distances, found layers with different ropes "
                f"({config.family}); use another method"
            )
        return super().plan(config)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        needs = super().needs(plan, config, capacity, itemsize)
        # a budget by share is computed before the prompt is read
        return replace(needs, final_call=0 if self.own_prefill and self.tokens else None)

    def waiting(self, capacity: int) -> int:
        """None: what a chunk leaves goes into the store at once."""
        return 0 if self.own_prefill else capacity

    def max_rows(self, budget: int) -> int | None:
        return budget + 1

    def bounds_distances(self, plan: LayerPlan, positions: int, length: int) -> bool:
        """Prompts too are read within sinks and window, unless full attention reads them."""
        return self.own_prefill and self.budget(plan, length) <= positions

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        """The oldest of the window goes when a new one comes; the store is made once."""
        base = min(length, budget)
        return base, min(base + generated, budget)

    def runtime(self, setup: Setup) -> Runtime:
        return WindowedRuntime(self, setup)


def slot_logits(
    q: torch.Tensor, k: torch.Tensor, at: torch.Tensor, slots: int, rotary: Rotary
) -> torch.Tensor:
    """Windowed.sink_logits of queries that meet K as if they stood in the last of `slots` slots,
    which are positions from 0 on.
    """
    turned = rotary.rotate_by(q.flatten(1, 2), slots - 1 - at).view(q.shape)
    return torch.einsum("chgd,hsd->hgcs", turned, k)


class WindowedRuntime(EvictingRuntime):
    """Attention to sinks and window, query block by query block."""

    method: Windowed

    def __init__(self, method: Windowed, setup: Setup):
        super().__init__(method, setup)
        # a method that clips needs all layers that evict to have one rope
        self.rotary = Rotary(seeing_alone(setup.config) or setup.config, setup.device)
        self._met: tuple[Any, Turned | None] = None, None  # of the step under way

    def sizes(self, length: float) -> tuple[int, int]:
        """(sinks, window) after a prompt of `length` tokens; infinite while it goes on, which a
        number of tokens does not ask.
        """
        tokens = 0 if math.isinf(length) else int(length)
        budget = self.method.budget(self.plan, tokens)
        sinks = self.method.sinks(budget, tokens)
        return sinks, budget - sinks

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
        start: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Plain attention for queries that see true distances only; for the rest window attention
        with the sinks merged into it, or blocks of queries.
        """
        sinks, window = self.sizes(self.total)
        count = min(q.shape[1], max(0, self.method.clip_from(sinks, window) - start))
        if count == q.shape[1]:
            return super().attend_rows(layer, q, k, v, first, start, softmax)
        # rows of the store, before those of this prompt
        kept = first - (start - self.sequences[0].since)
        positions = torch.arange(self.sequences[0].since, start + q.shape[1], device=q.device)
        # in order of position, which blocks of rows rely on
        if kept:
            stored = self.sequences[0].layers
            assert stored is not None
            held = stored[layer][0].positions[0, :kept].long()
            old, order = torch.sort(held)
            positions = torch.cat([old, positions])
            if not torch.equal(old, held):
                k, v = (torch.cat([t[:, order], t[:, kept:]], 1) for t in (k, v))
        out = (
            [
                prefill_dense(
                    q[:, :count],
                    k[None, :, : first + count],
                    v[None, :, : first + count],
                    first,
                    self.scale,
                    backend=self.setup.backend,
                    softmax=softmax,
                )
            ]
            if count
            else []
        )
        stop = first + q.shape[1]
        # each of these queries has its own row behind the sinks
        if first + count >= sinks and self._in_a_run(q, positions[sinks:stop]):
            rest = q[:, count:], k[:, :stop], v[:, :stop], positions, start + count
            out.append(self._attend_run(*rest, sinks, window, softmax))
            return torch.cat(out, 1)
        block = max(16, tile_floats(q.device) // (q.shape[2] * (window + sinks + 64)))
        for at in range(count, q.shape[1], block):
            part = q[:, at : at + block]
            low = int(torch.searchsorted(positions, start + at - window, right=True))
            rows = slice(max(low, sinks), first + at + part.shape[1])
            given = rows, start + at, sinks, window, softmax
            out.append(self.attend_window(part, k, v, positions, *given))
        return torch.cat(out, 1)

    def _in_a_run(self, q: torch.Tensor, positions: torch.Tensor) -> bool:
        """Whether rows at these positions follow each other without a gap, so that the newest rows
        are a window, and a prompt's kernels read them here.
        """
        if q.device.type != "cpu" or choose(self.setup.backend, q) == "reference":
            return False
        return int(positions[-1] - positions[0]) == len(positions) - 1

    def _attend_run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        start: int,
        sinks: int,
        window: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """`attend_window` of all queries q [1, C, H', D] at positions from `start` on, whose own
        rows of k, v [h, T, D] are the last and those behind the sinks a run.
        """
        out, older = torch.empty_like(q), k.shape[1] - q.shape[1]
        for first in range(0, q.shape[1], BLOCK):
            some = q[:, first : first + BLOCK]
            stop = older + first + some.shape[1]
            keys, values = k[None, :, sinks:stop], v[None, :, sinks:stop]
            given = window, self.scale, self.setup.backend, replace(softmax, sinks=None)
            near, lse = prefill_window_lse(some, keys, values, older + first - sinks, *given)
            at = torch.arange(start + first, start + first + some.shape[1], device=q.device)
            sunk = k[:, :sinks], v[:, :sinks], at, sinks, window, softmax
            out[:, first : first + BLOCK] = self._with_sinks(some, near[0], lse[0], *sunk)
        return out

    def _with_sinks(
        self,
        q: torch.Tensor,
        near: torch.Tensor,
        lse: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        at: torch.Tensor,
        sinks: int,
        window: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Attention [1, C, H', D] of queries q [1, C, H', D] at positions `at` [C] to their window,
        near [C, H', D] and lse [C, H'], and to the sinks k, v [h, sinks, D]. softmax: the model's
        own cap and sinks, which join at the end, once.
        """
        if not sinks:
            return softmax.sunk(near, lse)[0][None].to(q.dtype)
        folded = q[0].float().view(len(at), len(k), -1, q.shape[3])
        far = self.method.sink_logits(folded, key_floats(k), at, sinks, window, self.rotary)
        far = softmax.capped(far * self.scale)
        apart = far.logsumexp(-1).permute(2, 0, 1).reshape(lse.shape)
        some = (far.softmax(-1) @ floats(v).unsqueeze(1)).permute(2, 0, 1, 3).reshape(near.shape)
        both = torch.lerp(near.float(), some, torch.sigmoid(apart - lse).unsqueeze(-1))
        return softmax.sunk(both, torch.logaddexp(apart, lse))[0][None].to(q.dtype)

    def attend_step(
        self,
        sequence: Sequence,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor | None,
        at: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Plain attention while the query sees true distances only."""
        if positions is None:
            return super().attend_step(sequence, layer, q, k, v, positions, at, softmax)
        sinks = self.method.sinks(sequence.budgets[layer], sequence.prompt)
        window = sequence.budgets[layer] - sinks
        if at < self.method.clip_from(sinks, window):
            return super().attend_step(sequence, layer, q, k, v, positions, at, softmax)
        if choose(self.setup.backend, q, lambda: attends(k, v, q.shape[3])) == "native":
            return self._attend_natively(q, k, v, positions[0], at, sinks, window, softmax)
        given = slice(sinks, k.shape[1]), at, sinks, window, softmax
        return self.attend_window(q, k, v, positions[0].long(), *given)

    def attend_in_one_call(
        self,
        sequence: Sequence,
        layer: int,
        rows: Rows,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        at: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """The angles are those of all layers of one budget."""
        sinks = self.method.sinks(sequence.budgets[layer], sequence.prompt)
        window = sequence.budgets[layer] - sinks
        met = at, sinks, window
        if self._met[0] != met:
            self._met = met, self._meets(*met)
        given = at, self.scale, softmax, "", self._met[1]
        return kept_step(q, k, v, rows.store(), *given)[0]

    def _meets(self, at: int, sinks: int, window: int) -> Turned | None:
        """What the query at `at` meets otherwise than plain attention does."""
        if at < self.method.clip_from(sinks, window):
            return None
        by = self.method.sink_turns(at, sinks, window) if sinks else None
        angles = (None, None) if by is None else self.rotary.turns_by(by)
        return Turned(sinks, at - window + 1, *angles)

    def in_one_call(self) -> bool:
        says = type(self.method).sink_turns is not Windowed.sink_turns
        return says and super().in_one_call()

    def _attend_natively(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        at: int,
        sinks: int,
        window: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """`attend_window` of one query: the window's rows by the C++ kernel where they lie, merged
        with the few sinks by log-sum-exp.
        """
        rows = (positions[sinks:] > at - window).nonzero().int().add_(sinks)
        count, stop = len(rows), k.shape[1]
        capped = replace(softmax, sinks=None)  # the model's own sinks join at the end, once
        given = rows.view(1, -1), count, stop
        near, lse = attend(q[0], k, v, self.scale, *given, softmax=capped)
        sunk = k[:, :sinks], v[:, :sinks], torch.tensor([at]), sinks, window, softmax
        return self._with_sinks(q, near, lse, *sunk)

    def attend_window(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rows: slice,
        start: int,
        sinks: int,
        window: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Softmax over the first rows, the sinks, and `rows`: q [1, C, H', D] at positions from
        `start`; positions [T] of k, v. softmax: the model's own cap and sinks.
        """
        heads, count, dim = k.shape[0], q.shape[1], q.shape[3]
        folded = q[0].float().view(count, heads, -1, dim)
        at = torch.arange(start, start + count, device=q.device)
        near = torch.einsum("chgd,htd->hgct", folded, key_floats(k[:, rows]))
        near = softmax.capped(near.mul_(self.scale))
        age = at.unsqueeze(1) - positions[rows]
        near = near.masked_fill((age < 0) | (age >= window), float("-inf"))
        far = self.method.sink_logits(
            folded, key_floats(k[:, :sinks]), at, sinks, window, self.rotary
        )
        far = softmax.capped(far * self.scale)
        far = far.masked_fill(positions[:sinks] > at.unsqueeze(1), float("-inf"))
        weights = softmax.grouped(torch.cat([far, near], -1))
        values = floats(torch.cat([v[:, :sinks], v[:, rows]], 1))
        return torch.einsum("hgct,htd->chgd", weights, values).reshape(q.shape).to(q.dtype)

    def forget_read(self, b: int, sequence: Sequence) -> None:
        """Of a chunk the next one sees the sinks and the window before it, where prompts are read
        so.
        """
        if self.method.own_prefill:
            budgets = [sum(self.sizes(self.total))] * len(self.evicting)
            sequence.allot(spread(self.plan, budgets, 0))
            self.fold(b, None, self.choose_read)

    def choose_read(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        """The rows that count as sinks in this prompt, which are its first ones even where an
        earlier and smaller budget has dropped the true ones, and as many as its end may keep.
        """
        (part,), budget = parts, sequence.budgets[layer]
        sinks, _ = self.sizes(self.total)
        order = torch.argsort(part.positions, dim=1)
        true = int((part.positions[0] < sinks).sum())
        newest = max(sinks, order.shape[1] - (budget - true))
        return [(part, torch.cat([order[:, :sinks], order[:, newest:]], 1))]

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """The sinks and the newest."""
        sinks, _ = self.sizes(sequence.length)
        return part.positions.float().masked_fill(part.positions < sinks, float("inf"))

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """Drop the oldest token that is no sink."""
        if rows.held <= budget:
            return rows
        sinks = self.method.sinks(budget, sequence.prompt)
        rows.drop_least(self.setup.backend, keep_below=sinks)
        return rows


def validate_sink(value: int, tokens: int | None) -> None:
    """Raise SettingError unless `sink` is an int >= 0 that leaves a window of at least one
    token.
    """
    integer("sink", value, 0)
    if tokens is not None and value >= tokens:
        raise SettingError(
            f"sink: found {value}, expected fewer than the budget of {tokens} tokens"
        )
