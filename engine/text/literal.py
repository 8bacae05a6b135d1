"""Text from users and documents that spells control tokens: it stays text.

A chat template marks turns with control tokens (<|im_end|>), and a tokenizer recognises them
wherever a text spells them, so a document that spells them could forge turns. So every such
spelling inside a message is marked with a character that no message holds before the template runs.
Afterwards the marks tell the document's spellings from the template's own, and come out again.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

# noncharacters, which Unicode keeps for internal use; then a plane of private use
MARKS = tuple(map(chr, chain(range(0xFDD0, 0xFDF0), range(0x100000, 0x10FFFE))))


OWN = ("content", "reasoning_content", "thinking")  # what a model wrote of an assistant's message


@dataclass(frozen=True)
class Written:
    """A text for the tokenizer. literal: the start of every control-token spelling that must be
    tokenized as plain text, ascending character positions.
    """

    text: str
    literal: tuple[int, ...] = ()

    def cut(self, characters: int) -> Written:
        """The first `characters` characters."""
        kept = bisect_left(self.literal, characters)
        return Written(self.text[:characters], self.literal[:kept])

    def since(self, characters: int) -> Written:
        """All but the first `characters` characters."""
        kept = bisect_left(self.literal, characters)
        return Written(self.text[characters:], tuple(at - characters for at in self.literal[kept:]))


class Controls:
    """The spellings of a tokenizer's control tokens.

    special: of its special tokens. named: of other added tokens that the chat template writes.
    """

    def __init__(self, special: Iterable[str], named: Iterable[str]):
        self.named = tuple(named)
        self.special = _pattern(special)
        self.every = _pattern([*special, *self.named])

    def marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """(messages with a mark in every control token that they spell, the mark or "").

        An answer, and a thought of it, may hold tokens that the template names (</think>): there
        they are the model's.
        Names and arguments of tools are marked as contents are, keys too; a role is not.
        """
        texts = [
            text
            for message in messages
            for key, value in message.items()
            for text in (() if key == "role" else _texts(value))
        ]
        if not any(self.every.search(text) for text in texts):
            return [dict(message) for message in messages], ""
        mark = next(mark for mark in MARKS if not any(mark in text for text in texts))
        found = []
        for message in messages:
            marked = {}
            for key, value in message.items():
                own = key in OWN and message.get("role") == "assistant"
                pattern = self.special if own else self.every
                marked[key] = value if key == "role" else _marked(value, pattern, mark)
            found.append(marked)
        return found, mark

    def written(self, text: str, mark: str) -> Written:
        """A rendered text without its marks, and where they were."""
        if not mark:
            return Written(text)
        pieces = text.split(mark)
        literal, length = [], 0
        for piece in pieces[:-1]:
            length += len(piece)
            literal.append(max(0, length - 1))  # the mark is behind the first character
        return Written("".join(pieces), tuple(literal))

    def as_text(self, text: str) -> Written:
        """A text without markers of its own: every control token that it spells is text."""
        return Written(text, tuple(match.start() for match in self.every.finditer(text)))

    def pieces(self, written: Written) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, whether its control tokens are text) of the pieces of a text, in order."""
        start = at = 0
        for match in self.every.finditer(written.text):
            if _any_within(written.literal, *match.span()):
                continue
            if _any_within(written.literal, at, match.start()):
                if at > start:
                    yield start, at, False
                yield at, match.start(), True
                start = match.start()
            at = match.end()
        if _any_within(written.literal, at, len(written.text)):
            if at > start:
                yield start, at, False
            yield at, len(written.text), True
        elif start < len(written.text):
            yield start, len(written.text), False


def _pattern(spellings: Iterable[str]) -> re.Pattern[str]:
    """An expression for any of the spellings, the longest first; it may match nothing."""
    ordered = sorted(set(spellings) - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, the names of its fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_texts, chain(value, value.values())))
    elif isinstance(value, (list, tuple)):
        yield from chain.from_iterable(map(_texts, value))


def _marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """A value of JSON with a mark in every control token that its texts spell."""
    if isinstance(value, str):
        return pattern.sub(lambda m: _split(m[0], mark), value)
    if isinstance(value, Mapping):
        return {_marked(k, pattern, mark): _marked(v, pattern, mark) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(v, pattern, mark) for v in value]
    return value


def _split(spelling: str, mark: str) -> str:
    return spelling[:1] + mark + spelling[1:]


def _any_within(positions: Sequence[int], start: int, stop: int) -> bool:
    at = bisect_left(positions, start)
    return at < len(positions) and positions[at] < stop


def agreement(one: Written, other: Written, common: int) -> int:
    """How many of the first `common` characters, which are the same, spell the same tokens: those
    before the first spelling that is text in one and a control token in the other.
    """
    ours, theirs = one.cut(common).literal, other.cut(common).literal
    if ours == theirs:
        return common
    return min(set(ours) ^ set(theirs))


def common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix.

    Bisects, because a text may have millions of characters and slices compare fast.
    """
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
