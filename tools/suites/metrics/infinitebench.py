"""Whether an answer names what InfiniteBench's tasks ask for (Zhang and others, ACL 2024;
github.com/OpenBMB/InfiniteBench, MIT): a number, a run of values, an option, a name.

The rules are those of its published script, their oddities included: docstrings name them. What
that script fails on is wrong here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"\d+\.\d+|\d+")
DIGITS = re.compile("[0-9]+")
MARKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))  # of names
VALUE_MARKS = str.maketrans(dict.fromkeys("\n.`'\":", " "))
OPTION_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
DEBUG_MARKS = re.compile("[\n`'\"*-]|Option|option")
# looked for in this order; the first that is there decides
OPTION_SAID = ("answer is:", "answer:", "answer is", "option is")
DEBUG_SAID = ("answer is:", "is:", "answer:", "correct option is:")


def value_last(answer: str, expected: Sequence[float]) -> float:
    """code_run: whether the answer's last word is the number."""
    words = answer.translate(VALUE_MARKS).split()
    try:
        return float(bool(words) and int(words[-1]) == expected[0])
    except ValueError:
        return 0.0


def number_found(answer: str, expected: Sequence[float]) -> float:
    """math_find: whether the answer's first number is this one; signs do not count. A number with a
    fraction where a whole one is asked for is wrong (the script fails on it).
    """
    found = NUMBER.search(answer)
    if found is None or (isinstance(expected[0], int) and "." in found[0]):
        return 0.0
    return float(float(found[0]) == expected[0])


def values_begun(answer: str, expected: Sequence[float]) -> float:
    """math_calc: the share of the values that the answer has right before its first wrong one;
    signs do not count. The answer's first number is passed over: it is the expression's own, with
    which the values of the prompt's examples begin and the expected ones do not (the script passes
    it over for GPT-4 alone).
    """
    right = 0
    for digits, value in zip(DIGITS.findall(answer)[1:], expected):
        if (digits.lstrip("0") or "0") != str(value):
            break
        right += 1
    return right / len(expected)


def function_named(answer: str, expected: Sequence[str]) -> float:
    """code_debug: whether the answer begins with the letter and a point or a colon, or goes on with
    letter or function one character behind the first phrase that leads to it. A letter alone is
    wrong. expected: the function and its letter.
    """
    function, letter = expected
    text = answer.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" +", " ", DEBUG_MARKS.sub(" ", text))
    return _said(text, DEBUG_SAID, (letter, function)) or 0.0


def option_named(answer: str, expected: Sequence[str]) -> float:
    """longbook_choice_eng: whether the answer's first character, else what goes on one character
    behind the first phrase that leads to it, else its first word of A, B, C and D is the letter, or
    the answer is the option. "Alice" begins with A. expected: the option and its letter.
    """
    text = answer.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in expected)
    if text in expected:
        return 1.0
    text = re.sub(" +", " ", text.translate(OPTION_MARKS))
    said = _said(text, OPTION_SAID, expected)
    if said is not None:
        return said
    word = next((each for each in text.split() if each in "ABCD"), "")
    return float(bool(word) and word in expected)


def _said(text: str, phrases: Sequence[str], right: Sequence[str]) -> float | None:
    """Whether something right stands one character behind the first of these phrases that is there;
    None where none is.
    """
    for phrase in phrases:
        place = text.find(phrase)
        if place >= 0:
            behind = text[place + len(phrase) + 1 :]
            return float(bool(behind) and behind.startswith(tuple(right)))
    return None


def speaker_named(answer: str, expected: Sequence[str]) -> float:
    """longdialogue_qa_eng: whether the first of the expected names is one of the answer's words in
    capital letters. A name of several words, or with a mark in it, is never found.
    """
    return float(expected[0] in answer.translate(MARKS).upper().split())
