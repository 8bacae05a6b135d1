"""L-Eval's answers that are right or wrong: letters, numbers, outputs, names of topics.

L-Eval (An and others, "L-Eval: Instituting Standardized Evaluation for Long Context Language
Models", ACL 2024, arXiv 2307.11088) is under the GPL: what it counts is told here in our own words
and code. An answer without any letter counts as A there, and an empty one as a quarter; here both
are wrong.
"""

from __future__ import annotations

import re

from tools.suites.metrics.overlap import cleaned

PART = 0.25  # of several right letters, some and no wrong one
NUMBER = re.compile(r"The answer is (\S+)")
ALONE = re.compile(r"[A-D](?=[\s.)])")
TOLD = (",", "'", "\\", ".0")  # of printed values
PHRASES = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")


def letters(answer: str, expected: str, several: bool) -> float:
    """Score a choice. several: more than one letter may be right (coursera); all of them 1, some
    and no other PART. Else it is the answer's first letter of A to D.
    """
    right = re.sub("[^A-D]", "", expected.split()[0] if expected.split() else "")
    if answer in "ABCD":
        found = answer
    else:
        found = _chosen(answer) if several else next((c for c in answer if c in "ABCD"), "")
    if not found:
        return 0.0
    return 1.0 if found == right else PART if set(found) <= set(right) else 0.0


def _chosen(answer: str) -> str:
    """Letters that an answer begins with, where they are several; else those that stand alone in it
    before it asks itself something, with the one that it begins with; else the first in a row, in
    a word too.
    """
    rest = answer.lstrip("ABCD")
    begins = answer[: len(answer) - len(rest)]
    if len(begins) > 1:
        return "".join(sorted(set(begins)))
    said = rest.split("Question")[0]
    if found := {*begins, *ALONE.findall(said)}:
        return "".join(sorted(found))
    row = re.search("[A-D]+", said)
    return row[0] if row else ""


def number(answer: str, expected: str) -> float:
    """Score a sum: what follows "The answer is", else the last word with a digit of the first
    paragraph; its digits up to a point.
    """
    found, right = _digits(answer), _digits(expected)
    return float(bool(found) and bool(right) and float(found) == float(right))


def _digits(text: str) -> str:
    said = NUMBER.search(text)
    if said:
        word = said[1]
    else:
        spoken = text.split("\n\n")[0].split(" ")
        word = next((each for each in reversed(spoken) if re.search("[0-9]", each)), "")
    return re.sub("[^0-9]", "", word.split(".")[0])


def output(answer: str, expected: str) -> float:
    """Score what a program prints: the expected text in the answer's part that may hold it."""
    right = _printed(expected)
    text, room = _printed(answer), len(expected.split()) + 3
    for phrase in PHRASES:
        text = text.replace(phrase, "")
    behind = text.split("the final output")
    parts = behind[-1].split()[:room] if len(behind) > 1 else text.split()[-room:]
    return topic(" ".join(parts), right)


def _printed(text: str) -> str:
    text = " ".join(text.split())
    for mark in TOLD:
        text = text.replace(mark, "")
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def topic(answer: str, expected: str) -> float:
    """Score a name or a short text: the same number, or the reference somewhere in the first line
    of more than one character, whatever the spaces and the case.
    """
    try:
        return float(float(answer) == float(expected))
    except ValueError:
        line = next((each for each in answer.split("\n") if len(each) > 1), answer)
        right = expected.lower().replace(" ", "")
        return float(bool(right) and right in line.lower().replace(" ", ""))


def truth(answer: str, expected: str) -> float:
    """Score true or false: the first of both words in the answer."""
    said = next((w for each in cleaned(answer) for w in ("true", "false") if w in each), "")
    return float(said == " ".join(cleaned(expected.split("[fact:")[0])))
