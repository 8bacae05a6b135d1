"""95% intervals: of a proportion, and of a mean over texts by a bootstrap.

Positions of one text are not independent, so the bootstrap draws whole texts; a text at several
lengths is one text. Its percentiles are moved outwards for few texts (Hesterberg 2014, "What
teachers should know about the bootstrap", section 5.1), but no bootstrap goes beyond the texts that
there are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

DRAWS = 4_000  # of the bootstrap
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571)  # Student's t for 1 to 5 degrees of freedom


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927): sound at 0 and 1 and for few answers. (0, 1)
    where nothing was asked.
    """
    if not asked:
        return 0.0, 1.0
    share, more = right / asked, 1 + z * z / asked
    middle = (share + z * z / (2 * asked)) / more
    half = z / more * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval over `texts` texts; unbounded for fewer than two."""

    mean: float
    low: float
    high: float
    texts: int

    def shown(self, form: str = ".3f") -> str:
        """Mean and interval for people."""
        if not np.isfinite(self.low + self.high):
            return f"{self.mean:{form}} [one text]"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


@lru_cache(maxsize=64)
def _draws(count: int) -> np.ndarray:
    """Which of `count` texts each draw takes: int64 [DRAWS, count], always the same."""
    return np.random.default_rng(0).integers(0, count, (DRAWS, count))


def over_texts(values: Iterable[tuple[str, float, int]]) -> Interval | None:
    """Mean of (text, sum, count) with the percentiles of a bootstrap over texts; None without
    any.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text, total, count in values:
        sums[text][0] += total
        sums[text][1] += count
    if not sums:
        return None
    found = np.array(list(sums.values()))
    mean = found[:, 0].sum() / found[:, 1].sum()
    if len(found) < 2:
        return Interval(float(mean), -np.inf, np.inf, len(found))
    drawn = found[_draws(len(found))].sum(1)
    outside = 100 * tail_share(len(found))
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [outside, 100 - outside])
    return Interval(float(mean), float(low), float(high), len(found))


def tail_share(count: int) -> float:
    """Share of draws outside a 95% interval on either side, for so many texts: .025 for many."""
    z, free = NormalDist().inv_cdf(0.975), count - 1
    # Cornish and Fisher's expansion, exact to three digits from 6 degrees on
    far = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t = T_975[free - 1] if free <= len(T_975) else far
    return NormalDist().cdf(-t * math.sqrt(count / free))
