"""Find the passages that an answer read: from counted selections to quoted text, without a model.

A sparse layer attends to the tokens that its filter layer chose at this step. A budget of k tokens
is always filled, so most of a choice is background. Where the session still has the scores behind a
choice (those of the deepest filter layer), each token counts by its score. Measured on a model that
retrieves (120 keys, four questions): by score the passage with the fact came first in 8 of 8, by
counting choices in 0 of 8. A passage's score is the mean over its tokens, summed over steps, so
that long passages do not win by length.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
TIED = 1e-6  # share by which two scores differ that are sums of float32
SHORTEST = 24  # characters; a shorter sentence joins the passage before it
# selections kept uncounted: counting 2048 positions in Python at every step would cost 3% of a
# 10 ms step
FOLD = 256
# characters; a longer sentence is cut, so that a text without stops has passages too
LONGEST = 400
# A sentence ends at a stop followed by white space, a line at its end; a stop inside "3.14" or
# "e.g.x" ends nothing.
BORDER = re.compile(r"[.!?。！？]+[\"'”’)\]]*(?:\s+|$)|\n+")


@dataclass(frozen=True)
class Passage:
    """A stretch of text: characters start to stop-1 of the whole, and tokens first to last.

    line counts from 1. score: how much the answer read it (see this file's head).
    """

    start: int
    stop: int
    line: int
    first: int
    last: int
    score: float
    text: str


# chosen positions, int64 [k], and what each counts, float32 [k]
Chosen = tuple[torch.Tensor, torch.Tensor]


def counted(
    selections: Mapping[int, torch.Tensor], scores: Mapping[int, torch.Tensor] | None
) -> list[Chosen]:
    """What of one step's choices counts, on the CPU.

    selections: {filter layer: chosen positions, int64 [k]}. scores: {filter layer: float32 [k]} of
    some of these layers; then only they count, by score. Without scores every chosen token counts
    1. Full attention has no selections.
    """
    return [
        (positions.cpu(), scores[layer].cpu() if scores else torch.ones(len(positions)))
        for layer, positions in selections.items()
        if len(positions) and (not scores or layer in scores)
    ]


class Choices:
    """Counts how often, or by what score, each position was chosen over the steps of an answer."""

    def __init__(self) -> None:
        self.made = 0  # selections counted
        self._counts: Counter[int] = Counter()
        self._kept: list[Chosen] = []

    def add(
        self,
        selections: Mapping[int, torch.Tensor],
        scores: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Add one step; selections and scores as in `counted`."""
        self.take(counted(selections, scores))

    def take(self, chosen: Sequence[Chosen]) -> None:
        """Add what `counted` gave of one step."""
        self.made += len(chosen)
        self._kept += chosen
        if len(self._kept) > FOLD:
            self._fold()

    @property
    def counts(self) -> Counter[int]:
        """Score or number of choices per position."""
        self._fold()
        return self._counts

    def _fold(self) -> None:
        if self._kept:
            every, where = torch.cat([p.long() for p, _ in self._kept]).unique(return_inverse=True)
            sums = torch.zeros(len(every), dtype=torch.float64)
            sums.index_add_(0, where, torch.cat([s.double() for _, s in self._kept]))
            self._counts.update(dict(zip(every.tolist(), sums.tolist())))
            self._kept.clear()


def split_passages(text: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """Split text[start:stop] into sentences and lines; return their (start, stop) in order.

    White space around them is left out; a sentence longer than LONGEST is cut.
    """
    stop = len(text) if stop is None else stop
    borders = [start, *(match.end() for match in BORDER.finditer(text, start, stop)), stop]
    found: list[tuple[int, int]] = []
    for left, right in zip(borders, borders[1:], strict=False):
        for cut in range(left, right, LONGEST):
            begin, end = _stripped(text, cut, min(right, cut + LONGEST))
            if begin == end:
                continue
            if (
                found
                and end - begin < SHORTEST
                and "\n" not in text[found[-1][1] : begin]
                and end - found[-1][0] <= LONGEST
            ):
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
    return found


def _stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    while start < stop and text[start].isspace():
        start += 1
    while stop > start and text[stop - 1].isspace():
        stop -= 1
    return start, stop


def untied(ranked: Sequence[T], most: int, score: Callable[[T], float]) -> list[T]:
    """The first `most` of what is ranked, best first, without what ties with one left out: its
    place would be chance. A method that reads whole pages may read hundreds of passages alike.
    """
    if len(ranked) <= most:
        return list(ranked)
    left_out = score(ranked[most]) * (1 + TIED)
    return [item for item in ranked[:most] if score(item) > left_out]


def _second(pair: tuple[int, float]) -> float:
    return pair[1]


class Owners:
    """The passage of every token, so that the tokens of one step are scored without a search.

    ends: per token the position in the text where it ends, ascending. passages: (start, stop),
    ascending and apart. A token over a border belongs to the passage before it.
    """

    def __init__(self, ends: Sequence[int], passages: Sequence[tuple[int, int]]) -> None:
        self.count = len(passages)
        ending = torch.tensor(ends, dtype=torch.int64)
        bounds = torch.tensor(passages, dtype=torch.int64).reshape(-1, 2)
        begun = torch.cat([ending.new_zeros(1), ending[:-1]])[: len(ending)]
        owner = torch.searchsorted(bounds[:, 1].contiguous(), begun, right=True)
        # behind the last passage, and between two, a token is of none: the last slot's
        after = torch.cat([bounds[:, 0], ending.new_full((1,), 1 << 62)])[owner] >= ending
        none = ending.new_full((1,), self.count)
        self._owner = torch.cat([owner.masked_fill(after, self.count), none])
        sizes = torch.bincount(self._owner, minlength=self.count + 1)[: self.count]
        self._sizes = sizes.clamp(min=1).double()

    def best(self, chosen: Iterable[Chosen], most: int) -> list[tuple[int, float]]:
        """(passage, score) of the passages read most in one step, best first: the mean over a
        passage's tokens of what `counted` gave. Without those that tie with one left out.
        """
        sums = torch.zeros(self.count + 1, dtype=torch.float64)
        for positions, scores in chosen:
            sums.index_add_(
                0, self._owner[positions.clamp(max=len(self._owner) - 1)], scores.double()
            )
        found = torch.topk(sums[:-1] / self._sizes, min(most + 1, self.count))
        pairs = list(zip(found.indices.tolist(), found.values.tolist(), strict=True))
        return untied([(passage, score) for passage, score in pairs if score > 0], most, _second)


def rank_passages(
    text: str,
    ends: Sequence[int],
    counts: Mapping[int, float],
    start: int = 0,
    stop: int | None = None,
    most: int = 5,
) -> list[Passage]:
    """Return the passages of text[start:stop] that were chosen most, best first.

    text: what the tokens spell. ends: per token the position in text where it ends, ascending.
    counts: how much each token position was chosen. most: most passages returned; passages that
    were never chosen are left out. Equal scores keep the order of the text.
    """
    ranked: list[Passage] = []
    token, line, counted = 0, 1, 0
    for begin, end in split_passages(text, start, stop):
        while token < len(ends) and ends[token] <= begin:
            token += 1
        first, total = token, 0.0
        while token < len(ends) and (token == first or ends[token - 1] < end):
            total += counts.get(token, 0)
            token += 1
        line += text.count("\n", counted or start, begin)
        counted = begin
        if total and token > first:
            ranked.append(
                Passage(
                    begin, end, line, first, token - 1, total / (token - first), text[begin:end]
                )
            )
        if token > first and ends[token - 1] > end:  # a token over the border belongs to both
            token -= 1
    ranked.sort(key=lambda passage: -passage.score)
    return ranked[:most]
