"""How many tokens exact mode drafts: from what was accepted so far, and from counted bytes.

Nothing here is timed, and no draft length changes a word of an answer: a wrong choice costs time
only. Costs are bytes of a full step's kind, weighted by what a CPU was measured to take for them
(engine/plan/cpu_costs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from engine.methods.exact import MOST_DRAFTS

FADE = 0.9  # what a cycle leaves of the counts before it: the last ten or so decide
PRIOR = 0.8  # acceptance that is assumed before any was seen
WEIGHT = 2.0  # ... as if from so many drafts
LEAN = 4.0  # drafts for which a position's rate is that of the one before it
MARGIN = 1.02  # a longer draft must promise so much more: what it costs is counted, not measured
PROBE = 64  # steps of full attention between two looks at whether drafting pays again


@dataclass
class Acceptance:
    """Share of drafts accepted, by position in the draft, if all earlier ones were accepted.

    tried, kept: counts per position, of which older ones weigh less.
    """

    prior: float = PRIOR
    tried: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    kept: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)

    def learn(self, accepted: int, rejected: bool) -> None:
        """Note a cycle: so many drafts were accepted, and the one after them was `rejected` or
        never judged.
        """
        judged = accepted + rejected
        if not judged:
            return
        for i in range(MOST_DRAFTS):
            self.tried[i] = FADE * self.tried[i] + (i < judged)
            self.kept[i] = FADE * self.kept[i] + (i < accepted)

    def rates(self, drafts: int) -> Iterator[float]:
        """Acceptance of each of so many drafts. A position that was seldom reached leans on the one
        before it.
        """
        lean, weight = self.prior, WEIGHT
        for tried, kept in zip(self.tried[:drafts], self.kept):
            lean, weight = (kept + weight * lean) / (tried + weight), LEAN
            yield lean

    def reached(self, times: float = 1.0) -> list[float]:
        """Shares of drafts whose first 1, 2, ... are all accepted, if each were so many times as
        often.
        """
        rates = (min(1.0, rate * times) for rate in self.rates(MOST_DRAFTS))
        return list(accumulate(rates, mul))

    def tokens(self, drafts: int) -> float:
        """Expected tokens of a cycle of so many drafts: the fed one, and the accepted."""
        return 1.0 + sum(accumulate(self.rates(drafts), mul))


class DraftLength:
    """Chooses the length of the next draft: the shortest of those that promise most, within MARGIN.
    fixed: always this many; None: as many as pay.
    """

    def __init__(self, fixed: int | None = None, prior: float = PRIOR):
        self.fixed, self.acceptance = fixed, Acceptance(prior)
        self._idle = 0  # cycles without a draft since the last one

    def gain(self, drafts: int, cost: Callable[[int], float]) -> float:
        """Tokens of a cycle over its cost, relative to full attention."""
        return self.acceptance.tokens(drafts) * cost(0) / cost(drafts)

    def choose(self, most: int, cost: Callable[[int], float]) -> int:
        """The number of tokens to draft now, at most `most`. cost(d): of a cycle with d drafts;
        cost(0) is a full step's.
        """
        if self.fixed is not None:
            return min(self.fixed, most)
        gains = {d: self.gain(d, cost) for d in range(most + 1)}
        enough = max(gains.values()) / MARGIN
        length = next(d for d in gains if gains[d] >= enough)
        if length:
            self._idle = 0
            return length
        self._idle += 1
        if self._idle % PROBE == 0 and most and self._could_pay(cost):
            return 1
        return 0

    def _could_pay(self, cost: Callable[[int], float]) -> bool:
        fresh = Acceptance(self.acceptance.prior)
        return any(fresh.tokens(d) * cost(0) > MARGIN * cost(d) for d in range(1, MOST_DRAFTS + 1))
