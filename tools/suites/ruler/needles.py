"""Needles in a haystack: keys with values hidden in essays, in noise or among other needles."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from random import Random

from tools.suites.prompts.fitting import fresh
from tools.suites.prompts.instance import Instance
from tools.suites.ruler.placing import between, inserted
from tools.suites.ruler.sources import NOISE, texts

# the prompts are RULER's own (Apache-2.0): one value is asked for, or several
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n",
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)


@dataclass(frozen=True)
class Needles:
    """haystack: "noise" (pieces: sentences), "essay" (words) or "needle" (other needles). keys and
    values are "words", "numbers" (of 7 digits) or "uuids". hidden: keys; each: values of a key;
    asked: keys that are asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    hidden: int = 1
    each: int = 1
    asked: int = 1

    @property
    def least(self) -> int:
        """Pieces of the shortest context."""
        return {"noise": 5 * self.hidden, "essay": 40, "needle": 2}[self.haystack]

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt; no key and no value is there twice."""
        made: set[str] = set()
        key, value = (partial(_drawn, rng, kind) for kind in (self.keys, self.values))
        keys = [fresh(made, key) for _ in range(max(self.hidden, self.asked))]
        values = [[fresh(made, value) for _ in range(self.each)] for _ in keys]
        needles = [self._said(k, v) for k, own in zip(keys, values) for v in own]
        chosen = rng.sample(range(len(keys)), self.asked)
        rng.shuffle(needles)
        if self.haystack == "essay":
            context = inserted(rng, texts().sentences(pieces), needles)
        elif self.haystack == "noise":
            context = "\n".join(between(rng, noise(pieces), needles))
        else:
            lines = [self._said(fresh(made, key), fresh(made, value)) for _ in range(pieces)]
            context = "\n".join(between(rng, lines, needles))
        queries = [keys[number] for number in chosen]
        query = ", ".join(queries[:-1]) + ", and " + queries[-1] if self.asked > 1 else queries[0]
        one = self.asked * self.each == 1
        kind = self.values[:-1] if one else self.values
        before, question, prefix = (
            part.format(kind=kind, query=query) for part in (ONE if one else SEVERAL)
        )
        answers = [v for number in chosen for v in values[number]]
        evidence = [self._said(keys[number], v) for number in chosen for v in values[number]]
        return Instance(before, context, question, prefix, answers, evidence)

    def _said(self, key: str, value: str) -> str:
        return f"One of the special magic {self.values} for {key} is: {value}."


def noise(sentences: int) -> list[str]:
    """Lines of five sentences of noise each; the last has what is left."""
    return [
        " ".join(NOISE[: min(5, sentences - start)]) for start in range(0, max(1, sentences), 5)
    ]


def _drawn(rng: Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(texts().adjectives)}-{rng.choice(texts().nouns)}"
