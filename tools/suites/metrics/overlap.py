"""F1 of what an answer and a reference have in common, after the benchmarks' own clean-up.

The rules are those of SQuAD's script (Rajpurkar and others, EMNLP 2016), which LongBench (MIT) and
L-Eval took over: small letters, no ASCII punctuation, no English articles, words by white space.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence

from tools.suites.metrics.chinese import words

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# of Chinese texts, beside ASCII's
FULL_WIDTH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—"
    "‘’‛“”„‟…‧﹏."
)
NO_MARKS = str.maketrans("", "", string.punctuation + FULL_WIDTH)


def cleaned(text: str, lower: bool = True) -> list[str]:
    """The words of a text without punctuation and articles; lower: in small letters."""
    text = text.lower() if lower else text
    return ARTICLES.sub(" ", text.translate(NO_PUNCTUATION)).split()


def f1(found: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """F1 of two bags: what stands twice counts twice. 0 where nothing is shared."""
    same = sum((Counter(found) & Counter(expected)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def word_f1(answer: str, expected: str) -> float:
    """F1 of an English answer's words: LongBench's qa_f1."""
    return f1(cleaned(answer), cleaned(expected))


def chinese_f1(answer: str, expected: str) -> float:
    """F1 of a Chinese answer's words, each without punctuation: LongBench's qa_f1_zh."""
    bags = ([_unmarked(word) for word in words(text)] for text in (answer, expected))
    found, wanted = ([word for word in bag if word] for bag in bags)
    return f1(found, wanted)


def character_f1(answer: str, expected: str) -> float:
    """F1 of a Chinese answer's characters without punctuation: InfiniteBench's qa_f1_score_zh."""
    return f1(_unmarked(answer), _unmarked(expected))


def _unmarked(word: str) -> str:
    return "".join(word.lower().translate(NO_MARKS).split())


def set_f1(found: Sequence[str], expected: Sequence[str]) -> float:
    """F1 of two sets of names: GraphWalks' score. 1 where both are empty."""
    one, other = set(found), set(expected)
    return f1(sorted(one), sorted(other)) if one or other else 1.0
