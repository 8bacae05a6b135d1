"""Between text and token ids: the tokenizer, text that appears token by token, and stop strings.

Text to ids to text is not the identity, so a conversation lives on ids: only new text is ever encoded
(engine/conversation.py).
"""

import codecs
import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from engine.errors import BadCheckpoint, TemplateError, UnsupportedCheckpoint
from engine.template import ChatTemplate

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
RUN_HELD = 16               # bytes of a byte-fallback run held back; see FallbackStream
REPLACEMENT = "\ufffd"      # what a decoder writes for bytes that are no character
ANCHORS = ("\n", ".", "a", "0")


class Tokenizer:
    """A model folder's tokenizer.json, its tokenizer_config.json where there is one, and its chat template.

    Raises BadCheckpoint where a file is damaged and UnsupportedCheckpoint where only a slow tokenizer is there.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = [name for name in ("tokenizer.model", "vocab.json", "tiktoken.model") if (folder / name).is_file()]
            if others:
                raise UnsupportedCheckpoint(
                    f"{path}: not found, only {others[0]}; make it once with transformers: "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
            raise BadCheckpoint(f"{path}: not found, expected the model's tokenizer")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:      # tokenizers raises bare Exception for whatever is wrong in the file
            raise BadCheckpoint(f"{path}: not a tokenizer that can be read: {_first_line(error)}") from error
        self.backend.no_truncation()    # stored in the file by some: a silent cut
        self.backend.no_padding()
        self.settings = read_settings(folder)
        self.bos_token, self.eos_token = (_token_text(self.settings, f"{name}_token") for name in ("bos", "eos"))
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_max_id = max(vocabulary.values(), default=-1)
        added = self.backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        try:
            self.prefix_ids = self._find_prefix(vocabulary)
        except BaseException as error:  # a Rust panic is no Exception: a post-processor that names an unknown token
            if type(error).__name__ != "PanicException":
                raise
            raise BadCheckpoint(f"{path}: found a tokenizer that fails on \"a\": {_first_line(error)}, expected ids") from error
        first = self.backend.encode("x", add_special_tokens=False).ids[:1]
        # Llama 2's tokenizer and its kin write a space in front of every text; a continuation must not get one.
        self._adds_space = bool(first) and self.backend.id_to_token(first[0]).startswith(("▁", "Ġ"))
        self._decoders = _decoder_types(self.backend)
        self.template = ChatTemplate.load(folder, self.settings)

    def _find_prefix(self, vocabulary: dict[str, int]) -> tuple[int, ...]:
        """What goes before every text: what the post-processor puts there, else bos if the settings ask for it."""
        plain = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start:start + len(plain)] == plain:
                prefix = tuple(whole[:start])
                break
        else:
            prefix = ()
        if not prefix and self.settings.get("add_bos_token") is True and self.bos_token in vocabulary:
            return (vocabulary[self.bos_token],)
        return prefix

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. special: with the bos in front, as the model was trained (once, if the text has it already).

        Special tokens written in the text are recognised either way; nothing is ever cut.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if special and tuple(ids[:len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids]
        return ids

    def encode_spans(self, text: str, special: bool = True, continues: bool = False) -> tuple[list[int], array]:
        """Ids, and for each the position in `text` where its characters end (array of int64, ascending).

        continues: the text goes on where an earlier one ended, so no space is invented in front of it.
        Tokens that share a character have the same end; the bos ends at 0.
        """
        encoding, skip, shift = self.backend.encode(text, add_special_tokens=False), 0, 0
        if continues and self._adds_space and encoding.ids and encoding.ids[0] not in self._added:
            encoding, skip, shift = self._anchored(text, encoding)
        ids, ends, furthest = encoding.ids[skip:], array("q"), 0
        for _, end in encoding.offsets[skip:]:
            furthest = max(furthest, end - shift)
            ends.append(furthest)
        if special and not continues and tuple(ids[:len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids], array("q", [0] * len(self.prefix_ids)) + ends
        return ids, ends

    def _anchored(self, text: str, plain) -> tuple:
        """An encoding of an anchor and the text with a token border between them, and what to skip of it."""
        for anchor in ANCHORS:
            encoding = self.backend.encode(anchor + text, add_special_tokens=False)
            size, offsets = len(anchor), encoding.offsets
            border = next((i for i, (_, end) in enumerate(offsets) if end > size), None)
            if border and offsets[border][0] >= size and offsets[border - 1][1] == size:
                return encoding, border, size
        return plain, 0, 0

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out, as transformers decodes with skip_special_tokens=True."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = True) -> str:
        """A dialogue as the model's text, to be encoded with special=False; TemplateError without a chat template."""
        if self.template is None:
            raise TemplateError("this model has no chat template (a base model): give it text to complete")
        return self.template.render(messages, add_generation_prompt)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one id; None where it has none (a padded embedding row)."""
        return self.backend.id_to_token(token_id)

    def stream(self, context: Sequence[int] = ()) -> "ByteStream | FallbackStream":
        """An incremental decoder: push(id) -> text, flush() -> the rest; joined, exactly decode() of all ids.

        context: the ids before; only the last few are looked at, so that a continuation keeps its leading space.
        """
        only_bytes = "ByteLevel" in self._decoders and self._decoders <= {"ByteLevel", "Fuse"}
        kind = ByteStream if only_bytes else FallbackStream
        return kind(self, [i for i in context[-8:] if i not in self.special_ids and self.token(i) is not None])


def read_settings(folder: Path) -> dict:
    """tokenizer_config.json over special_tokens_map.json; {} where neither is there."""
    merged: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise BadCheckpoint(f"{path}: not JSON: {_first_line(error)}") from error
            if not isinstance(data, dict):
                raise BadCheckpoint(f"{path}: found {type(data).__name__}, expected an object")
            merged.update(data)
    return merged


def _token_text(settings: dict, name: str) -> str:
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _decoder_types(backend: tokenizers.Tokenizer) -> frozenset[str]:
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in state.get("decoders", [state]))


def _byte_alphabet() -> dict[str, int]:
    """Which character stands for which byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return table


BYTE_ALPHABET = _byte_alphabet()


class ByteStream:
    """Text of a byte-level tokenizer, token by token: a character is emitted when all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in context:        # a character is at most four tokens long: eight hold the start of the last
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" for special tokens and halves of characters."""
        token = None if token_id in self._tokenizer.special_ids else self._tokenizer.token(token_id)
        if token is None:
            return ""
        try:
            data = bytes(BYTE_ALPHABET[character] for character in token)
        except KeyError:                # an added token, spelled as it is
            data = token.encode()
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: a replacement character for half a one."""
        return self._decoder.decode(b"", final=True)


class FallbackStream:
    """Text of any other tokenizer, token by token: a token's text is what it adds to that of the token before it.

    Byte tokens (<0xE6>) are decoded together: the decoder writes a run of them as characters where all of the run is
    UTF-8 and one replacement character per byte where it is not. So a run is held back until it ends, is known to be
    bad, or has 16 bytes and a whole last character (only a run that turns bad after that differs from decode()).
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]):
        self._tokenizer = tokenizer
        self._fallback = "ByteFallback" in tokenizer._decoders
        self._before = list(context[-1:])           # the last token shown
        self._waiting: list[int] = []               # tokens after it whose text is not yet certain
        self._run, self._bad = bytearray(), False
        self._started = bool(context)

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
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
        return text + new[len(old):]

    def flush(self) -> str:
        """What is left at the end."""
        return self._release() + self._end_run()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend.decode(ids, skip_special_tokens=True) if ids else ""

    def _release(self) -> str:
        """The text of waiting tokens, certain or not."""
        if not self._waiting:
            return ""
        old, new = self._decode(self._before), self._decode(self._before + self._waiting)
        self._before, self._waiting, self._started = self._waiting[-1:], [], True
        return new[len(old):]

    def _byte(self, token_id: int, value: int) -> str:
        self._before = [token_id]
        self._run.append(value)
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
        if self._run and not self._started:         # the decoder may strip the very first space of a text
            text = self._decode([self._tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in self._run])
        self._started = self._started or bool(self._run)
        self._run.clear()
        return text


class StopScanner:
    """Holds back the end of a text as long as it could still become a stop string.

    The first stop string to be complete ends the text, the longest where several end together: the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False      # a stop string was met

    def push(self, text: str) -> str:
        """Text that may be shown; a stop string and what follows it are dropped and set `found`."""
        if not self._stops or self.found:
            return "" if self.found else text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held, self.found = "", True
            return text[:min(found)[1]]
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """The text still held back, when the answer ends for another reason."""
        text, self._held = self._held, ""
        return text


def tokens_before(ends: Sequence[int], position: int) -> int:
    """How many tokens lie wholly before a text position: the largest clean border n where ends[n - 1] <= position.

    ends: ascending text positions where tokens end. A border inside a character (equal ends) is not clean.
    """
    n = bisect_left(ends, position + 1)
    while 0 < n < len(ends) and ends[n - 1] == ends[n]:
        n -= 1
    return n
