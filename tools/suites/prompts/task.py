"""One task of a suite, and one document of it with its questions in a model's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.text.tokenizer import Tokenizer

Score = Callable[[str], float]  # an answer's text -> 0 to 1


@dataclass(frozen=True)
class Prompt:
    """A document with its questions.

    shared: token ids in front of every question. own: ids that follow, per question. expected: what
    each answer is compared with; scores: by which rule. depth: where the evidence stands, 0 the
    start, 1 the end, None where nobody knows. cut: tokens of the document that were left out.
    part: of a test set that reports its parts one by one.
    """

    shared: list[int]
    own: list[list[int]]
    expected: list[list[str]]
    scores: list[Score]
    depth: float | None = None
    cut: int = 0
    part: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of the longest of the whole prompts."""
        return len(self.shared) + max(map(len, self.own))


@dataclass(frozen=True)
class Task:
    """A task as a run asks it.

    name: as `--tasks` and reports say it. written: tokens that an answer may have.
    make(tokenizer, length, number, room) is document `number`: a made one has, with its answer,
    `length` tokens; a brought one is cut to `length` as its benchmark says, and again where the
    prompt has more than `room` tokens.
    sizes: per document of a local file its characters, None for what is made at any length; asked:
    per document its questions. data: what the answers rest on, by name: a file's digest, who finds
    words. differs: lines that say what is not the original's.
    """

    suite: str
    name: str
    written: int
    make: Callable[[Tokenizer, int, int, int], Prompt]
    sizes: tuple[int, ...] | None = None
    asked: tuple[int, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    differs: tuple[str, ...] = ()

    def documents(self, samples: int | None) -> int:
        """How many documents a run asks about: so many, or of None all of a file and 10 made."""
        if self.sizes is None:
            return 10 if samples is None else samples
        return len(self.sizes) if samples is None else min(samples, len(self.sizes))

    def questions(self, number: int) -> int:
        """Questions about a document."""
        return self.asked[number] if self.asked else 1
