"""What stands most often: common words of a numbered list, frequent words of a coded text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from tools.suites.prompts.fitting import fresh
from tools.suites.prompts.instance import Instance
from tools.suites.ruler.sources import texts

# the prompts are RULER's own (Apache-2.0)
COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. ",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
ASKED = 10  # common words


@dataclass(frozen=True)
class CommonWords:
    """often, seldom: how often a common and another word stands in the list; shown: words of the
    example, which stand there shown_often and shown_seldom. pieces: different words.
    """

    often: int = 30
    seldom: int = 3
    shown: int = 40
    shown_often: int = 10
    shown_seldom: int = 3

    least = ASKED + 1

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt behind one example of the same."""
        before, question, prefix = COMMON
        context, answers = _listed(rng, self.shown, self.shown_often, self.shown_seldom)
        example = f"{before}{context}{question}{prefix} {_numbered(answers)}\n"
        context, answers = _listed(rng, pieces, self.often, self.seldom)
        return Instance(example + before, context, question, prefix, answers)


@dataclass(frozen=True)
class FrequentWords:
    """Words of six letters, as often as 1 / rank ** 2 of Zipf's law says; the first rank is dots.
    vocabulary: different words. pieces: words of the text, about.
    """

    vocabulary: int

    least = 120  # fewer would tie

    def __call__(self, rng: Random, pieces: int) -> Instance:
        """One prompt."""
        made: set[str] = set()
        words = ["..."] + [
            fresh(made, lambda: "".join(rng.choices(ascii_lowercase, k=6)))
            for _ in range(max(self.vocabulary, 10) - 1)
        ]
        zeta = math.pi**2 / 6  # of 2
        text = [
            word
            for rank, word in enumerate(words, 1)
            for _ in range(int(pieces / (zeta * rank * rank)))
        ]
        rng.shuffle(text)
        before, question, prefix = FREQUENT
        return Instance(before, " ".join(text), question, prefix, words[1:4])


def _listed(rng: Random, count: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """(a numbered list of `count` different words, the ASKED ones that stand there `often`)."""
    nouns, adjectives = texts().nouns, texts().adjectives
    pool = sorted({*nouns, *adjectives, *texts().verbs})
    words = rng.sample(pool, min(count, len(pool)))
    made = set(words)
    while len(words) < count:
        words.append(fresh(made, lambda: f"{rng.choice(adjectives)} {rng.choice(nouns)}"))
    common, rest = words[:ASKED], words[ASKED:]
    listed = common * often + rest * seldom
    rng.shuffle(listed)
    return _numbered(listed), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
