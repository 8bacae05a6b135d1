"""What in an untrusted tokenizer.json could turn a short text into a huge one.

tokenizer.json runs native code that aborts the whole process when memory ends. Five of its parts
write more than they read: normalizers and decoders that replace or prepend text, a table of
character replacements, and templates of tokens around a text. So their growth is bounded here,
before the native library sees the file. Everything else writes at most a few characters for each
that it reads.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.base.errors import BadCheckpoint
from weights.jsonfile import TOKENIZER_LIMIT, parts_of, read_bytes

# Pairs of a merge list, tokens and their ids: Gemma 3's file has 1.8 million commas and brackets.
MOST_PARTS = 8_000_000
MOST_GROWTH = 64  # characters written for one that is read, over all replacements in a row
MOST_TEMPLATE = 64  # pieces around a text; Llama has two
MOST_CHARACTERS = 256  # that a table of replacements writes for one; Unicode's longest is 18
# Spellings of the parts that are looked at. A file without them and without escapes that could hide
# them is not parsed here: a vocabulary of 128,000 takes 0.2 s.
GROWING = (b"Replace", b"Prepend", b"Precompiled", b"TemplateProcessing", b"\\u00")
STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
Part = dict[str, Any]


def read_tokenizer(path: Path) -> str:
    """The text of a tokenizer.json whose parts are bounded; raises BadCheckpoint."""
    data = read_bytes(path, TOKENIZER_LIMIT)
    if parts_of(data) > MOST_PARTS:
        raise BadCheckpoint(
            f"{path}: found {parts_of(data)} commas and brackets, expected at most {MOST_PARTS}"
        )
    try:
        text = data.decode("utf-8")
        if any(word in data for word in GROWING):
            require_bounded(json.loads(text, object_pairs_hook=_stages_once), path)
    except UnicodeDecodeError as error:
        raise BadCheckpoint(
            f"{path}: not a tokenizer that can be read: byte 0x{data[error.start]:02x} at "
            f"{error.start} is no UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        reason = str(error)[:120] if isinstance(error, ValueError) else "nested too deeply"
        raise BadCheckpoint(f"{path}: not a tokenizer that can be read: {reason}") from None
    return text


def _stages_once(pairs: list[tuple[str, Any]]) -> Part:
    """A JSON object; ValueError where it gives a part twice, of which one would go unseen."""
    found = dict(pairs)
    if len(found) != len(pairs) and ("type" in found or not found.keys().isdisjoint(STAGES)):
        raise ValueError("a key is given twice")
    return found


def require_bounded(data: object, path: Path) -> None:
    """Raise BadCheckpoint where a part of a parsed tokenizer.json grows text beyond bounds."""
    if not isinstance(data, dict):
        return  # the native library says what it expects
    for stage in STAGES:
        growth = 1
        for part in _parts(data.get(stage)):
            growth *= _growth(part, f"{path}: {stage}")
            if growth > MOST_GROWTH:
                raise BadCheckpoint(
                    f"{path}: {stage}: found replacements that write over {MOST_GROWTH} characters "
                    "for one, expected a tokenizer that keeps the length of a text"
                )


def _parts(stage: object) -> Iterator[Part]:
    """Every part of a stage, in any list, at any depth."""
    todo = [stage]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if "type" in part:
                yield part
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)


def _growth(part: Part, where: str) -> int:
    """Characters that a part may write for one; raises BadCheckpoint for what has no bound."""
    kind = part.get("type")
    if kind == "Replace":
        pattern, content = part.get("pattern"), part.get("content")
        written = len(content) if isinstance(content, str) else 1
        return max(1, written + _may_be_empty(pattern))
    if kind == "Prepend":
        prefix = part.get("prepend")
        return len(prefix) + 1 if isinstance(prefix, str) else 1
    if kind == "Precompiled":
        longest = _longest(part.get("precompiled_charsmap"), where)
        if longest > MOST_CHARACTERS:
            raise BadCheckpoint(
                f"{where}: precompiled_charsmap: found a replacement of {longest} bytes, expected "
                f"at most {MOST_CHARACTERS}"
            )
    if kind == "TemplateProcessing":
        for name in ("single", "pair"):
            pieces = part.get(name)
            if isinstance(pieces, list) and len(pieces) > MOST_TEMPLATE:
                raise BadCheckpoint(
                    f"{where}: {name}: found {len(pieces)} pieces, expected at most {MOST_TEMPLATE}"
                )
    return 1


def _may_be_empty(pattern: object) -> bool:
    """Whether a pattern may match between characters, so that every one of them stays as well."""
    if not isinstance(pattern, dict):
        return True
    if isinstance(pattern.get("String"), str):
        return not pattern["String"]
    try:
        return re.compile(pattern["Regex"]).match("") is not None
    except (KeyError, TypeError, re.error, RecursionError, OverflowError):
        return True  # the native library knows more expressions


def _longest(table: object, where: str) -> int:
    """Bytes of the longest replacement in a sentencepiece character table: 4 bytes with the length
    of a trie of 32-bit units, the trie, and strings that end in 0. Raises BadCheckpoint where the
    length is another one: the native library would allocate what it says.
    """
    if not isinstance(table, str):
        return 0  # refused by the native library
    try:
        data = base64.b64decode(table, validate=True)
    except (binascii.Error, ValueError):
        return 0  # refused as well
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 4 <= size <= len(data) - 4:
        raise BadCheckpoint(
            f"{where}: precompiled_charsmap: found a trie of {size} bytes in {len(data)}, expected "
            "a sentencepiece table"
        )
    return max(map(len, data[4 + size :].split(b"\0")))
