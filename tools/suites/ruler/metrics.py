"""Whether an answer holds what was asked for: RULER's two string matches, per answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

UNPRINTED = re.compile(r"[\x00-\x1f]")


def plain(answer: str) -> str:
    """An answer as it is judged: in small letters, control characters as line ends."""
    return UNPRINTED.sub("\n", answer.strip()).strip().lower()


def match_all(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that stand in the answer, in any case of letters."""
    text = plain(answer)
    return sum(each.lower() in text for each in expected) / len(expected)


def match_part(answer: str, expected: Sequence[str]) -> float:
    """1 where one of the expected strings stands in the answer, in any case of letters, else 0."""
    text = plain(answer)
    return float(any(each.lower() in text for each in expected))
