"""Scissorhands: what was above average lately stays important; many tokens are dropped at once when
the budget is full.

Source: Liu et al., Scissorhands (NeurIPS 2023), Algorithm 2; METHODS.md row `scissorhands`. A
token's importance is how many of the last queries gave it more than an even share of their
attention, 1 / (rows they saw). History: the prompt's last `history` queries, and of an answer the
last `history` before a drop. At a prompt's end a head keeps its budget; when the answer overfills
it, `drop` of the budget goes at once, never the `newest` tokens. History 400, newest 10 and drop
one half are the values usually quoted for the paper's experiments; they were not checked against
its text (METHODS.md: "not given"). gqa_reduce: the counts of a group are summed.
"""

from dataclasses import dataclass

import torch

from engine.methods.evict.accumulated_scores import Accumulating, AccumulatingRuntime
from engine.methods.evict.store import best
from engine.methods.settings import portion, whole
from kernels.column_sums import column_sums


@dataclass(frozen=True)
class Scissorhands(Accumulating):
    """history: queries whose attention counts. newest: tokens that are never dropped. drop: share
    of the budget dropped at once.
    """

    gqa_reduce: str = "sum"
    history: int = 400
    newest: int = 10
    drop: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        whole("history", self.history, 1)
        whole("newest", self.newest, 0)
        portion("drop", self.drop)

    @property
    def last_part(self):
        """The history: in a part that is not a prompt's last nothing counts yet."""
        return self.history

    def recent(self, budget):
        """`newest`, at most the budget."""
        return min(self.newest, budget)

    def target(self, budget):
        """Tokens that are left after a drop: one at least goes, one at least stays."""
        return max(
            1, self.recent(budget), min(budget, budget + 1 - max(1, int(self.drop * budget)))
        )

    def course(self, budget, length, generated):
        """(base, held) by the rules of `trim`."""
        base = held = min(length, budget)
        for _ in range(generated):
            held += 1
            if held > budget:
                base = held = self.target(budget)
        return base, held

    def runtime(self, setup):
        """Stores and counters."""
        return ScissorhandsRuntime(self, setup)


class ScissorhandsRuntime(AccumulatingRuntime):
    """Scores are counts; they start anew after a drop."""

    def added(self, sequence, layer, number, q, k, first, start):
        """1 for every query of the history that gave a row more than an even share."""
        method, own = self.method, self.sequences[sequence]
        # in a prompt: the first position that counts
        late = self.total - method.history
        if not self.reading and own.layers is not None:
            # steps after this one until the next drop
            left = own.budgets[layer] - own.layers[layer][number].held
            late = start if left < method.history else start + 1

        def above(tile, queries, rows):
            """Whether weights [h, G, queries, rows] are above 1 / (rows seen)."""
            at = torch.arange(queries.start, queries.stop, device=tile.device)
            return (tile * (first + 1 + at).unsqueeze(1) > 1).float()

        # queries at the front that do not count
        idle = min(len(q), max(0, late - start))
        q, first = q[idle:], first + idle
        return column_sums(q, k, first, self.scale, each=above)

    def trim(self, rows, budget, sequence):
        """A full store drops many at once, and counts anew."""
        if rows.held <= budget:
            return rows
        keys = self.keys(
            rows.scores[:, :, : rows.held], rows.positions[:, : rows.held], sequence.length, budget
        )
        rows = rows.keep(
            best(keys, rows.positions[:, : rows.held], self.method.target(budget)),
            self.method.most(budget),
        )
        rows.scores.zero_()
        return rows
