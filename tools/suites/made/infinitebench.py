"""InfiniteBench's three synthetic tasks of retrieval (Zhang and others, "InfiniteBench: Extending
Long Context Evaluation Beyond 100K Tokens", ACL 2024, arXiv 2402.13718;
github.com/OpenBMB/InfiniteBench, MIT), at any length.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from engine.text.tokenizer import Tokenizer
from tools.suites.metrics.matches import first_number, value_named
from tools.suites.prompts.fitting import Build, fitted, fresh
from tools.suites.prompts.instance import Instance, asked_once
from tools.suites.prompts.task import Prompt, Task

# the prompts are InfiniteBench's own (MIT), those for models that complete a text
NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
PASS_KEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n\n",
    "The pass key is {key}. Remember it. {key} is the pass key.\n",
    "\n\nWhat is the pass key?",
    "\n\nThe pass key is",
)
DIGITS = (
    "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you "
    "about the important information there.\n\n",
    "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n",
    "\n\nWhat is the sequence of digits?",
    "\n\nThe sequence of digits is",
)
VALUES = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    "JSON data:\n",
    '\n\nKey: "{key}"\nThe value associated with the specified key is: ',
)
DEPTHS = 59  # of the 128K set
DIFFERS = (
    "InfiniteBench's depths are drawn among its 59 by each prompt's own seed (the original: every "
    "depth ten times, at 128K tokens); after a chat template the answer begins as in its prompts "
    "for base models",
)


@dataclass(frozen=True)
class Hidden:
    """One line in noise. words: before, line, question, beginning of the answer; twice: five times
    a digit of the key is doubled where it stands. pieces: lines of noise.
    """

    words: tuple[str, str, str, str]
    twice: bool

    least = 1

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt."""
        before, line, question, prefix = self.words
        digits = [str(rng.randint(0, 9)) for _ in range(5)]
        for extra in range(5 if self.twice else 0):
            place = rng.randint(0, 4 + extra)
            digits.insert(place, digits[place])
        key = "".join(digits)
        first = round(pieces * rng.randrange(DEPTHS) / (DEPTHS - 1))
        said = line.format(key=key)
        context = NOISE * first + said + NOISE * (pieces - first)
        return Instance(before, context, question, prefix, [key], [said])


@dataclass(frozen=True)
class Pairs:
    """Keys and values, UUIDs all, as JSON. pieces: pairs."""

    least = 2

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt; no key and no value is there twice."""
        made: set[str] = set()
        drawn: list[str] = [
            fresh(made, lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))
            for _ in range(2 * pieces)
        ]
        pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
        key, value = pairs[rng.randrange(len(pairs))]
        shown = [f'"{k}": "{v}"' for k, v in pairs]
        before, question = VALUES
        context = "{" + ", ".join(shown) + "}"
        said = f'"{key}": "{value}"'
        return Instance(before, context, question.format(key=key), "", [value], [said])


@dataclass(frozen=True)
class Kind:
    """written: tokens of an answer, as published."""

    build: Build
    written: int
    compare: Callable[[str, str], float]


KINDS = {
    "passkey": Kind(Hidden(PASS_KEY, False), 6, first_number),
    "number_string": Kind(Hidden(DIGITS, True), 12, first_number),
    "kv_retrieval": Kind(Pairs(), 50, value_named),
}


def task(name: str, seed: int) -> Task:
    """A task of InfiniteBench."""
    make = partial(_prompt, name, seed)
    return Task(
        "infinitebench", f"infinitebench/{name}", KINDS[name].written, make, differs=DIFFERS
    )


def _prompt(
    name: str, seed: int, tokenizer: Tokenizer, length: int, number: int, room: int
) -> Prompt:
    kind = KINDS[name]
    found = fitted("infinitebench", name, kind.build, kind.written, length, number, tokenizer, seed)
    return asked_once(tokenizer, found, partial(kind.compare, expected=found.answers[0]))
