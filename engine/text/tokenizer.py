"""Text to token ids and back, with a model folder's own tokenizer files.

Encoding and then decoding a text does not always give it back. A conversation therefore keeps ids
and only ever encodes new text (engine/chat/conversation.py).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import BadCheckpoint, TemplateError, UnsupportedCheckpoint
from engine.text.detokenizer import ByteStream, FallbackStream
from engine.text.template import ChatTemplate
from engine.units import first_line

ANCHORS = ("\n", ".", "a", "0")  # texts to encode in front of a continuation, tried in this order


class Tokenizer:
    """A model folder's tokenizer.json with its settings and chat template, if it has them.

    `special_ids` are never shown as text; `vocab_max_id` is the largest id; `prefix_ids` go before
    every text (usually the bos). Raises BadCheckpoint if a file is missing or damaged, and
    UnsupportedCheckpoint if the folder holds only a slow tokenizer.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        self.backend = _load_backend(path)
        self.settings = read_settings(folder)
        self.bos_token = _token_text(self.settings, "bos_token")
        self.eos_token = _token_text(self.settings, "eos_token")
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_max_id = max(vocabulary.values(), default=-1)
        added = self.backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        try:
            self.prefix_ids = self._find_prefix(vocabulary)
        # A post-processor that names an unknown token panics in Rust, which is no Exception.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise BadCheckpoint(
                f'{path}: encoding the text "a" fails: {first_line(error)}'
            ) from error
        # Tokenizers like Llama 2's write a space in front of every text; a continuation must not
        # get one.
        first = self.backend.encode("x", add_special_tokens=False).ids[:1]
        self._adds_space = any((self.token(i) or "").startswith(("▁", "Ġ")) for i in first)
        self.decoder_types = _decoder_types(self.backend)
        self.template = ChatTemplate.load(folder, self.settings)

    def _find_prefix(self, vocabulary: dict[str, int]) -> tuple[int, ...]:
        """Return the ids that go before every text.

        The post-processor decides; if it adds none, the bos is one when the settings ask for it.
        """
        plain = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                prefix = tuple(whole[:start])
                break
        else:
            prefix = ()
        if (
            not prefix
            and self.settings.get("add_bos_token") is True
            and self.bos_token in vocabulary
        ):
            return (vocabulary[self.bos_token],)
        return prefix

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Encode a text of any length; special tokens written in it are recognised.

        special: put the bos in front as in training, unless the text already begins with it.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if special and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids]
        return ids

    def encode_spans(
        self, text: str, special: bool = True, continues: bool = False
    ) -> tuple[list[int], array[int]]:
        """Encode a text and return the ids and, for each, where in `text` its characters end.

        Ends are an ascending array of int64. Tokens that share a character have the same end; the
        bos ends at 0. continues: the text goes on where an earlier one ended, so the tokenizer adds
        no space in front of it.
        """
        encoding, skip, shift = self.backend.encode(text, add_special_tokens=False), 0, 0
        if continues and self._adds_space and encoding.ids and encoding.ids[0] not in self._added:
            encoding, skip, shift = self._anchored(text, encoding)
        ids, ends, furthest = encoding.ids[skip:], array("q"), 0
        for _, end in encoding.offsets[skip:]:
            furthest = max(furthest, end - shift)
            ends.append(furthest)
        if special and not continues and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids], array("q", [0] * len(self.prefix_ids)) + ends
        return ids, ends

    def _anchored(
        self, text: str, plain: tokenizers.Encoding
    ) -> tuple[tokenizers.Encoding, int, int]:
        """Encode the text behind an anchor that takes the added space.

        Returns the encoding and the anchor's tokens and characters, which the caller skips. An
        anchor serves if a token ends exactly where it ends; if none does, returns `plain`, 0, 0.
        """
        for anchor in ANCHORS:
            encoding = self.backend.encode(anchor + text, add_special_tokens=False)
            size, offsets = len(anchor), encoding.offsets
            border = next((i for i, (_, end) in enumerate(offsets) if end > size), None)
            if border and offsets[border][0] >= size and offsets[border - 1][1] == size:
                return encoding, border, size
        return plain, 0, 0

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids without special tokens, as transformers does with skip_special_tokens=True."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Write a dialogue as the model's text, to be encoded with special=False.

        Raises TemplateError if the model has no chat template.
        """
        if self.template is None:
            raise TemplateError(
                "this model has no chat template (it is a base model): give it text to complete"
            )
        return self.template.render(messages, add_generation_prompt)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id; None if it has none (a padded row)."""
        return self.backend.id_to_token(token_id)

    def stream(self, context: Sequence[int] = ()) -> ByteStream | FallbackStream:
        """Make an incremental decoder: push(id) -> text, flush() -> the rest.

        Its texts join to exactly decode() of all ids. context: the ids before them; the last eight
        are read, so that a continuation keeps its leading space.
        """
        shown = [i for i in context[-8:] if i not in self.special_ids and self.token(i) is not None]
        types = self.decoder_types
        if "ByteLevel" in types and types <= {"ByteLevel", "Fuse"}:
            return ByteStream(self, shown)
        return FallbackStream(self, shown)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json over special_tokens_map.json; {} if there is neither."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise BadCheckpoint(f"{path}: not JSON: {first_line(error)}") from error
            if not isinstance(data, dict):
                raise BadCheckpoint(f"{path}: found {type(data).__name__}, expected an object")
            merged.update(data)
    return merged


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json, with no truncation and no padding."""
    if not path.is_file():
        others = [
            name
            for name in ("tokenizer.model", "vocab.json", "tiktoken.model")
            if path.with_name(name).is_file()
        ]
        if others:
            raise UnsupportedCheckpoint(
                f"{path}: not found, only {others[0]}; make it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        raise BadCheckpoint(f"{path}: not found, expected the model's tokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # tokenizers raises a bare Exception for anything wrong in the file
    except Exception as error:
        raise BadCheckpoint(
            f"{path}: not a tokenizer that can be read: {first_line(error)}"
        ) from error
    backend.no_truncation()  # some files store one, which would cut long texts silently
    backend.no_padding()
    return backend


def _token_text(settings: dict[str, Any], name: str) -> str:
    value = settings.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _decoder_types(backend: tokenizers.Tokenizer) -> frozenset[str]:
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in state.get("decoders", [state]))
