"""A made prompt in its parts: instructions, context, question, the beginning of the answer, and
what must be in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from engine.text.tokenizer import Tokenizer
from tools.suites.prompts.task import Prompt, Score
from tools.tasks.prompts import common_start

WORDS = re.compile(r"\w")


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
    if tokenizer.template is None:
        return tokenizer.encode(text + instance.prefix)
    written = tokenizer.render([{"role": "user", "content": text}])
    return tokenizer.encode(written + instance.prefix.lstrip("\n"), special=False)


def split_ids(tokenizer: Tokenizer, instance: Instance) -> tuple[list[int], list[int]]:
    """(ids up to the question, the rest): the first can be read before anything is asked."""
    whole = prompt_ids(tokenizer, instance)
    shared = common_start([whole, prompt_ids(tokenizer, instance, altered(instance.question))])
    return whole[:shared], whole[shared:]


def altered(question: str) -> str:
    """A question with other letters from its first one on, in the same lines: a chat template that
    puts the last paragraph elsewhere finds the same ones.
    """
    return WORDS.sub(lambda found: "y" if found[0] == "x" else "x", question) + "?"


def asked_once(tokenizer: Tokenizer, instance: Instance, score: Score) -> Prompt:
    """The Prompt of an instance, whose answer `score` judges."""
    shared, own = split_ids(tokenizer, instance)
    depths = instance.depths
    depth = sum(depths) / len(depths) if depths else None
    return Prompt(shared, [own], [instance.answers], [score], depth)
