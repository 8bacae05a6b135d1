"""Means over texts with 95% intervals, differences of columns on the same texts, and what the
controls say about a claim.

Positions of one text are not independent, so the bootstrap draws whole texts; a text at several
lengths is one text. Its percentiles are moved outwards for few texts (Hesterberg 2014, "What
teachers should know about the bootstrap", section 5.1), but no bootstrap goes beyond the texts that
there are: fewer than FEWEST carry no verdict.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from tools.compare.methods import CONTROLS
from tools.eval.report import wilson
from tools.fidelity.follow import Record, agreement, until_difference

DRAWS = 4_000  # of the bootstrap
FEWEST = 6  # texts of a verdict: all on one side by chance is 1 in 32
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571)  # Student's t for 1 to 5 degrees of freedom
MODEL_SAYS_NOTHING = "not tested by this model"


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


def kl_of(record: Record) -> tuple[float, int]:
    """(sum of KL in nats, positions)."""
    return sum(record["kl"]), len(record["kl"])


def same_of(record: Record) -> tuple[float, int]:
    """(positions that agree, positions)."""
    return agreement(record) * len(record["same"]), len(record["same"])


def until_of(record: Record) -> tuple[float, int]:
    """(tokens up to the first difference, 1)."""
    return until_difference(record), 1


def mean(records: Iterable[Record], of: Callable[[Record], tuple[float, int]]) -> Interval | None:
    """`over_texts` of a figure of records."""
    return over_texts((r["text"], *of(r)) for r in records)


def difference(
    ones: Iterable[Record],
    others: Iterable[Record],
    of: Callable[[Record], tuple[float, int]] = kl_of,
) -> Interval | None:
    """Mean of ones - others over the texts, lengths and streams that both have; None without
    any.
    """
    beside = {place(r): of(r) for r in others}
    pairs = []
    for record in ones:
        if place(record) in beside:
            (total, count), (minus, _) = of(record), beside[place(record)]
            pairs.append((record["text"], total - minus, count))
    return over_texts(pairs)


def place(record: Record) -> tuple[str, str, int]:
    """What a record is about: two columns' records with this in common can be compared."""
    return record["stream"], record["text"], record["length"]


@dataclass(frozen=True)
class Verdict:
    """What the controls say about one OmniKV column: KL(control) - KL(OmniKV) on the same texts,
    by control; words: for people.
    """

    column: str
    differences: Mapping[str, Interval]
    words: str


def verdict(groups: Mapping[str, Sequence[Record]], column: str) -> Verdict:
    """Whether random, one and newest are clearly worse than an OmniKV column at its filters, wait
    layers and budget: the paired interval of each difference lies above 0.
    """
    own = groups[column]
    found = {}
    for name in CONTROLS:
        match = next((r for r in groups.values() if r and _controls(r[0], name, own[0])), None)
        far = difference(match, own) if match else None
        if far is not None:
            found[name.removeprefix("omnikv_")] = far
    equal = [name for name, far in found.items() if not far.low > 0]
    if len(found) < len(CONTROLS):
        run = ", ".join(found) or "none"
        words = f"not judged: of the controls, {run} ran"
    elif min(far.texts for far in found.values()) < FEWEST:
        words = f"not judged: fewer than {FEWEST} texts"
    elif equal:
        words = f"{MODEL_SAYS_NOTHING}: {' and '.join(equal)} not clearly worse"
    else:
        words = "random, one and newest are clearly worse than OmniKV at the same bytes"
    return Verdict(column, found, words)


def _controls(control: Record, name: str, own: Record) -> bool:
    """Whether a record is of the control `name` for OmniKV's record `own`."""
    alike = all(control[field] == own[field] for field in ("filters", "wait"))
    return (
        control["name"] == name
        and alike
        and (name == "omnikv_one" or control["budget"] == own["budget"])
    )


def answered(records: Sequence[Record], askable: set[tuple]) -> dict[str, tuple]:
    """{"askable" | "all": (right, asked, low, high)} of needle records, Wilson intervals."""
    out = {}
    for name, some in (
        ("askable", [r for r in records if question_of(r) in askable]),
        ("all", list(records)),
    ):
        right = sum(r["right"] for r in some)
        out[name] = (right, len(some), *wilson(right, len(some)))
    return out


def question_of(record: Record) -> tuple:
    """What was asked, whatever the column."""
    return record["text"], record["length"], record["question"]
