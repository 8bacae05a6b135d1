"""One prompt of RULER: instructions, context, question, the beginning of the answer, and what must
be in it; and the most context that fits a length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.eval.prompts import common_start

Build = Callable[[Random, int], "Instance"]  # (random source, pieces of context) -> Instance
TRIES = 1000  # to draw something new
DEPTHS = tuple(round(100 * number / 39) for number in range(40))  # per cent, as published


@dataclass(frozen=True)
class Instance:
    """before, context, question: texts of the prompt in order; prefix: how the answer begins;
    answers: what is looked for in it. evidence: texts of the context that it rests on.
    """

    before: str
    context: str
    question: str
    prefix: str
    answers: list[str]
    evidence: list[str] = field(default_factory=list)
    tokens: int = 0  # of the whole prompt, in a model's tokenizer

    @property
    def depths(self) -> list[float]:
        """Where each piece of evidence stands in the context: 0 its start, 1 its end."""
        room = max(1, len(self.context))
        return [self.context.index(text) / room for text in self.evidence]


def prompt_ids(tokenizer: Tokenizer, instance: Instance, question: str | None = None) -> list[int]:
    """Token ids of a prompt through the model's chat template where there is one; the answer's
    beginning follows it. question: another than its own.
    """
    asked = instance.question if question is None else question
    text = instance.before + instance.context + asked
    plain = tokenizer.template is None
    written = text if plain else tokenizer.render([{"role": "user", "content": text}])
    return tokenizer.encode(written + instance.prefix, special=plain)


def split_ids(tokenizer: Tokenizer, instance: Instance) -> tuple[list[int], list[int]]:
    """(ids up to the question, the rest): the first can be read before anything is asked."""
    whole = prompt_ids(tokenizer, instance)
    shared = common_start([whole, prompt_ids(tokenizer, instance, "\n?")])
    return whole[:shared], whole[shared:]


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
