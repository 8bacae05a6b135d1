"""Longformer's patterns as a causal mask: a window with gaps, and global tokens, which all see and
which see all before them.

Source: Beltagy et al., Longformer (2020), section 3.1: sliding window, dilated sliding window,
global attention. Every query sees its own token and the w - 1 at distances d, 2d, ... before it.
Defaults: the published window of 512 and the first token as the global one; gaps are off, as in its
pretrained models. Its encoders look both ways and have projections of their own for global tokens;
here everything is causal and a checkpoint's own, which was not trained so. Its dilation is of a few
heads, here of whole layers. Positions stay as they were, in prompts too.

A layer holds what the window spans, and the global tokens. A global token in the middle of a text
sees everything before it, so that nothing may go until it has been read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import integer, is_integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.by_position import Windowed, WindowedRuntime
from engine.methods.evict.shared.runtime import EvictingRuntime, everything
from engine.methods.evict.shared.store import ROOM, Part, Rows, Sequence, best
from engine.methods.evict.shared.windows import spread
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.attention.native import attend, attends
from kernels.launch.dispatch import choose
from kernels.launch.softmax import Softmax
from kernels.rows.forms import floats, key_floats
from kernels.select.column_sums import tile_floats


@dataclass(frozen=True)
class Longformer(Windowed):
    """tokens | share: of a query's window, its own included. dilation: distance of two neighbours
    in it; one number for all layers, or one per layer. first: first tokens that are global;
    positions: further global ones.
    """

    dilation: int | tuple[int, ...] = 1
    first: int = 1
    positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("first", self.first, 0)
        if not is_integer(self.dilation):
            object.__setattr__(self, "dilation", _whole("dilation", self.dilation, 1))
            if not self.dilation:
                raise SettingError("dilation: found (), expected one number, or one per layer")
        else:
            integer("dilation", self.dilation, 1)
        found = _whole("positions", self.positions, 0)
        object.__setattr__(self, "positions", tuple(sorted(set(found) - set(range(self.first)))))

    @property
    def clips(self) -> bool:
        return False

    @property
    def late(self) -> int:
        """The last global position behind the first ones, before which no row may go; -1: none."""
        return max(self.positions, default=-1)

    @property
    def globals(self) -> int:
        """How many global tokens there are."""
        return self.first + len(self.positions)

    @property
    def is_window(self) -> bool:
        """Whether this is plain window attention."""
        gaps = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)
        return not self.globals and max(gaps) == 1

    def default_budget(self) -> dict[str, int]:
        """The window of the published models."""
        return {"tokens": 512}

    def gaps(self, layers: int) -> tuple[int, ...]:
        """Dilation of each layer."""
        return self.dilation if isinstance(self.dilation, tuple) else (self.dilation,) * layers

    def reach(self, length: int) -> int:
        """Tokens of a query's window where the latest prefill ended at `length`."""
        return self.tokens or max(1, int((self.share or 0) * length))

    def budgets(self, plan: LayerPlan, length: int) -> list[int]:
        """What a window spans, and the global tokens."""
        gaps, window = self.gaps(plan.num_layers), self.reach(length)
        return [(window - 1) * gaps[i] + 1 + self.globals for i in plan.partial_layers]

    def budget(self, plan: LayerPlan, length: int) -> int:
        """The most that a layer ever holds."""
        return max(*self.budgets(plan, length), self.late + 1)

    def plan(self, config: ModelConfig) -> LayerPlan:
        if isinstance(self.dilation, tuple) and len(self.dilation) != config.num_layers:
            raise SettingError(
                f"dilation: found {len(self.dilation)} numbers, expected one per layer, "
                f"{config.num_layers} in this model, or one for all"
            )
        return super().plan(config)

    def store_rows(self, plan: LayerPlan, capacity: int) -> int:
        """Until the last global token has been read, all."""
        budgets = self.budgets(plan, capacity)
        return sum(min(max(one, self.late) + 1, capacity + ROOM) for one in budgets)

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        if length > self.late:
            base = min(length, budget)
            return base, min(base + generated, budget)
        if length + generated <= self.late:
            return length, length + generated
        # the step of the last global token has cut more than its own
        return (budget, budget) if self.late > budget else (length, min(length + generated, budget))

    def bounds_distances(self, plan: LayerPlan, positions: int, length: int) -> bool:
        """Global tokens are seen at their true distance."""
        return not self.globals and self.budget(plan, length) <= positions

    def forgotten(self, length: int) -> str:
        if self.tokens is None or length <= self.tokens:
            return ""
        gaps = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)
        span = (self.tokens - 1) * max(gaps) + 1
        return (
            f"from here on the oldest tokens beyond {self.globals} global ones and the newest "
            f"{span:,} are forgotten"
        )

    def clip_from(self, sinks: int, window: int) -> int:
        """Of plain window attention."""
        return window

    def runtime(self, setup: Setup) -> Runtime:
        return LongformerRuntime(self, setup)


def _whole(name: str, values: Any, least: int) -> tuple[int, ...]:
    """The whole numbers of a tuple or list; raises SettingError."""
    if not isinstance(values, (tuple, list)):
        raise SettingError(f"{name}: found {values!r}, expected whole numbers such as (0, 7)")
    return tuple(integer(name, value, least) or value for value in values)


class LongformerRuntime(WindowedRuntime):
    """Masks by position. Without gaps and global tokens everything is window attention's."""

    method: Longformer

    def __init__(self, method: Longformer, setup: Setup):
        super().__init__(method, setup)
        self.gaps = method.gaps(setup.plan.num_layers)
        found = [*range(method.first), *method.positions]
        self.globals = torch.tensor(found, dtype=torch.int64, device=setup.device)

    def is_global(self, positions: torch.Tensor) -> torch.Tensor:
        """Which of positions, of any shape, are global."""
        if not self.method.positions:
            return positions < self.method.first
        return torch.isin(positions, self.globals.to(positions.dtype))

    def seen(
        self, at: torch.Tensor, positions: torch.Tensor, gap: int, window: int
    ) -> torch.Tensor:
        """bool [C, T]: which of positions [T] the queries at [C] see."""
        age = at.unsqueeze(1) - positions
        near = (age % gap == 0) & (age < window * gap)
        near |= self.is_global(positions) | self.is_global(at).unsqueeze(1)
        return near & (age >= 0)

    # ---------------------------------------------------------------- attention

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
        """Blocks of queries: the rows that their windows span, and the global ones."""
        window = self.method.reach(0 if self.method.tokens else int(self.total))
        gap, count = self.gaps[layer], q.shape[1]
        if gap == 1 and start + count <= window:
            return EvictingRuntime.attend_rows(self, layer, q, k, v, first, start, softmax)
        if self.method.is_window:
            return super().attend_rows(layer, q, k, v, first, start, softmax)
        sequence = self.sequences[0]
        kept = first - (start - sequence.since)
        positions = torch.arange(sequence.since, start + count, device=q.device)
        if kept:
            assert sequence.layers is not None
            old, order = torch.sort(sequence.layers[layer][0].positions[0, :kept].long())
            positions = torch.cat([old, positions])
            k, v = (torch.cat([t[:, order], t[:, kept:]], 1) for t in (k, v))
        everywhere, out = self.is_global(positions).nonzero()[:, 0], []
        late = [at for at in self.method.positions if start <= at < start + count]
        block = max(16, tile_floats(q.device) // (q.shape[2] * (window * gap + 64)))
        for at in range(0, count, block):
            part = q[:, at : at + block]
            stop, where = first + at + part.shape[1], start + at
            low = int(torch.searchsorted(positions, where - (window - 1) * gap))
            if any(where <= one < where + part.shape[1] for one in late):
                low = 0
            rows = torch.arange(low, stop, device=q.device)
            rows = torch.cat([everywhere[everywhere < low], rows])
            out.append(self._masked(part, k, v, positions, rows, where, gap, window, softmax))
        return torch.cat(out, 1)

    def _masked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        start: int,
        gap: int,
        window: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Attention of q [1, C, H', D] at positions from `start` on to those of `rows` [R] of k, v
        [h, T, D] at positions [T] that each sees.
        """
        folded = q[0].float().view(q.shape[1], k.shape[0], -1, q.shape[3])
        at = torch.arange(start, start + q.shape[1], device=q.device)
        logits = torch.einsum("chgd,htd->hgct", folded, key_floats(k[:, rows]))
        logits = softmax.capped(logits.mul_(self.scale))
        unseen = ~self.seen(at, positions[rows], gap, window)
        weights = softmax.grouped(logits.masked_fill(unseen, float("-inf")))
        found = torch.einsum("hgct,htd->chgd", weights, floats(v[:, rows]))
        return found.reshape(q.shape).to(q.dtype)

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
        """Plain attention where the query sees all that is held; else of the rows that it sees."""
        gap = self.gaps[layer]
        span = sequence.budgets[layer] - self.method.globals if sequence.budgets else 1
        window = (span - 1) // gap + 1
        if self.method.is_window:
            return super().attend_step(sequence, layer, q, k, v, positions, at, softmax)
        if positions is None and gap == 1 and at < window:
            return EvictingRuntime.attend_step(
                self, sequence, layer, q, k, v, positions, at, softmax
            )
        where = torch.arange(at + 1, device=q.device) if positions is None else positions[0].long()
        if choose(self.setup.backend, q, lambda: attends(k, v, q.shape[3])) == "native":
            query = torch.tensor([at], device=q.device)
            rows = self.seen(query, where, gap, window)[0].nonzero().int()
            given = rows.view(1, -1), len(rows), k.shape[1]
            out, lse = attend(q[0], k, v, self.scale, *given, softmax=replace(softmax, sinks=None))
            return softmax.sunk(out, lse)[0][None].to(q.dtype)
        rows = torch.arange(k.shape[1], device=q.device)
        return self._masked(q, k, v, where, rows, at, gap, window, softmax)

    # ---------------------------------------------------------------- what is held

    def forget_read(self, b: int, sequence: Sequence) -> None:
        """Of a chunk what a later query can see."""
        budgets = self.method.budgets(self.plan, 0 if self.method.tokens else int(self.total))
        sequence.allot(spread(self.plan, budgets, 0))
        self.fold(b, None, self.choose)

    def choose(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        if sequence.length <= self.method.late:
            return [(part, everything(part)) for part in parts]
        return EvictingRuntime.choose(self, sequence, layer, parts, step)

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """The global tokens and the newest."""
        return self._ranks(part.positions)

    def _ranks(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.float().masked_fill(self.is_global(positions), float("inf"))

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """Drop the oldest token that is not global; all at once behind the last global one."""
        if rows.held <= budget or sequence.length <= self.method.late:
            return rows
        if rows.held > budget + 1:
            part = rows.part()
            index = best(self._ranks(part.positions), part.positions, budget)
            return Rows.gather(part, index, self.method.max_rows(budget))
        if self.method.positions:
            rows.drop_least(self.setup.backend, ranks=self._ranks(rows.positions[:, : rows.held]))
        else:
            rows.drop_least(self.setup.backend, keep_below=self.method.first)
        return rows
