"""A document that lies beside a model, with questions about it, so that a page has something to
read: welcome.txt and hint.txt of the shipped model.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from engine.terminal.documents import read_text

QUESTION = re.compile(r"\b[A-Z][^?\n]*\?")


@cache
def example_of(folder: Path | None) -> dict[str, Any] | None:
    """Name, text and questions of a model folder's own document; None where it has none."""
    if folder is None or not (folder / "welcome.txt").is_file():
        return None
    try:
        text, hint = (read_text(str(folder / name)) for name in ("welcome.txt", "hint.txt"))
    except UsageError:
        return None  # not both, or no text
    return {"name": "welcome.txt", "text": text, "questions": QUESTION.findall(hint)}
