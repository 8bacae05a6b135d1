"""tools/suites/metrics: every score by hand, and 100 answers a metric against another way to it.

Stops: an empty answer that scores, punctuation that counts as a word, articles and marks that stay,
a word that counts twice where it may not, a class that is part of the right one, a number inside
another, an answer cut at the wrong line.
"""

import re
from functools import cache, partial
from random import Random

import pytest

from tools.suites.local.leval import METRICS
from tools.suites.metrics import chinese
from tools.suites.metrics.exam import letters, number, output, topic, truth
from tools.suites.metrics.matches import (
    class_named,
    code_like,
    count_named,
    first_number,
    letter_named,
    nodes_named,
    paragraph_named,
    value_named,
)
from tools.suites.metrics.overlap import NO_MARKS, chinese_f1, f1, set_f1, word_f1
from tools.suites.metrics.rouge import chinese_rouge_l, rouge_l, whole_rouge_l

KINDS = ("Number", "Other number", "Date", "Other", "City")
GOLD = "the number of it is Other number"  # holds other classes
leval_f1 = METRICS["f1"]
classes = partial(class_named, classes=KINDS)
one, several = partial(letters, several=False), partial(letters, several=True)
HAND = [
    # F1 of words
    (word_f1, "Paris", "paris", 1),
    (word_f1, "", "Paris", 0),
    (word_f1, "...!?", "Paris", 0),
    (word_f1, "the a an", "The", 0),  # articles alone: nothing is shared
    (word_f1, "in Paris, the city", "Paris", 2 / 4),
    (word_f1, "Paris Paris Paris", "Paris", 2 / 4),
    (word_f1, "Paris Paris", "Paris Paris Rome", 4 / 5),
    (word_f1, "Zoë’s café", "zoë’s CAFÉ", 1),
    (word_f1, "U.S.A.", "usa", 1),
    (word_f1, "well-known", "well known", 0),
    (word_f1, "theatre", "atre", 0),  # no article inside a word
    (word_f1, "cat—the—dog", "cat—", 2 / 3),  # an article leaves a space
    (word_f1, "a\tb\n c", "b c", 1),
    # L-Eval's, by its own rule: small letters, ASCII punctuation out, then articles, then a bag
    (leval_f1, "Section 4(b), by the Borrower", "section 4b by borrower", 1),
    (leval_f1, "", "yes", 0),
    (leval_f1, "", "", 0),  # nothing beside nothing is no answer
    (leval_f1, "The A.", "an", 0),
    (leval_f1, "$1,000.50", "100050", 1),  # marks join what they part
    (leval_f1, "end-of-life care", "endoflife care", 1),
    (leval_f1, "T.he lender", "lender", 1),  # an article that the marks hid
    (leval_f1, "the-lender", "lender", 0),  # and one that they hide
    (leval_f1, "a_b lender", "ab lender", 1),
    (leval_f1, "“yes”", "yes", 0),  # curly marks stay
    (leval_f1, "yes\u00a0no\n", "no yes", 1),  # in any order, whatever parts them
    (leval_f1, "yes yes yes no", "yes no no", 4 / 7),
    (leval_f1, "no " * 30 + "yes", "yes", 2 / 32),  # a long answer
    (leval_f1, "No.", "Yes", 0),
    # of Chinese characters
    (chinese_f1, "北京", "北京", 1),
    (chinese_f1, "", "北京", 0),
    (chinese_f1, "。，！", "北京", 0),
    (chinese_f1, "北京。", "北京", 1),
    (chinese_f1, "在北京", "北京", 4 / 5),
    (chinese_f1, "北北京", "北京", 4 / 5),
    (chinese_f1, "京北", "北京", 1),  # a bag
    (chinese_f1, "Ａ b", "a B", 2 / 4),  # full width is another letter
    (chinese_f1, " 北 京 ", "北京", 1),
    (chinese_f1, "上海", "北京", 0),
    # of sets
    (set_f1, [], [], 1),
    (set_f1, ["a"], [], 0),
    (set_f1, [], ["a"], 0),
    (set_f1, ["a", "a"], ["a"], 1),
    (set_f1, ["a", "b"], ["b", "c"], 1 / 2),
    # ROUGE-L over sentences and distinct words
    (rouge_l, "a b c", "a b c", 1),
    (rouge_l, "", "a", 0),
    (rouge_l, "...", "a", 0),
    (rouge_l, "a", "", 0),
    (rouge_l, "c b a", "a b c", 1 / 3),
    (rouge_l, "a b d", "a b c", 2 / 3),
    (rouge_l, "a a a a", "a", 1),  # distinct words
    (rouge_l, "A", "a", 0),  # letters as they are
    (rouge_l, "a b. c d.", "a b c d", 1),  # what both sentences share
    (rouge_l, "a b", "a b. a b", 1),
    (rouge_l, "a, b", "a b", 1 / 2),
    (rouge_l, "x y. a", "a. x", 2 * (2 / 3) / (5 / 3)),
    (rouge_l, "a. ", "a", 2 / 3),  # white space is a sentence of one empty word
    (rouge_l, "á  b\n", "á b", 1),
    (chinese_rouge_l, "北京人", "北人", 4 / 5),
    (chinese_rouge_l, "", "北京", 0),
    (chinese_rouge_l, "人京北", "北京", 2 * (1 / 3 * 1 / 2) / (5 / 6)),
    # ROUGE-L of whole texts
    (whole_rouge_l, "The cat sat.", "the CAT sat", 1),
    (whole_rouge_l, "", "a", 0),
    (whole_rouge_l, "!?", "a", 0),
    (whole_rouge_l, "a a a a", "a", 2 / 5),
    (whole_rouge_l, "c b a", "a b c", 1 / 3),
    (whole_rouge_l, "a b. c", "a c", 4 / 5),
    (whole_rouge_l, "北京", "北京", 0),  # letters of a-z only
    (whole_rouge_l, "well-known", "well known", 1),
    (whole_rouge_l, "x1 y", "x1", 2 / 3),
    # classes
    (classes, "Date", "Date", 1),
    (classes, "", "Date", 0),
    (classes, "date", "Date", 0),
    (classes, "Date or City", "Date", 1 / 2),
    (classes, "City", "Date", 0),
    (classes, "It is a Date.", "Date", 1),
    # "Number" is not in "Other number", "Other" is and is struck off
    (classes, "Other number", "Other number", 1),
    (classes, "Number", "Other number", 0),
    (classes, "Other", "Other number", 0),
    (classes, "Number Other number", "Other number", 1 / 2),
    # as published: behind a name that was struck off one is skipped
    (partial(class_named, classes=("x", "y", "xyz")), "x y xyz", "xyz", 1 / 2),
    # numbers
    (count_named, "5", "5", 1),
    (count_named, "", "5", 0),
    (count_named, "15", "5", 0),
    (count_named, "5 of 10", "5", 1 / 2),
    (count_named, "five", "5", 0),
    (count_named, "05", "5", 0),
    (count_named, "5, 5", "5", 1),
    (count_named, "1.5", "5", 1 / 2),
    (count_named, "-5", "5", 1),
    (count_named, "5!", 5, 1),
    (paragraph_named, "Paragraph 7", "Paragraph 7", 1),
    (paragraph_named, "7", "Paragraph 7", 1),
    (paragraph_named, "", "Paragraph 7", 0),
    (paragraph_named, "17", "Paragraph 7", 0),
    (paragraph_named, "Paragraph 7 or 8", "Paragraph 7", 1 / 2),
    (paragraph_named, "段落7", "段落7", 1),
    (paragraph_named, "seven", "Paragraph 7", 0),
    (paragraph_named, "7 7 8", "Paragraph 7", 2 / 3),
    (paragraph_named, "7", "none", 0),
    (paragraph_named, "Paragraph7.", "Paragraph 7", 1),
    # code
    (code_like, "return x", "return x", 1),
    (code_like, "", "return x", 0),
    (code_like, "", "", 1),
    (code_like, "# why\nreturn x", "return x", 1),
    (code_like, "```python\nreturn x\n```", "return x", 1),
    (code_like, "// a\n# b", "return x", 0),
    (code_like, "\n\nreturn x\nmore", "return x", 1),
    (code_like, "abcd", "bcde", 0.75),
    (code_like, "ab", "cd", 0),
    (code_like, "abc", "ab", 0.8),
    (code_like, "é", "e", 0),
    # letters
    (letter_named, "The correct answer is (B)", "B", 1),
    (letter_named, "The correct answer is **B**.", "B", 1),
    (letter_named, "The correct answer is B. The correct answer is (C)", "C", 1),
    (letter_named, "The correct answer is (B) or (C)", "C", 0),
    (letter_named, "", "B", 0),
    (letter_named, "B", "B", 0),
    (letter_named, "the correct answer is (B)", "B", 0),
    (letter_named, "The correct answer is (E)", "E", 0),
    (letter_named, "The correct answer is Because", "B", 1),
    (letter_named, "The correct answer is: (B)", "B", 0),
    # InfiniteBench
    (first_number, "12345", "12345", 1),
    (first_number, "", "12345", 0),
    (first_number, "It is 12345.", "12345", 1),
    (first_number, "1 12345", "12345", 0),
    (first_number, "123456", "12345", 0),
    (first_number, "12 345", "12345", 0),
    (first_number, "-12345-9", "12345", 1),
    (first_number, "１２３４５", "１２３４５", 0),
    (first_number, "a12345b", "12345", 1),
    (first_number, "007", "7", 0),
    (value_named, '"ab-1"', "ab-1", 1),
    (value_named, "", "ab-1", 0),
    (value_named, "{'k': 'ab-1'}", "ab-1", 1),
    (value_named, "xab-1", "ab-1", 0),
    (value_named, "is ab-1.", "ab-1", 1),
    (value_named, "ab-1;", "ab-1", 0),
    (value_named, "ab -1", "ab-1", 0),
    (value_named, "AB-1", "ab-1", 0),
    (value_named, "ab-1 ab-1", "ab-1", 1),
    (value_named, "ab-1\nab-2", "ab-1", 1),
    # GraphWalks
    (nodes_named, "Final Answer: [a, b]", ["b", "a"], 1),
    (nodes_named, "So\nFinal Answer: [a]\n", ["a"], 1),
    (nodes_named, "Final Answer: [a]\nDone", ["a"], 0),
    (nodes_named, "", ["a"], 0),
    (nodes_named, "[a]", ["a"], 0),
    (nodes_named, "Final Answer: []", [], 1),
    (nodes_named, "Final Answer: []", ["a"], 0),
    (nodes_named, "Final Answer: [a, a, c]", ["a", "b"], 1 / 2),
    (nodes_named, "Final Answer: ['a', \"b\"]", ["a", "b"], 1),
    (nodes_named, "Final Answer: [z]", ["a"], 0),
    # L-Eval
    (one, "B", "B", 1),
    (one, "", "B", 0),
    (one, "It is B.", "B", 1),
    (one, "AB", "A", 0),
    (one, "b", "B", 0),
    (one, "C or B", "B", 0),
    (several, "BD", "BD", 1),
    (several, "DB, I think", "BD", 1),
    (several, "B", "BD", 1 / 4),
    (several, "ABD", "BD", 0),
    (several, "B. and D.", "BD", 1),
    (several, "it is B", "BD", 1 / 4),  # at the end no letter stands alone, so the first in a row
    (several, "it is DB", "BD", 1 / 4),  # as they stand
    (several, "by An author", "A", 1),  # in a word too
    (several, "it is C or B.", "B", 0),  # both stand alone
    (several, "xyz", "A", 0),  # nothing said is not A
    (several, "", "A", 0),
    (number, "so 4 + 5. The answer is 9.", "... The answer is 9", 1),
    (number, "The answer is $1,200.", "The answer is 1200", 1),
    (number, "9 apples and 8 pears", "The answer is 8", 1),
    (number, "", "The answer is 8", 0),
    (number, "none", "The answer is 8", 0),
    (number, "The answer is 8.5", "The answer is 8", 1),
    (number, "8\n\n9", "The answer is 8", 1),
    (number, "The answer is 08", "The answer is 8", 1),
    (output, "[1, 2]", "[1, 2]", 1),
    (output, "the final output will be 3.0", "3", 1),
    (output, "the result is [ [1, 2], [3] ]", "[[1, 2], [3]]", 1),
    (output, "", "3", 0),
    (output, "4", "3", 0),
    (topic, "The benefits of volunteering.", "the benefits of volunteering", 1),
    (topic, "1.0", "1", 1),
    (topic, "", "x", 0),
    (topic, "\n-\nthe  Topic", "the topic", 1),
    (topic, "one\ntwo", "two", 0),
    (truth, "True.", "True [fact: False]", 1),
    (truth, "It is false, not true", "False", 1),
    (truth, "", "True", 0),
    (truth, "untrue", "True", 1),  # as published
    (truth, "No", "False", 0),
]


@pytest.fixture(autouse=True)
def characters(monkeypatch):
    """Chinese words one by one, whatever is installed."""
    monkeypatch.setattr(chinese, "segmenter", lambda: "characters")


def test_scores_by_hand():
    wrong = [
        (getattr(metric, "__name__", metric), answer, expected, value, found)
        for metric, answer, expected, value in HAND
        if abs((found := metric(answer, expected)) - value) > 1e-7
    ]
    assert not wrong


# ------------------------------------------------------------------- another way to each

WORDS = "the a cat Cat dog, sat. on mat mat! 7 17 B Zoë x_y (A) — 北京 an Paragraph Number".split()


def answers(seed, count=100):
    """(answer, reference) pairs: part of the reference, in another order, with more words."""
    rng = Random(seed)
    for _ in range(count):
        expected = rng.choices(WORDS, k=rng.randint(1, 9))
        found = [w for w in expected if rng.random() < 0.7] + rng.choices(
            WORDS, k=rng.randint(0, 4)
        )
        if rng.random() < 0.3:
            rng.shuffle(found)
        if rng.random() < 0.2:
            found.insert(0, rng.choice(["\n", "# b\n", ".", "It is"]))
        yield " ".join(found), " ".join(expected)


def slow_f1(found, expected):
    left, same = list(expected), 0
    for each in found:
        if each in left:
            left.remove(each)
            same += 1
    return 2 * same / (len(found) + len(expected)) if same else 0.0


def plain(text):
    kept = "".join(c for c in text.lower() if c.isalnum() or c.isspace() or not c.isascii())
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def longest(one, other, strict):
    """A longest common subsequence by recursion; strict: the one that the package takes."""

    @cache
    def size(i, j):
        if not i or not j:
            return 0
        skip = max(size(i - 1, j), size(i, j - 1))
        return 1 + size(i - 1, j - 1) if one[i - 1] == other[j - 1] else skip

    def walk(i, j):
        if not i or not j:
            return ()
        if one[i - 1] == other[j - 1]:
            return (*walk(i - 1, j - 1), one[i - 1])
        return walk(i - 1, j) if size(i - 1, j) > size(i, j - 1) else walk(i, j - 1)

    return walk(len(one), len(other)) if strict else size(len(one), len(other))


def slow_rouge(answer, expected):
    found, wanted = (
        [p.split() or [""] for p in text.split(".") if p] for text in (answer, expected)
    )
    pairs = [(tuple(a), tuple(b)) for a in wanted for b in found]
    if not pairs:
        return 0.0
    every = {word for a, b in pairs for word in longest(a, b, True)}
    p, r = (len(every) / len({w for s in text for w in s}) for text in (found, wanted))
    return 2 * p * r / (p + r + 1e-8)


def slow_whole(answer, expected):
    split = [
        "".join(
            c if c in "abcdefghijklmnopqrstuvwxyz0123456789" else " " for c in t.lower()
        ).split()
        for t in (answer, expected)
    ]
    size = longest(tuple(split[0]), tuple(split[1]), False)
    return 2 * size / (len(split[0]) + len(split[1])) if size else 0.0


def alike(a, b):
    """Characters in common by Ratcliff and Obershelp: the longest block, then left and right."""
    best = (0, 0, 0)
    for i in range(len(a)):
        for j in range(len(b)):
            n = 0
            while i + n < len(a) and j + n < len(b) and a[i + n] == b[j + n]:
                n += 1
            if n > best[0]:
                best = (n, i, j)
    n, i, j = best
    return n + alike(a[:i], b[:j]) + alike(a[i + n :], b[j + n :]) if n else 0


def slow_code(answer, expected):
    for line in answer.lstrip("\n").split("\n"):
        if "`" not in line and "#" not in line and "//" not in line:
            break
    else:
        line = ""
    if line == expected:
        return 1.0
    if not line or not expected:
        return 0.0
    return round(100 * (2 * alike(line, expected) / (len(line) + len(expected)))) / 100


def digits(text):
    return "".join(c if c.isdigit() else " " for c in text).split()


def slow_share(answer, expected):
    found, right = digits(answer), (digits(expected) or ["none"])[0]
    return sum(n == right for n in found) / len(found) if found else 0.0


def slow_classes(answer, expected):
    named = [k for k in KINDS if answer.find(k) >= 0]
    struck = [k for k in named if k != expected and expected.find(k) >= 0]
    assert len(struck) < 2  # where the two ways could part
    left = [k for k in named if k not in struck]
    return 1 / len(left) if expected in left else 0.0


def unmarked(text):
    return [c.lower() for c in text if ord(c) not in NO_MARKS and not c.isspace()]


OTHER_WAYS = {
    word_f1: lambda a, b: slow_f1(plain(a), plain(b)),
    chinese_f1: lambda a, b: slow_f1(unmarked(a), unmarked(b)),
    rouge_l: slow_rouge,
    chinese_rouge_l: lambda a, b: slow_rouge(" ".join(a), " ".join(b)),
    whole_rouge_l: slow_whole,
    code_like: slow_code,
    first_number: lambda a, b: float(bool(digits(a)) and digits(a)[0] == b),
    value_named: lambda a, b: float(b in re.split(r"[\s:\"'.,?!{}]+", a)),
}


@pytest.mark.parametrize("metric", OTHER_WAYS, ids=lambda m: m.__name__)
def test_a_hundred_answers_score_as_by_another_way(metric):
    scores = set()
    for answer, expected in answers(metric.__name__):
        if metric is value_named:
            expected = expected.split()[0]
        elif metric is first_number:
            expected = (digits(expected) or ["7"])[0]
        found = metric(answer, expected)
        assert found == pytest.approx(OTHER_WAYS[metric](answer, expected), abs=1e-6), answer
        scores.add(round(found, 3))
    assert len(scores) > (1 if metric in (first_number, value_named) else 10)


def test_a_hundred_choices_score_as_by_another_way():
    rng, seen = Random(5), {}
    for _ in range(100):
        named = " ".join(rng.choices([*KINDS, "none"], k=rng.randint(0, 3)))
        right = rng.choice(KINDS)
        numbers = " ".join(rng.choices(["7", "17", "x", "70"], k=rng.randint(0, 4)))
        nodes, truth_set = (rng.sample("abcdef", rng.randint(1, 5)) for _ in range(2))
        letter = rng.choice(["(A)", "B", "*C*", "x", "(B) or (A)"])
        said = f"The correct answer is {letter}"
        shared = len(set(nodes) & set(truth_set))
        first = next((c for c in letter if c in "ABCD"), None)
        for name, found, wanted in (
            ("class", classes(named, right), slow_classes(named, right)),
            ("count", count_named(numbers, "7"), slow_share(numbers, "7")),
            ("paragraph", paragraph_named(numbers, "Paragraph 7"), slow_share(numbers, "7")),
            (
                "nodes",
                nodes_named(f"Final Answer: [{', '.join(nodes)}]", truth_set),
                2 * shared / (len(nodes) + len(truth_set)),
            ),
            ("letter", letter_named(said, "B"), float(first == "B")),
            ("one", one(letter, "B"), float(first == "B")),
        ):
            assert found == pytest.approx(wanted, abs=1e-6), (name, named, numbers, nodes, letter)
            seen.setdefault(name, set()).add(found)
    assert all(len(values) > 1 for values in seen.values())


def test_sets_and_bags_differ_and_a_long_sentence_has_no_limit():
    assert f1("aab", "ab") == pytest.approx(4 / 5) and set_f1(["a", "a", "b"], ["a", "b"]) == 1
    long = " ".join(f"w{n}" for n in range(600))
    assert rouge_l(long, long + " x") == pytest.approx(1200 / 1201, abs=1e-6)
