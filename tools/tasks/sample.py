"""One sample of a task at an exact length: builds the task's document with more and more pieces
until it fits.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.tasks.draft import Draft, Task
from tools.tasks.registry import TASKS
from tools.tasks.words import NOUNS
from weights.errors import UsageError

TOLERANCE = 0.02


@dataclass(frozen=True)
class Sample:
    """One document with questions.

    document: the text, without chat marks. questions, answers: as many of each. meta: task, seed,
    tokens, pieces, depths (where each question's evidence stands in the document, from 0, its
    start, to 1; the mean of several pieces), exact (the part of each answer that is the value
    itself), evidence (the text of the pieces that each answer rests on).
    """

    document: str
    questions: list[str]
    answers: list[str]
    meta: dict


def seeded(task: str, seed: int) -> Random:
    """The generator's random source: the same for a task and seed in every process."""
    return Random(int.from_bytes(hashlib.sha256(f"{task}/{seed}".encode()).digest()[:8], "big"))


def _pad(rng: Random, count_tokens: Callable[[str], int], room: int) -> str:
    """A first line of about `room` tokens, less than a piece of the document."""
    words = ["Notes", "on"] + [rng.choice(NOUNS) for _ in range(max(1, room))]
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(" ".join(words[:middle]) + "\n") <= room:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low]) + "\n" if low else ""


def _fit(
    task: Task,
    length: int,
    count_tokens: Callable[[str], int],
    seed: int,
    questions: int,
    depth: float | None,
) -> tuple[Draft, int]:
    """The draft with the most pieces that is not longer than `length`, and its tokens; a wider
    bracket is halved until one piece is left.
    """
    needed = task.needed(questions)
    made: dict[int, tuple[Draft, int]] = {}

    def at(pieces: int) -> tuple[Draft, int]:
        if pieces not in made:
            draft = task.build(seeded(task.name, seed), pieces, questions, depth)
            made[pieces] = draft, count_tokens(draft.document)
        return made[pieces]

    smallest = at(needed)[1]
    if smallest > length * (1 + TOLERANCE):
        raise UsageError(
            f"task {task.name} with {questions} question(s) needs at least {smallest} tokens, "
            f"not {length}: ask for a longer document or fewer questions"
        )
    return at(most_pieces(lambda pieces: at(pieces)[1], needed, length))


def most_pieces(tokens: Callable[[int], int], least: int, length: int) -> int:
    """The most pieces, from `least` on, with which a text has at most `length` tokens; fewer where
    that is within a quarter of TOLERANCE. tokens(pieces) grows with the pieces, about.
    """
    low, high = least, None
    for _ in range(40):
        found = tokens(low)
        if found >= length * (1 - TOLERANCE / 4) or (high is not None and high - low <= 1):
            break
        guess = max(low + 1, int(low * length / max(1, found)))
        if high is not None:
            guess = min(guess, high - 1) if guess < high else (low + high) // 2
            guess = max(guess, low + 1)
        if tokens(guess) <= length:
            low = guess
        else:
            high = guess
    return low


def make_sample(
    task: str,
    length: int,
    count_tokens: Callable[[str], int],
    seed: int,
    questions: int = 1,
    depth: float | None = None,
) -> Sample:
    """One document of `length` tokens (within 2%) with `questions` questions and their exact
    answers.

    count_tokens: the length of a text in the tokenizer of the model that will read it, without
    special tokens. depth: where the first question's evidence stands, in [0, 1]; None draws it
    uniformly. Raises UsageError for an unknown task, a length too short for the task, more
    questions than it has, or a depth outside [0, 1].
    """
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}: one of {', '.join(TASKS)}")
    kind = TASKS[task]
    if not 1 <= questions <= kind.max_questions:
        raise UsageError(
            f"task {task} takes 1 to {kind.max_questions} questions per document, not {questions}"
        )
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise UsageError(f"depth {depth} is not in [0, 1]")
    if length < 1:
        raise UsageError(f"a document of {length} tokens cannot be made")
    draft, tokens = _fit(kind, length, count_tokens, seed, questions, depth)
    room = length - tokens
    if room > 0:
        draft.head = _pad(seeded(task + "/pad", seed), count_tokens, room) + draft.head
        tokens = count_tokens(draft.document)
    if abs(tokens - length) > max(1, length * TOLERANCE):
        raise UsageError(
            f"task {task} cannot make a document of {length} tokens in this tokenizer "
            f"(nearest: {tokens}): ask for a longer one"
        )
    starts, at = [], len(draft.head)
    for piece in draft.pieces:
        starts.append(at)
        at += len(piece)
    whole = max(1, len(draft.document))
    depths = [sum(starts[i] for i in e) / len(e) / whole if e else None for e in draft.evidence]
    meta = {
        "task": task,
        "seed": seed,
        "tokens": tokens,
        "pieces": len(draft.pieces),
        "depths": depths,
        "exact": draft.exact,
        "evidence": [[draft.pieces[i] for i in e] for e in draft.evidence],
    }
    return Sample(draft.document, draft.questions, draft.answers, meta)
