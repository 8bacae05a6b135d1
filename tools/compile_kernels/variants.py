"""The variants of the shipped cases: every distinct kernel, configuration and specialisation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.load.ahead.recording import Variant, recorded, specialise
from kernels.launch.shapes import Card, imagined
from tools.compile_kernels.calls import call
from tools.compile_kernels.cases import Case


@dataclass
class Launch(Variant):
    """A variant of a case."""

    case: Case


def variants(cases: Iterable[Case], capability: tuple[int, int] = (8, 0)) -> list[Launch]:
    """Every distinct launch of the cases, in order. A variant that several cases share belongs to
    the first of them. capability: of the GPU on which they would be launched.
    """
    found: dict[tuple, Launch] = {}
    for case in cases:
        with recorded() as launches, imagined(Card(capability)):
            call(case)
        for launched in launches:
            variant = Launch(**vars(specialise(launched)), case=case)
            found.setdefault(variant.key, variant)
    return list(found.values())
