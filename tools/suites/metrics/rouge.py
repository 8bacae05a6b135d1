"""ROUGE-L: the longest common subsequence of words of an answer and a reference (Lin, 2004).

Two benchmarks, two packages, two rules. LongBench scores as the package rouge 1.0.1 does: sentences
end at a full stop, each reference sentence is compared with each sentence of the answer, and words
are counted once however often they stand there. L-Eval scores as rouge-score does: one subsequence
of the whole texts, words in small letters of a-z and digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.suites.metrics.chinese import words

TINY = 1e-8  # the package's, so that 0 / 0 is 0
LETTERS = re.compile(r"[a-z0-9]+")


def rouge_l(answer: str, expected: str) -> float:
    """LongBench's rouge: F of ROUGE-L over sentences and distinct words. 0 for a text without any
    sentence; no limit to a sentence's length (the package fails beyond Python's recursion).
    """
    found, wanted = _sentences(answer), _sentences(expected)
    if not found or not wanted:
        return 0.0
    shared = {word for one in wanted for other in found for word in _common(one, other)}
    precision = len(shared) / len({word for one in found for word in one})
    recall = len(shared) / len({word for one in wanted for word in one})
    return 2 * precision * recall / (precision + recall + TINY)


def chinese_rouge_l(answer: str, expected: str) -> float:
    """LongBench's rouge_zh: the same over the words of Chinese texts."""
    return rouge_l(" ".join(words(answer)), " ".join(words(expected)))


def whole_rouge_l(answer: str, expected: str) -> float:
    """L-Eval's rougeL: F1 of one longest common subsequence of the whole texts."""
    found, wanted = (LETTERS.findall(text.lower()) for text in (answer, expected))
    length = len(_common(wanted, found))
    if not length:
        return 0.0
    precision, recall = length / len(found), length / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    """The words of every part between full stops; a part of white space alone has one, which is
    empty, as the package counts.
    """
    return [part.split() or [""] for part in text.split(".") if part]


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """A longest common subsequence. Of several it is the one that, read from the ends, gives up a
    word of `other` unless one of `one` costs less: which words it has decides the score.
    """
    before = [0] * (len(other) + 1)
    lengths = [before]
    for word in one:
        row = [0]
        for place, against in enumerate(other):
            row.append(before[place] + 1 if word == against else max(before[place + 1], row[-1]))
        lengths.append(row)
        before = row
    i, j, found = len(one), len(other), []
    while i and j:
        if one[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            found.append(one[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
