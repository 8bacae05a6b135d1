"""Training rows of the shipped model: dialogues over task documents, dense warm-up tasks, stretched
positions. A row depends on its seed and place only, so a run's data is the same in every process
and after a resume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from tools.studies.pocket.tokenizer import ASSISTANT, BOS, END, PAD, USER
from tools.tasks import TASKS
from tools.tasks.talk import outside
from tools.tasks.words import COLORS, NOUNS, prose

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Spans = list[tuple[int, str, int, int]]  # answers: (row, task, start, stop)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans]  # see `batch`
# kinds of rows that no user asks for, dense in supervision
WARM_UP = ("recall", "copy", "arithmetic", "delayed")
# task: weight in rows of at least this many tokens
MIXTURE = {  # sums are learnt last and carry 2StageRetr: three of 17 rows up to 1,024 tokens
    64: {"recall": 5, "copy": 1, "arithmetic": 2.5, "delayed": 2},
    128: {
        "recall": 2,
        "copy": 0.5,
        "arithmetic": 3,
        "delayed": 1.5,
        "kv": 3,
        "facts": 3,
        "passkey": 1,
        "two_stage": 2,
        "chains": 2,
        "frequent": 1,
        "needle_multi_key": 1,
    },
    256: {
        "recall": 0.7,
        "copy": 0.2,
        "arithmetic": 3,
        "delayed": 0.7,
        "kv": 2.5,
        "facts": 4.5,
        "passkey": 1,
        "two_stage": 2,
        "chains": 2.5,
        "frequent": 1.2,
        "needle": 0.3,
        "needle_multi_key": 1,
        "number_string": 0.2,
    },
    512: {
        "arithmetic": 3,
        "delayed": 0.3,
        "kv": 2.5,
        "facts": 4.5,
        "passkey": 1,
        "two_stage": 2,
        "chains": 2.5,
        "frequent": 1.2,
        "needle": 0.3,
        "needle_multi_key": 1,
        "number_string": 0.2,
        "mixed": 2,
    },
    2048: {
        "arithmetic": 1.5,
        "delayed": 0.3,
        "kv": 2.5,
        "facts": 4.5,
        "passkey": 1.5,
        "two_stage": 2,
        "chains": 2.5,
        "frequent": 1.5,
        "needle": 0.3,
        "needle_multi_key": 1,
        "number_string": 0.2,
        "mixed": 2,
    },
}


def row_random(seed: int, step: int, row: int) -> Random:
    """The random source of one row of one step."""
    return Random(
        int.from_bytes(hashlib.sha256(f"{seed}/{step}/{row}".encode()).digest()[:8], "big")
    )


def mixture(length: int) -> dict[str, float]:
    """The weights that hold for rows of `length` tokens."""
    return MIXTURE[max(k for k in MIXTURE if k <= max(length, 64))]


@dataclass
class Row:
    """One row of tokens. kind: per token 0 = not learnt, 1 = document, 2 = answer. spans: (task,
    start, stop) of answers.
    """

    ids: list[int]
    kind: list[int]
    spans: list[tuple[str, int, int]]


class RowMaker:
    """Makes rows of a length with a tokenizer (tokenizers.Tokenizer)."""

    def __init__(self, tokenizer: Tokenizer):
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        # random tokens of the warm-up rows lie below
        self.top = min(5000, tokenizer.get_vocab_size())
        texts = (tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size()))
        # of a line or sentence
        self.ends = {
            END,
            *(index for index, text in enumerate(texts) if text.endswith(("\n", "."))),
        }
        self.size: dict[str, float] = {}
        for name, task in TASKS.items():
            if task.trained:  # tokens per piece, to guess how many pieces fill a document
                pieces = max(40, task.needed(1))
                self.size[name] = (
                    len(self.encode(task.build(Random(7), pieces, 1, None).document)) / pieces
                )

    def row(self, rng: Random, length: int) -> Row:
        """One row of exactly `length` + 1 ids (the last is only a target)."""
        weights = mixture(length)
        kind = rng.choices(list(weights), list(weights.values()))[0]
        row = Row([BOS], [0], [])
        if kind in WARM_UP:
            getattr(self, "_" + kind)(rng, row, length)
        else:
            used: set[str] = set()
            while length - len(row.ids) > 48 and len(used) < 4:
                if kind not in used and kind not in WARM_UP:
                    self._episode(rng, row, kind, length)
                used.add(kind)
                kind = rng.choices(list(weights), list(weights.values()))[0]
        row.ids, row.kind = row.ids[: length + 1], row.kind[: length + 1]
        row.spans = [(t, a, b) for t, a, b in row.spans if b <= length]
        pad = length + 1 - len(row.ids)
        row.ids += [PAD] * pad
        row.kind += [0] * pad
        return row

    def _add(self, row: Row, ids: list[int], kind: int) -> None:
        row.ids += ids
        row.kind += [kind] * len(ids)

    def _episode(self, rng: Random, row: Row, name: str, length: int) -> None:
        task, room = TASKS[name], length - len(row.ids)
        share = rng.uniform(0.35, 0.7) if length <= 512 else rng.uniform(0.5, 0.85)
        head = (
            self.encode(opening(rng, length))
            if rng.random() < (0.15 if length < 256 else 0.35)
            else []
        )
        pieces = int((room * share - len(head)) / self.size[name])
        if pieces < task.needed(1):
            return
        questions = min(
            task.max_questions,
            (pieces - task.min_pieces) // task.per_question + 1,
            2 + int(room * (1 - share) / 18),
        )
        if rng.random() < 0.1:
            questions = min(questions, rng.randint(1, 3))
        draft = task.build(rng, pieces, max(1, questions), None)
        if length >= 256 and rng.random() < 0.15:  # something else in between
            draft.pieces.insert(rng.randrange(pieces), prose(rng, rng.randint(1, 2)) + "\n")
        document = head + self.encode(draft.document)
        if len(document) > room - 30:
            return
        self._add(row, document, 1)
        order = list(range(len(draft.questions)))
        rng.shuffle(order)
        for index in order:
            question, answer, label = draft.questions[index], draft.answers[index], name
            if rng.random() < 0.03:
                question, answer = outside(rng)
                label = "refuse"
            self._turn(row, question, answer, label)
            if len(row.ids) > length:
                return

    def _turn(self, row: Row, question: str, answer: str, label: str) -> None:
        self._add(row, [USER], 0)
        self._add(row, self.encode(question), 0)
        self._add(row, [ASSISTANT], 0)
        ids = self.encode(answer) + [END]
        row.spans.append((label, len(row.ids), len(row.ids) + len(ids)))
        self._add(row, ids, 2)

    def _recall(self, rng: Random, row: Row, length: int) -> None:
        """Lines of key and value of one or two tokens, then the same lines shuffled; the values of
        the second half are learnt.
        """
        style = rng.randrange(4)
        # 5..1300 in one token: numbers and frequent words alike, so that matching is not tied to
        # any kind of token
        token = lambda: [rng.randrange(261, self.top)]  # noqa: E731
        number = lambda: self.encode(str(rng.randrange(100, 1000)))  # noqa: E731
        two = lambda: self.encode(str(rng.randrange(100000, 1000000)))  # noqa: E731
        key, value = ((token, token), (number, token), (two, two), (number, number))[style]
        colon, end = self.encode(rng.choice((":", ": 1", " = 1")))[:1], self.encode("\n")
        seen: set[tuple[int, ...]] = set()
        lines: list[tuple[list[int], list[int]]] = []
        while sum(len(k) + len(v) + 2 for k, v in lines) < length / 2 - 8:
            k = key()
            if tuple(k) not in seen:
                seen.add(tuple(k))
                lines.append((k, value()))
        for k, v in lines:
            self._add(row, end + k + colon + v, 0)
        rng.shuffle(lines)
        for k, v in lines:
            self._add(row, end + k + colon, 0)
            row.spans.append(("recall", len(row.ids), len(row.ids) + len(v)))
            self._add(row, v, 2)

    def _copy(self, rng: Random, row: Row, length: int) -> None:
        """Random tokens repeated with a period; everything after the first period is learnt."""
        period = rng.randint(4, max(5, int(length / 2.5)))
        block = [rng.randrange(261, self.top) for _ in range(period)]
        self._add(row, block, 0)
        while len(row.ids) < length:
            row.spans.append(("copy", len(row.ids), len(row.ids) + period))
            self._add(row, block, 2)

    def _delayed(self, rng: Random, row: Row, length: int) -> None:
        """A dictionary, then its keys in another order, each with its value some words later, as in
        2StageRetr's answer; the values are learnt. Without it 2StageRetr's second half was not
        learnt in 5 M tokens (docs/LOG.md).
        """
        lines = max(2, length // 13)  # five tokens a line of the dictionary, eight a question
        start = rng.randrange(max(1, 1000 - lines))
        keys = (
            rng.sample(range(1000), min(lines, 900))
            if rng.random() < 0.5
            else list(range(start, min(1000, start + lines)))
        )
        values = [rng.choice(COLORS) for _ in keys]
        for key, value in zip(keys, values, strict=True):
            self._add(row, self.encode(f"{key}: {value}\n"), 0)
        # each once: a second time it could be copied from the first
        for index in rng.sample(range(len(keys)), len(keys)):
            self._add(row, self.encode(f"\n{keys[index]}, the corresponding color is"), 0)
            ids = self.encode(f" {values[index]}")
            row.spans.append(("delayed", len(row.ids), len(row.ids) + len(ids)))
            self._add(row, ids, 2)

    def _arithmetic(self, rng: Random, row: Row, length: int) -> None:
        """Lines of sums below 1,000 as 2StageRetr writes them; the sums are learnt."""
        while len(row.ids) < length:
            b = rng.randint(1, 20) if rng.random() < 0.85 else rng.randint(1, 99)
            a = rng.randrange(0, 1000 - b) if rng.random() < 0.7 else rng.randrange(0, 200)
            self._add(row, self.encode(f"\n{a} + {b} = "), 0)
            ids = self.encode(str(a + b))
            row.spans.append(("arithmetic", len(row.ids), len(row.ids) + len(ids)))
            self._add(row, ids, 2)


def opening(rng: Random, length: int) -> str:
    """Text before a document that its questions do not need: prose of any words, a title or a line
    of notes.
    """
    kind, most = rng.random(), 2 if length < 256 else 5
    if kind < 0.6:
        return prose(rng, rng.randint(1, most)) + rng.choice(("\n", "\n\n"))
    words = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(1, 4 * most)))
    return f"# {words.capitalize()}\n\n" if kind < 0.8 else f"Notes on {words}\n"


def places(rng: Random, length: int, limit: int, chance: float, starts: list[int]) -> list[int]:
    """Positions of a row: 0.., or with probability `chance` stretched to a length drawn
    log-uniformly below `limit`. The stretch is made of jumps at one to eight of `starts`, where a
    line or a sentence begins: no look-back could work across a jump inside one.
    """
    if rng.random() >= chance or length >= limit:
        return list(range(length))
    gap = int(length * (limit / length) ** rng.random()) - length
    cuts = sorted(rng.choice(starts) for _ in range(rng.randint(1, 8)))
    marks = sorted(rng.random() for _ in cuts)
    jumps = [int(gap * (b - a)) for a, b in zip([0.0, *marks[:-1]], marks, strict=True)]
    out, shift, at = [], 0, 0
    for index in range(length):
        while at < len(cuts) and cuts[at] <= index:
            shift += jumps[at]
            at += 1
        out.append(index + shift)
    return out


def batch(
    maker: RowMaker,
    seed: int,
    step: int,
    first: int,
    rows: int,
    length: int,
    stretch: float,
    limit: int,
) -> Batch:
    """(ids [rows, L + 1], positions [rows, L], kind of each target [rows, L], answers), tensors
    int64; start and stop of an answer count targets.
    """
    ids, where, kinds = [], [], []
    spans: Spans = []
    for index in range(rows):
        rng = row_random(seed, step, first + index)
        row = maker.row(rng, length)
        ids.append(row.ids)
        kinds.append(row.kind[1:])
        starts = [0] + [
            place + 1 for place, token in enumerate(row.ids[: length - 1]) if token in maker.ends
        ]
        where.append(places(rng, length, limit, stretch, starts))
        spans += [(index, task, start - 1, stop - 1) for task, start, stop in row.spans]
    return torch.tensor(ids), torch.tensor(where), torch.tensor(kinds), spans
