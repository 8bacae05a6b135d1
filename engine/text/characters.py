"""How many characters of a text one token may stand for at most: a bound on what a long text needs,
without reading it.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from engine.text.tokenizer import Tokenizer

# canonical composition makes one character of at most four (U+1F82)
COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}
SAME = ("Prepend", "Lowercase", "ByteLevel")  # normalizers that leave no character out
SPLITS = ("ByteLevel", "Digits", "Metaspace")  # and pre-tokenizers


def most_characters(tokenizer: Tokenizer) -> int | None:
    """The most characters of a text, white space at its ends apart, that become one token; None
    where that is not known, as a tokenizer may leave characters out.
    """
    backend = tokenizer.backend
    factor = 1
    for part in _parts(backend.normalizer, "normalizers"):
        kind = part["type"]
        if kind == "Replace":
            old = part["pattern"].get("String", "")
            if not old or len(part["content"]) < len(old):
                return None
        elif kind not in COMPOSED and kind not in SAME:
            return None
        factor *= COMPOSED.get(kind, 1)
    for part in _parts(backend.pre_tokenizer, "pretokenizers"):
        if part["type"] in ("Split", "Punctuation"):
            if part["behavior"] == "Removed":
                return None
        elif part["type"] not in SPLITS:
            return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.normalized for token in added):
        return None  # they may take any white space with them
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not isinstance(backend.model, tokenizers.models.BPE) or not _whole(vocabulary):
        return None
    return factor * max(map(len, vocabulary))


def _whole(vocabulary: dict[str, int]) -> bool:
    """Whether every byte has a token, so that nothing is left out or taken together."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return all(byte in vocabulary for byte in alphabet) or all(
        f"<0x{byte:02X}>" in vocabulary for byte in range(256)
    )


def _parts(stage: Any, name: str) -> list[dict[str, Any]]:
    """A stage of a tokenizer and what it consists of, as in tokenizer.json."""
    if stage is None:
        return []
    waiting, found = [json.loads(stage.__getstate__())], []
    while waiting:
        part = waiting.pop()
        inner = part.get(name)
        if inner is None:
            found.append(part)
        else:
            waiting += inner
    return found
