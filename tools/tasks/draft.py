"""What a task generator makes: a list of document pieces, and questions whose evidence is known
piece by piece.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


@dataclass
class Draft:
    """A document before it is cut to length.

    head, foot: text before and after the pieces. pieces: the document's entries in order, each with
    its own line end or space. questions, answers: what is asked, in order, and the whole exact
    answer. evidence: per question, indices into `pieces`. exact: the part of each answer that must
    be right (the value itself) where an answer in other words would do as well.
    """

    head: str = ""
    pieces: list[str] = field(default_factory=list)
    foot: str = ""
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    exact: list[str] = field(default_factory=list)
    evidence: list[list[int]] = field(default_factory=list)

    @property
    def document(self) -> str:
        """The whole text."""
        return self.head + "".join(self.pieces) + self.foot

    def ask(self, question: str, answer: str, exact: str, evidence: list[int]) -> None:
        """Add one question."""
        self.questions.append(question)
        self.answers.append(answer)
        self.exact.append(exact)
        self.evidence.append(list(evidence))


@dataclass(frozen=True)
class Task:
    """A skill with exact answers.

    build(rng, pieces, questions, depth) -> Draft with about `pieces` entries; `depth` in [0, 1]
    places the first question's evidence. min_pieces: the fewest entries a document of one question
    needs; each further question needs `per_question` more. max_questions: how many different
    questions one document can carry. trained: the shipped model was trained on this skill.
    """

    name: str
    note: str
    build: Callable[[Random, int, int, float | None], Draft]
    min_pieces: int = 2
    per_question: int = 1
    max_questions: int = 200
    trained: bool = True

    def needed(self, questions: int) -> int:
        """The fewest pieces for so many questions."""
        return self.min_pieces + self.per_question * (questions - 1)


def slots(rng: Random, total: int, count: int, depth: float | None) -> list[int]:
    """`count` different places out of `total`, in random order; the first stands at `depth` where
    one is given.
    """
    first = rng.randrange(total) if depth is None else min(total - 1, round(depth * (total - 1)))
    rest = rng.sample(range(total - 1), count - 1) if count > 1 else []
    return [first] + [place + (place >= first) for place in rest]
