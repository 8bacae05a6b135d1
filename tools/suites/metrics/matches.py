"""Whether an answer names what was asked for: a class, a paragraph, a count, a line of code, a
letter, a number, a value. The rules are the benchmarks' own (LongBench, LongBench v2, InfiniteBench
and GraphWalks: MIT), their oddities included where a docstring says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from tools.suites.metrics.overlap import set_f1

NUMBERS = re.compile(r"\d+")
FIRST = re.compile("[0-9]+")  # of InfiniteBench: ASCII digits only
PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")
NOT_CODE = ("`", "#", "//")
SPLITS_VALUES = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
CHOICE = (
    re.compile(r"The correct answer is \(([A-D])\)"),
    re.compile(r"The correct answer is ([A-D])"),
)
NODES = re.compile(r"Final Answer:\s*\[(.*)\]")


def class_named(answer: str, expected: str, classes: Sequence[str]) -> float:
    """LongBench's classification: 1 / the number of classes that the answer names, where the right
    one is among them. Names that are part of the right one do not count; as published, the name
    behind one that was struck off is not looked at.
    """
    named = [each for each in classes if each in answer]
    place = 0
    while place < len(named):
        if named[place] in expected and named[place] != expected:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if expected in named else 0.0


def _share(numbers: Sequence[str], right: str) -> float:
    return numbers.count(right) / len(numbers) if numbers else 0.0


def count_named(answer: str, expected: str) -> float:
    """LongBench's count: the share of the answer's numbers that are the right one."""
    return _share(NUMBERS.findall(answer), str(expected))


def paragraph_named(answer: str, expected: str) -> float:
    """LongBench's retrieval, English or Chinese: the share of the answer's numbers that are the
    paragraph's. 0 for a reference that names none.
    """
    asked = PARAGRAPH.search(expected)
    return _share(NUMBERS.findall(answer), asked[1]) if asked else 0.0


def code_like(answer: str, expected: str) -> float:
    """LongBench's code similarity: how like the expected line is the answer's first that is no
    comment and no fence, by difflib in whole per cent, as fuzzywuzzy has it without Levenshtein.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in NOT_CODE)), "")
    if line == expected:
        return 1.0
    if not line or not expected:
        return 0.0
    return int(round(100 * SequenceMatcher(None, line, expected).ratio())) / 100


def letter_named(answer: str, expected: str) -> float:
    """LongBench v2's: whether the first "The correct answer is (X)", else the first without
    brackets, names the letter; asterisks do not count.
    """
    text = answer.strip().replace("*", "")
    found = next((match[1] for rule in CHOICE if (match := rule.search(text))), None)
    return float(found == expected)


def first_number(answer: str, expected: str) -> float:
    """InfiniteBench's passkey and number string: whether the first digits in a row are these."""
    found = FIRST.search(answer)
    return float(found is not None and found[0] == expected)


def value_named(answer: str, expected: str) -> float:
    """InfiniteBench's kv retrieval: whether one of the answer's words is the value."""
    return float(expected in answer.translate(SPLITS_VALUES).split())


def nodes_named(answer: str, expected: Sequence[str]) -> float:
    """GraphWalks': F1 of the nodes in the list of the last line, "Final Answer: [a, b]". 0 where
    the line is another, or no node is right.
    """
    found = NODES.search(answer.rstrip("\n").split("\n")[-1])
    if found is None:
        return 0.0
    nodes = (node.strip().strip("'\"") for node in found[1].split(","))
    return set_f1([node for node in nodes if node], expected)
