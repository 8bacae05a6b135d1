"""ROUGE-L: the longest common subsequence of words of an answer and a reference (Lin, 2004).

Three benchmarks, two packages, three rules. LongBench scores as the package rouge 1.0.1 does:
sentences end at a full stop, each reference sentence is compared with each sentence of the answer,
and words are counted once however often they stand there. L-Eval scores as rouge-score does: one
subsequence of the whole texts, words in small letters of a-z and digits. InfiniteBench takes
rouge-score's rougeLsum: lines are sentences, and each of the reference has what any of the answer
shares with it.
"""

from __future__ import annotations

import re
from collections import Counter
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


def summary_rouge_l(answer: str, expected: str) -> float:
    """InfiniteBench's rougeLsum: F1 over lines. A word of a reference line counts where it is in
    the longest subsequence with any line of the answer, no word more often than both texts have it.
    """
    found, wanted = (
        [LETTERS.findall(line.lower()) for line in text.split("\n") if line]
        for text in (answer, expected)
    )
    left = [Counter(word for line in lines for word in line) for lines in (found, wanted)]
    hits = 0
    for line in wanted:
        shared = {place for other in found for _, place in _pairs(other, line)}
        for word in (line[place] for place in sorted(shared)):
            if all(words[word] for words in left):
                hits += 1
                for words in left:
                    words[word] -= 1
    if not hits:
        return 0.0
    precision, recall = hits / sum(map(len, found)), hits / sum(map(len, wanted))
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    """The words of every part between full stops; a part of white space alone has one, which is
    empty, as the package counts.
    """
    return [part.split() or [""] for part in text.split(".") if part]


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The words of a longest common subsequence."""
    return [one[place] for place, _ in _pairs(one, other)]


def _pairs(one: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Places of a longest common subsequence in both. Of several it is the one that, read from the
    ends, gives up a word of `other` unless one of `one` costs less: which words it has decides the
    score.
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
            found.append((i, j))
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]
