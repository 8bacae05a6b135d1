"""Token ids to text, piece by piece: a character is emitted once all of its bytes are there."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, Protocol


class Vocabulary(Protocol):
    """What a stream asks of a tokenizer: its ids' spellings, and which of them are special."""

    @property
    def special_ids(self) -> Any: ...

    @property
    def backend(self) -> Any: ...

    @property
    def decoder_types(self) -> Any: ...

    def token(self, token_id: int) -> str | None: ...


BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
RUN_HELD = 16  # bytes of a byte-fallback run held back; see FallbackStream
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character


def _byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


BYTE_ALPHABET = _byte_alphabet()


class ByteStream:
    """Incremental text of a byte-level tokenizer.

    context: the ids before the first push; at most four tokens make a character, so the last eight
    hold the start of a character that is cut.
    """

    def __init__(self, tokenizer: Vocabulary, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" for special tokens and cut characters."""
        token = None if token_id in self._tokenizer.special_ids else self._tokenizer.token(token_id)
        if token is None:
            return ""
        try:
            data = bytes(BYTE_ALPHABET[character] for character in token)
        except KeyError:  # an added token, stored as plain text
            data = token.encode()
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return what is left at the end: a replacement character if a character was cut."""
        return self._decoder.decode(b"", final=True)


class FallbackStream:
    """Incremental text of any other tokenizer.

    A token's text is what it adds to the text of the token before it. Byte tokens (<0xE6>) are
    decoded together: the decoder writes a run of them as characters if the whole run is UTF-8, and
    as one replacement character per byte if it is not. So we hold a run back until it ends, is
    known to be bad, or has 16 bytes and ends in a whole character. Only a run that turns bad after
    that differs from decode().
    """

    def __init__(self, tokenizer: Vocabulary, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._fallback = "ByteFallback" in tokenizer.decoder_types
        self._before = list(context[-1:])  # the last token shown
        self._waiting: list[int] = []  # tokens after it whose text is not yet certain
        self._run = bytearray()  # bytes held back
        self._id_of_byte: dict[int, int] = {}
        self._bad = False  # this run is not UTF-8
        self._started = bool(context)  # some text was written

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        token = None if token_id in self._tokenizer.special_ids else self._tokenizer.token(token_id)
        if token is None:
            return ""
        match = BYTE_TOKEN.fullmatch(token) if self._fallback else None
        if match:
            return self._release() + self._byte(token_id, int(match[1], 16))
        text = self._end_run()
        self._waiting.append(token_id)
        old, new = self._decode(self._before), self._decode(self._before + self._waiting)
        if not new.startswith(old) or (new.endswith(REPLACEMENT) and len(self._waiting) < 8):
            return text
        self._before, self._waiting, self._started = [token_id], [], True
        return text + new[len(old) :]

    def flush(self) -> str:
        """Return what is left at the end."""
        return self._release() + self._end_run()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend.decode(ids, skip_special_tokens=True) if ids else ""

    def _release(self) -> str:
        """Return the text of the waiting tokens, certain or not."""
        if not self._waiting:
            return ""
        old, new = self._decode(self._before), self._decode(self._before + self._waiting)
        self._before, self._waiting, self._started = self._waiting[-1:], [], True
        return new[len(old) :]

    def _byte(self, token_id: int, value: int) -> str:
        self._before = [token_id]
        self._run.append(value)
        self._id_of_byte[value] = token_id
        if self._bad:
            self._run.clear()
            return REPLACEMENT
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            decoder.decode(bytes(self._run))
        except UnicodeDecodeError:
            self._bad, count = True, len(self._run)
            self._run.clear()
            self._started = True
            return REPLACEMENT * count
        whole = not decoder.getstate()[0]
        return self._run_text() if whole and len(self._run) >= RUN_HELD else ""

    def _end_run(self) -> str:
        text, self._bad = self._run_text(), False
        return text

    def _run_text(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        # the decoder may strip the very first space of a text
        if self._run and not self._started:
            text = self._decode([self._id_of_byte[byte] for byte in self._run])
        self._started = self._started or bool(self._run)
        self._run.clear()
        return text
