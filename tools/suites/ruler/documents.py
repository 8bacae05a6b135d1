"""Questions about documents among others, from a local file of SQuAD or HotpotQA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle
from pathlib import Path
from random import Random
from typing import Any

from engine.base.errors import UsageError
from tools.suites.prompts.instance import Instance

# the prompt is RULER's own (Apache-2.0)
RULE = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
BEFORE = RULE + "The following are given documents.\n\n"
QUESTION = "\n\n" + RULE + "Question: {query}"
PREFIX = " Answer:"


@dataclass(frozen=True)
class Question:
    """own: documents that it is about; near: others of the same article."""

    query: str
    answers: list[str]
    own: tuple[str, ...]
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class Documents:
    """number: which question of the file. pieces: words of documents that it is not about, those of
    the same article first; the last of them is cut, so that a prompt has the length asked for.
    """

    path: Path
    kind: str
    number: int

    least = 1

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt."""
        questions, pool = read(self.path, self.kind)
        asked = questions[self.number % len(questions)]
        near, known = list(asked.near), {*asked.own, *asked.near}
        rng.shuffle(near)
        far = rng.sample(range(len(pool)), len(pool))
        others = [*near, *(pool[place] for place in far if pool[place] not in known)]
        taken, left = list(asked.own), pieces
        for text in chain(others, cycle(pool)):  # over and over where there are too few
            words = text.split(" ")
            taken.append(" ".join(words[:left]))
            left -= len(words)
            if left <= 0:
                break
        rng.shuffle(taken)
        context = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(taken, 1))
        question = QUESTION.format(query=asked.query)
        return Instance(BEFORE, context, question, PREFIX, asked.answers, list(asked.own))


@cache
def read(path: Path, kind: str) -> tuple[list[Question], list[str]]:
    """(questions, documents) of a file. kind: "squad" (dev-v2.0.json) or "hotpotqa"
    (hotpot_dev_distractor_v1.json). Raises UsageError for a file that is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; expected a JSON file of {kind}") from None
    try:
        questions = list(_squad(data) if kind == "squad" else _hotpotqa(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{path}: found no {kind} ({type(error).__name__}: {error}); expected "
            + ("dev-v2.0.json" if kind == "squad" else "hotpot_dev_distractor_v1.json")
        ) from None
    if not questions:
        raise UsageError(f"{path}: found no question that can be answered, expected at least one")
    return questions, sorted({text for q in questions for text in (*q.own, *q.near)})


def _squad(data: dict[str, Any]) -> list[Question]:
    found = []
    for article in data["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            near = tuple(dict.fromkeys(text for text in texts if text != own))
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = [answer["text"] for answer in asked["answers"]]
                    found.append(Question(asked["question"], answers, (own,), near))
    return found


def _hotpotqa(data: list[dict[str, Any]]) -> list[Question]:
    return [
        Question(
            row["question"],
            [row["answer"]],
            tuple(f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]),
        )
        for row in data
    ]
