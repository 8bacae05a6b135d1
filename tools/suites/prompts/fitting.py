"""A made prompt of a given length: as much context as fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Protocol

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.suites.prompts.instance import Instance, prompt_ids
from tools.tasks.sample import most_pieces, seeded

SEED = 42  # RULER's, and ours for all that is made
TRIES = 1000  # to draw something new


class Build(Protocol):
    """Builds a prompt. least: pieces of the shortest context."""

    @property
    def least(self) -> int: ...

    def __call__(self, rng: Random, pieces: int) -> Instance: ...


def fresh(made: set[str], draw: Callable[[], str]) -> str:
    """Something drawn that was not made before. Raises UsageError where nothing new comes."""
    for _ in range(TRIES):
        if (found := draw()) not in made:
            made.add(found)
            return found
    raise UsageError(
        f"found no new word after {len(made)} different ones: ask for a shorter length, or install "
        "wonderwords (pip install '.[benchmarks]'), which has more"
    )


def fitted(
    suite: str,
    name: str,
    build: Build,
    written: int,
    length: int,
    number: int,
    tokenizer: Tokenizer,
    seed: int,
) -> Instance:
    """Prompt `number` of a task with an answer of `written` tokens: the most pieces of context with
    which both have at most `length` tokens. Raises UsageError for a length that is too short.
    """
    made: dict[int, Instance] = {}

    def tokens(pieces: int) -> int:
        if pieces not in made:
            found = build(seeded(f"{suite}/{name}", seed * 100_000 + number), pieces)
            made[pieces] = replace(found, tokens=len(prompt_ids(tokenizer, found)))
        return made[pieces].tokens

    room = length - written
    if tokens(build.least) > room:
        raise UsageError(
            f"task {name} needs at least {tokens(build.least) + written} tokens, not {length}"
        )
    return made[most_pieces(tokens, build.least, room)]
