"""Where needles stand in a context: at one of 40 depths between sentences, or in front of lines."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

DEPTHS = tuple(round(100 * number / 39) for number in range(40))  # per cent, as published


def inserted(rng: Random, sentences: Sequence[str], needles: Sequence[str]) -> str:
    """Sentences with needles between them, each at another of DEPTHS, in the order given."""
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    last = 0
    for depth, needle in zip(depths, needles, strict=True):
        at = len(sentences) * depth // 100
        parts += [*sentences[last:at], needle]
        last = at
    return " ".join([*parts, *sentences[last:]])


def between(rng: Random, lines: Sequence[str], needles: Sequence[str]) -> list[str]:
    """Lines with needles in front of as many different ones, in the order given."""
    found = list(lines)
    places = sorted(rng.sample(range(len(found)), len(needles)))
    for shift, (place, needle) in enumerate(zip(places, needles, strict=True)):
        found.insert(place + shift, needle)
    return found
