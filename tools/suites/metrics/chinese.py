"""Words of a Chinese text: jieba's where it is installed, else one word a character."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any


@cache
def segmenter() -> str:
    """Who finds the words: "jieba VERSION", or "characters"."""
    if importlib.util.find_spec("jieba") is None:
        return "characters"
    return f"jieba {getattr(_jieba(), '__version__', '')}".strip()


@cache
def _jieba() -> Any:
    return importlib.import_module("jieba")


def words(text: str) -> list[str]:
    """The words of a text, in order; white space is a word of its own."""
    return list(text) if segmenter() == "characters" else list(_jieba().cut(text, cut_all=False))
