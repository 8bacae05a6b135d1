"""The store of a layer whose K/V heads hold different numbers of tokens: one flat run of rows, in
which each head has a span of its own with room at its end.

A step writes a row of every head and attends to all of them in one call each, whatever they hold:
where a head begins, what it sees and where its next row goes are tables on the device. The heads'
`Rows` are views of the run, so that whatever reads or saves a store knows one kind of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.methods.base import Setup
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Rows, reserved
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.attention.ragged import decode_ragged
from kernels.kept.step import kept_step_ragged
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.own_pages import empty
from kernels.rows.forms import as_bytes

TABLES = 3  # int64 numbers of a head


def table_bytes(plan: LayerPlan, config: ModelConfig) -> int:
    """Bytes of the tables of all layers that evict; a single head needs none."""
    many = config.num_kv_heads > 1
    return 8 * TABLES * len(plan.partial_layers) * config.num_kv_heads if many else 0


def joined(method: Evicting, parts: list[Rows], softmax: Softmax = PLAIN) -> list[Rows]:
    """A layer's store of these parts: a Ragged of copies where the method's heads are parts of
    their own, of which every generated token stays, and the layer's softmax is a plain one; else
    the parts.
    """
    plain = not softmax.cap and softmax.sinks is None
    return Ragged(parts) if method.ragged and plain and len(parts) > 1 else parts


def copied(parts: list[Rows]) -> list[Rows]:
    """A copy of a layer's store that shares nothing."""
    return parts.remade() if isinstance(parts, Ragged) else [rows.clone() for rows in parts]


class Ragged(list[Rows]):
    """A layer's parts, one K/V head each: views of k, v [N, width], positions int32 [N] and, of
    parts with one score for each row, scores float32 [N], 0 of a new row. Generated tokens stay in
    it, so that all heads grow by one row a step.

    table int64 [TABLES, h]: the row at which a head begins; how many it has with the one of the
    step under way; where that one goes. most: the largest of the second, counted on the host.
    """

    plain = True  # whether every row counts once, as `step` takes it

    def __init__(self, parts: Iterable[Rows]):
        super().__init__()
        old, at, spans = list(parts), 0, []
        for rows in old:
            spans.append(slice(at, at + reserved(rows.base, rows.held)))
            at = spans[-1].stop
        first = old[0]
        self.k, self.v = (empty((at, t.shape[2]), t) for t in (first.k, first.v))
        self.positions = first.positions.new_empty(at)
        self.scores = None if first.scores is None else first.scores.new_zeros(at)
        for rows, span in zip(old, spans):
            own = self.k[None, span], self.v[None, span], self.positions[None, span]
            for mine, theirs in zip(own, (rows.k, rows.v, rows.positions)):
                mine[:, : rows.held] = theirs[:, : rows.held]
            scores = None if self.scores is None else self.scores[None, None, span]
            if scores is not None and rows.scores is not None:
                scores[:, :, : rows.held] = rows.scores[:, :, : rows.held]
            self.append(Rows(rows.heads, *own, scores, rows.held, rows.base))
        table = [(s.start, rows.held + 1, s.start + rows.held) for s, rows in zip(spans, old)]
        self.table = torch.tensor(table, device=first.k.device).T.contiguous()
        self.starts, self.seen, self.slots = self.table.unbind()
        self.most = 1 + max(rows.held for rows in old)
        self.spare = min(s.stop - s.start - rows.held for s, rows in zip(spans, old))

    def put(self, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        """Write a new token's k, v [h, width] behind each head's others; it counts once `counted`
        says so.
        """
        for mine, new in ((self.k, k), (self.v, v)):
            as_bytes(mine).index_copy_(0, self.slots, as_bytes(new))
        self.positions.index_fill_(0, self.slots, position)

    def attend(self, q: torch.Tensor, scale: float, setup: Setup) -> torch.Tensor:
        """Attention of one query [1, 1, H, D] to every head's rows, the one just put included."""
        return decode_ragged(
            q,
            self.k,
            self.v,
            self.starts,
            self.seen,
            self.most,
            scale,
            scratch=setup.scratch,
            backend=setup.backend,
        )

    def remade(self) -> Ragged:
        """A copy that shares nothing, with room for what comes."""
        return Ragged(self)

    def step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, scale: float
    ) -> torch.Tensor:
        """`put` of k, v [h, 1, width] and `attend` by one call of the C++ kernel, where
        kernels/kept/step.py says that it runs.
        """
        rows = self.k, self.v, self.positions, self.table, self.most
        return kept_step_ragged(q, k, v, *rows, position, scale)

    def counted(self) -> Ragged:
        """Count the rows that were put; returns this store, or a larger one where a head has no
        room for one more.
        """
        for rows in self:
            rows.held += 1
        self.table[1:] += 1
        self.most, self.spare = self.most + 1, self.spare - 1
        return self if self.spare else self.remade()
