"""Which passages of what was read an answer looked at: from counted selections to quoted text. Pure functions, no model.

A sparse layer attends to the tokens that its filter layer chose at this step. Each choice counts one for each chosen token;
a passage's score is the share of its tokens that were chosen, summed over steps and filter layers, so that long passages
do not win by length. A score equal to the number of choices means: read whole, at every step, in every group.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SHORTEST = 24       # characters; less is no passage of its own and goes to the one before it
LONGEST = 400       # characters; a longer sentence is cut, so that a text without stops has passages too
# A sentence ends at a stop followed by white space, a line at its end; a stop inside "3.14" or "e.g.x" ends nothing.
BORDER = re.compile(r"[.!?。！？]+[\"'”’)\]]*(?:\s+|$)|\n+")


@dataclass(frozen=True)
class Passage:
    """A stretch of text: characters start .. stop-1 of the whole, its line (from 1), tokens first .. last, and its score."""

    start: int
    stop: int
    line: int
    first: int
    last: int
    score: float
    text: str


class Choices:
    """Counts, over the steps of one answer, how often each position was chosen."""

    def __init__(self):
        self.counts: Counter[int] = Counter()
        self.made = 0           # selections counted: steps times filter layers

    def add(self, selections: Mapping[int, Iterable[int]]) -> None:
        """One step's selections: {filter layer: positions}, tensors or lists; an empty one (full attention) counts nothing."""
        for positions in selections.values():
            positions = positions.tolist() if hasattr(positions, "tolist") else list(positions)
            self.counts.update(positions)
            self.made += bool(positions)


def split_passages(text: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """(start, stop) of the sentences and lines of text[start:stop], without the white space around them, in order."""
    stop = len(text) if stop is None else stop
    borders = [start, *(match.end() for match in BORDER.finditer(text, start, stop)), stop]
    found: list[tuple[int, int]] = []
    for left, right in zip(borders, borders[1:], strict=False):
        for cut in range(left, right, LONGEST):
            begin, end = _stripped(text, cut, min(right, cut + LONGEST))
            if begin == end:
                continue
            if found and end - begin < SHORTEST and "\n" not in text[found[-1][1]:begin] and end - found[-1][0] <= LONGEST:
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


def rank_passages(text: str, ends: Sequence[int], counts: Mapping[int, int], start: int = 0, stop: int | None = None,
                  most: int = 5) -> list[Passage]:
    """The passages of text[start:stop] that were chosen most, best first, at most `most`, none with a score of 0.

    text: all that the tokens spell. ends: for each token the position in text where its characters end, ascending.
    counts: how often each token position was chosen. Equal scores keep the order of the text.
    """
    ranked, token, line, counted = [], 0, 1, 0
    for begin, end in split_passages(text, start, stop):
        while token < len(ends) and ends[token] <= begin:
            token += 1
        first, total = token, 0
        while token < len(ends) and (token == first or ends[token - 1] < end):
            total += counts.get(token, 0)
            token += 1
        line += text.count("\n", counted or start, begin)
        counted = begin
        if total and token > first:
            ranked.append(Passage(begin, end, line, first, token - 1, total / (token - first), text[begin:end]))
        if token > first and ends[token - 1] > end:     # a token over the border belongs to both
            token -= 1
    ranked.sort(key=lambda passage: -passage.score)
    return ranked[:most]
