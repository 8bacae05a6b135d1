"""What a table or figure of a paper is to this program: what it shows, the paper's own settings and
figures with their source, and the commands of tools that measure the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# {method as our reports name it: {column: figure}}
Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Command:
    """One run of a program of tools.

    program: a name of tools.paper.programs.PROGRAMS. flags: its own, beside model, lengths, limit
    and folder, which tools.paper gives. label: what stands before its methods where a table has
    several commands.
    """

    program: str
    flags: str
    label: str = ""


@dataclass(frozen=True)
class Table:
    """A table or figure by name.

    about: what it shows. settings: the paper's model, filter layers, budget, length and card, in
    words. figures: {alias of a model of the paper: its rows}, source: where they stand. unit: of
    them. lengths: the paper's tokens; small: those that are run without a card. limit: answers,
    texts or timed steps where no --limit is given. commands: what runs, or line: the measurement
    of tools.paper.lines that does. card: without one it is not measured, unless --device cpu asks
    for it. cards: how many the paper ran it on. suite: whose local files it needs. why: why it
    cannot be reproduced here. differs: what is not as in the paper where it runs.
    """

    name: str
    paper: str
    place: str
    about: str
    settings: str
    figures: Mapping[str, Rows] = field(default_factory=dict)
    source: str = ""
    unit: str = "per cent"
    lengths: tuple[int, ...] = (131072,)
    small: tuple[int, ...] = (1024,)
    limit: int = 20
    commands: tuple[Command, ...] = ()
    line: str = ""
    card: bool = False
    cards: int = 1
    suite: str = ""
    why: str = ""
    differs: str = ""
