"""Facts in real text: a sentence at a random depth of a real document, asked for through the
model's chat template. Only questions that full attention answers say something about a method.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import LLM
from tools.common.documents import Text
from tools.compare.run import Answer, run_document
from tools.compare.turns import Turns
from tools.fidelity.columns import Column

PEOPLE = (
    "Alice Bruno Carla Dmitri Elena Farid Greta Hugo Irene Jonas Keiko Liam Marta Nadia Oscar Petra"
).split()
CITIES = "Lisbon Oslo Nairobi Quito Vienna Hanoi Dublin Prague Lima Sofia".split()
TRADES = "baker carpenter dentist farmer gardener pilot plumber sailor tailor weaver".split()
# sentence, question, values (None: five digits)
ASKED_FOR = (
    ("The pass key of {who} is {value}.", "What is the pass key of {who}?", None),
    ("{who} lives in {value}.", "In which city does {who} live?", CITIES),
    ("{who} works as a {value}.", "What is the job of {who}?", TRADES),
)
ROOM = 128  # tokens of a text that make way for the sentences and the chat template
LONGEST = 24  # tokens of an answer: a whole sentence of it


@dataclass(frozen=True)
class Job:
    """One document for run_document."""

    task: str
    length: int
    number: int
    conversations: int


class NeedlePaper:
    """A real text with sentences put into it, as tools.compare's run_document takes it: each is
    asked for in a conversation of its own.
    """

    def __init__(self, llm: LLM, text: Text, length: int, questions: int):
        self.llm, self.name, self.length = llm, text.name, length
        rng = random.Random(f"needles {text.name} {length}")
        who = rng.sample(PEOPLE, questions)
        self.asked, self.values, sentences = [], [], []
        for number, person in enumerate(who):
            sentence, question, values = ASKED_FOR[number % len(ASKED_FOR)]
            value = rng.choice(values) if values else str(rng.randrange(10_000, 100_000))
            self.values.append(value)
            self.asked.append(question.format(who=person) + " Answer in one short sentence.")
            sentences.append(sentence.format(who=person, value=value))
        cut = llm.tokenizer.decode(text.ids[: max(1, length - ROOM)]).strip()
        self.depths = [rng.uniform(0.02, 0.95) for _ in who]
        self.document = hidden(cut, sentences, self.depths)
        self.turns = Turns(llm.tokenizer, self.document, self.asked)
        self.right = [LONGEST] * questions
        self.job = Job("needle", length, 0, questions)

    def most(self, question: int) -> int:
        """Tokens after which an answer is cut."""
        return LONGEST

    def second(self, first: int) -> None:
        """No second questions."""

    @property
    def room(self) -> int:
        """Tokens of the session."""
        return len(self.turns.shared) + max(map(len, self.turns.own)) + LONGEST + 8

    def record(self, column: Column, question: int, turn: int, answer: Answer) -> dict[str, Any]:
        """One answer as a record."""
        text = self.llm.tokenizer.decode(answer.tokens)
        return {
            "stream": "needle",
            "column": column.label,
            "name": column.name,
            "budget": column.budget,
            "filters": column.filters,
            "wait": column.wait,
            "text": self.name,
            "length": self.length,
            "question": question,
            "depth": round(self.depths[question], 3),
            "expected": self.values[question],
            "said": text,
            "right": int(says(text, self.values[question])),
        }

    def records(
        self, columns: Sequence[Column], skip: Sequence[str] = (), steps: bool = False
    ) -> tuple[list[dict[str, Any]], float]:
        """(records of all columns, seconds). columns: full attention among them; steps: questions
        are read by the methods' own steps, and the records' stream is "asked".
        """
        capacity = min(self.llm.max_context, self.room)
        found, seconds, _ = run_document(self.llm, self, columns, capacity, skip, steps=steps)
        if steps:
            found = [{**record, "stream": "asked"} for record in found]
        return found, sum(seconds.values())


def hidden(text: str, sentences: Sequence[str], depths: Sequence[float]) -> str:
    """The text with every sentence as a line of its own at its depth, from 0 (the start) to 1."""
    lines = text.split("\n")
    # the last one first, so that the places before it stay
    for depth, sentence in sorted(zip(depths, sentences), reverse=True):
        lines.insert(_line_at(lines, depth * len(text)), sentence)
    return "\n".join(lines)


def _line_at(lines: Sequence[str], characters: float) -> int:
    """The line that begins so many characters into the text."""
    seen = 0
    for number, line in enumerate(lines):
        if seen >= characters:
            return number
        seen += len(line) + 1
    return len(lines)


def says(text: str, value: str) -> bool:
    """Whether the value stands in a text as a word of its own, in any case."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None
