"""OmniKV with a planted selection: everything runs and is timed, only the outcome is replaced.

Random weights choose almost the same or entirely other tokens from step to step, and neither says
what a text would do. For timing a fetch (misses cross the link, hits do not) the share of tokens
that stay chosen is therefore set: after scoring and top-k have run, the group's indices are
overwritten from a table drawn beforehand. For benchmarks; its answers mean nothing.
"""

from dataclasses import dataclass

import torch

from engine.base.errors import SettingError
from engine.methods.base import device_int
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.plan.layers import tail_start
from tools.common.program import no_program

# rows of a group's table: a reuse above 1 - k/256k cannot be told from 1 by then
MOST_ROWS = 256


@dataclass(frozen=True)
class Replay(OmniKV):
    """OmniKV with planted selections: of the k tokens of a step, the share `reuse` (0 to 1) was
    chosen in the step before too.

    With fewer than 2k candidate tokens small reuse rates are impossible: a larger one is
    planted and reported (`ReplayRuntime.planted`). Deterministic per seed and position: going back
    and doing a step again gives the same selection.
    """

    reuse: float = 0.9
    seed: int = 0

    named = False

    def __post_init__(self):
        super().__post_init__()
        if (
            isinstance(self.reuse, bool)
            or not isinstance(self.reuse, (int, float))
            or not 0 <= self.reuse <= 1
        ):
            raise SettingError(f"reuse: found {self.reuse!r}, expected a number in [0, 1]")
        if self.official:
            raise SettingError(
                "official: a planted selection cannot follow the published code; leave it out"
            )

    def runtime(self, setup):
        """Selection buffers and tables of one session."""
        return ReplayRuntime(self, setup)


class ReplayRuntime(OmniKVRuntime):
    """Tables [MOST_ROWS, K] int32 per group: windows on a ring of shuffled candidates; a step takes
    row (position mod rows).

    The tables and the numbers that go with them stay where they are from prefill to prefill, so
    that captured graphs stay true.
    """

    def __init__(self, method, setup):
        super().__init__(method, setup)
        width = self.index[0].shape[2] if self.index else 0
        self.tables = [
            torch.full((MOST_ROWS, width), -1, dtype=torch.int32, device=setup.device)
            for _ in self.plan.groups
        ]
        self.rows, self.filled = device_int(1, setup), device_int(0, setup)
        # share of a step's tokens that the step before chose too, as drawn
        self.planted = None

    @property
    def nbytes(self):
        """Bytes of scores, indices and tables."""
        return super().nbytes + sum(t.numel() * t.element_size() for t in self.tables)

    def end_prompt(self, length, step=None):
        """Draw the tables: candidates are the tokens older than the tail now, so they stay
        candidates.
        """
        super().end_prompt(length, step)
        candidates = tail_start(length, self.method.tail)
        k = min(self.k, candidates)
        rows, fresh = ring_shape(k, candidates, self.method.reuse)
        self.rows.fill_(rows)
        self.filled.fill_(k)
        generator = torch.Generator().manual_seed(self.method.seed)
        at = (torch.arange(rows).view(-1, 1) * fresh + torch.arange(k)) % max(1, k, rows * fresh)
        for table in self.tables:
            order = torch.randperm(candidates, generator=generator)
            table.fill_(-1)
            table[:rows, :k] = order[at].sort(dim=1).values.int().to(table.device)
            self.planted = _overlap(table[:rows, :k])

    def attend_and_select(self, layer, q, step):
        """As OmniKV's, then the outcome is replaced on the device: the same launches whatever is
        planted.
        """
        out = super().attend_and_select(layer, q, step)
        group = self.plan.group_of[layer]
        self.index[group][:, 0] = self.tables[group].index_select(
            0, step.visible.long() % self.rows
        )
        self.counts[group].copy_(self.filled)
        return out

    def state(self):
        """k and the drawn tables (a fork has not seen the prefill that drew them)."""
        return (
            self.k,
            [t.clone() for t in self.tables],
            int(self.rows[0]),
            int(self.filled[0]),
            self.planted,
        )

    def load(self, state, length):
        """Load k and the tables."""
        k, tables, rows, filled, self.planted = state
        self._set_k(k)
        for mine, kept in zip(self.tables, tables):
            mine.copy_(kept)
        self.rows.fill_(rows)
        self.filled.fill_(filled)


def ring_shape(k, candidates, reuse):
    """(rows, fresh): windows of k tokens on a ring of rows * fresh, each `fresh` further on, so
    that k - fresh of a window stay.

    The ring is as long as candidates and MOST_ROWS allow: a token that comes round again must have
    left every working set by then. It must hold k + fresh for a window not to meet itself, so a
    larger reuse comes out where candidates are few.
    """
    fresh = min(round((1 - reuse) * k), candidates - k)
    if k == 0 or fresh <= 0:
        return 1, 0
    fresh = max(fresh, -(-k // (MOST_ROWS - 1)))
    while fresh > 1 and candidates // fresh * fresh < k + fresh:
        fresh -= 1
    rows = min(MOST_ROWS, candidates // fresh)
    return (rows, fresh) if rows * fresh >= k + fresh else (1, 0)


def _overlap(table):
    """Mean share of a row's tokens that the row before has too."""
    if len(table) == 1 or not table.shape[1]:
        return 1.0
    return sum(
        torch.isin(a, b).float().mean().item() for a, b in zip(table, table.roll(1, 0))
    ) / len(table)


if __name__ == "__main__":
    raise SystemExit(no_program("tools.common.planted_selection"))
