"""Text to token ids and back, with a model folder's own tokenizer files.

Encoding and then decoding a text does not always give it back. A conversation therefore keeps ids
and only ever encodes new text (engine/chat/talk/conversation.py).
"""

from __future__ import annotations

import json
import os
import unicodedata
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.base.errors import BadCheckpoint, TemplateError, UnsupportedCheckpoint
from engine.base.figures import first_line
from engine.text.boundary import valid
from engine.text.detokenizer import ByteStream, FallbackStream
from engine.text.literal import Controls, Written
from engine.text.sandbox.expressions import require_endings
from engine.text.sandbox.growth import read_tokenizer
from engine.text.sandbox.template import ChatTemplate, checked_messages
from weights.jsonfile import inside, present, read_object, shown

LONG = 1024  # characters
ANCHORS = ("\n", ".", "a", "0")  # texts to encode in front of a continuation, tried in this order


# what a folder may hold instead of tokenizer.json
OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model", "spiece.model")


def has_tokenizer(folder: str | Path) -> bool:
    """Say whether a model folder holds a tokenizer of any kind. Without one, a model runs on token
    ids.
    """
    found = Path(folder)
    return any(present(found / name) for name in ("tokenizer.json", *OTHERS))


class Tokenizer:
    """A model folder's tokenizer.json with its settings and chat template, if it has them.

    `special_ids` are never shown as text; `vocab_max_id` is the largest id; `prefix_ids` go before
    every text (usually the bos). Raises BadCheckpoint if a file is missing or damaged, and
    UnsupportedCheckpoint if the folder holds only a slow tokenizer.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        backend, settings = _load_backend(folder), read_settings(folder)
        self._begin(
            folder / "tokenizer.json", backend, settings, ChatTemplate.load(folder, settings)
        )

    @classmethod
    def of(cls, path: Path, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> Tokenizer:
        """The tokenizer of a model that is one file: `settings` as in tokenizer_config.json."""
        self = cls.__new__(cls)
        self._begin(path, backend, settings, ChatTemplate.of(settings, path))
        return self

    def _begin(
        self,
        path: Path,
        backend: tokenizers.Tokenizer,
        settings: dict[str, Any],
        template: ChatTemplate | None,
    ) -> None:
        self.path, self.backend, self.settings = path, backend, settings
        self.beside = False
        self.template = template
        self.bos_token = _token_text(self.settings, "bos_token")
        self.eos_token = _token_text(self.settings, "eos_token")
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_max_id = max(vocabulary.values(), default=-1)
        added = self.backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.prefix_ids = self._find_prefix(vocabulary)
        # Tokenizers like Llama 2's write a space in front of every text; a continuation must not
        # get one. Some write one behind every special token too.
        self._adds_space = self._begins_with_space(self._encoded("x").ids[:1])
        self.decoder_types = _decoder_types(self.backend)
        source = self.template.source if self.template else ""
        self.controls = Controls(
            [token.content for token in added.values() if token.special],
            [
                token.content
                for token in added.values()
                if not token.special and token.content.strip() and token.content in source
            ],
        )
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._marks: tuple[frozenset[int], frozenset[int]] | None = None

    def let_others_run(self) -> None:
        """Encode long texts without the interpreter's lock, which `encode` holds for a second and
        more a megabyte: other threads go on. TOKENIZERS_PARALLELISM=false is set where it is not
        set: one text needs no threads of its own, and they would warn of every fork.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.beside = True

    def _begins_with_space(self, ids: Sequence[int]) -> bool:
        return any((self.token(i) or "").startswith(("▁", "Ġ")) for i in ids[:1])

    def _encoded(
        self, text: str, special: bool = False, backend: tokenizers.Tokenizer | None = None
    ) -> tokenizers.Encoding:
        """Encode Unicode text. Raises UsageError for other text, and BadCheckpoint where the native
        library panics: at an expression without end, or a token that the vocabulary lacks.
        """
        valid(text, "text")
        chosen = backend or self.backend
        try:
            if self.beside and len(text) > LONG:
                return chosen.encode_batch([text], add_special_tokens=special)[0]
            return chosen.encode(text, add_special_tokens=special)
        except BaseException as error:
            # no Exception, but what Rust's panics become
            if type(error).__name__ != "PanicException":
                raise
            raise BadCheckpoint(
                f"{self.path}: encoding the text {shown(text, 20)!r} fails: {first_line(error)}"
            ) from error

    def encode_by(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Ids of a text by another backend, with nothing in front. Raises as `encode`."""
        return self._encoded(text, backend=backend).ids

    def _find_prefix(self, vocabulary: dict[str, int]) -> tuple[int, ...]:
        """Return the ids that go before every text.

        The post-processor decides; if it adds none, the bos is one when the settings ask for it.
        """
        plain, whole = self._encoded("a").ids, self._encoded("a", special=True).ids
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

        special: put the bos in front as in training, unless the text already begins with it. Text
        from strangers goes through `write` and `encode_spans`, which keep it text.
        """
        ids = self._encoded(text).ids
        if special and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids]
        return ids

    def encode_spans(
        self, written: Written | str, special: bool = True, continues: bool = False
    ) -> tuple[list[int], array[int]]:
        """Encode a text and return the ids and, for each, where in the text its characters end.

        Ends are an ascending array of int64. Tokens that share a character have the same end; the
        bos ends at 0. continues: the text goes on where an earlier one ended, so the tokenizer adds
        no space in front of it. Control tokens are recognised but for those that `written` says are
        text.
        """
        written = Written(written) if isinstance(written, str) else written
        ids: list[int] = []
        ends = array("q")
        if not written.literal:
            ids, ends = self._spans(written.text, continues)
        else:
            for start, stop, plain in self.controls.pieces(written):
                more, where = self._spans(
                    written.text[start:stop],
                    continues or (start > 0 and not self._space_behind_special()),
                    self._plain() if plain else self.backend,
                )
                ids += more
                ends.extend(end + start for end in where)
        if special and not continues and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids], array("q", [0] * len(self.prefix_ids)) + ends
        return ids, ends

    def _spans(
        self, text: str, continues: bool, backend: tokenizers.Tokenizer | None = None
    ) -> tuple[list[int], array[int]]:
        """Ids and ends of a text by one backend."""
        encoding, skip, shift = self._encoded(text, backend=backend), 0, 0
        if continues and self._adds_space and encoding.ids and encoding.ids[0] not in self._added:
            encoding, skip, shift = self._anchored(text, encoding, backend)
        ends, furthest = array("q"), 0
        for _, end in encoding.offsets[skip:]:
            furthest = max(furthest, end - shift)
            ends.append(furthest)
        return encoding.ids[skip:], ends

    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without control tokens; made when a text first spells one (up to 1 s)."""
        if self._plain_backend is None:
            made = tokenizers.Tokenizer.from_str(self.backend.to_str())
            made.add_special_tokens(list(self.controls.named))
            made.encode_special_tokens = True
            self._plain_backend = made
        return self._plain_backend

    def _space_behind_special(self) -> bool:
        """Whether the tokenizer writes its space in front of a text behind a special token too."""
        special = next((self.token(i) for i in sorted(self.special_ids)), None)
        if not self._adds_space or special is None:
            return False
        return self._begins_with_space(self._encoded(f"{special}x").ids[1:])

    def _anchored(
        self,
        text: str,
        plain: tokenizers.Encoding,
        backend: tokenizers.Tokenizer | None = None,
    ) -> tuple[tokenizers.Encoding, int, int]:
        """Encode the text behind an anchor that takes the added space.

        Returns the encoding and the anchor's tokens and characters, which the caller skips. An
        anchor serves if a token ends exactly where it ends; if none does, returns `plain`, 0, 0.
        """
        for anchor in ANCHORS:
            encoding = self._encoded(anchor + text, backend=backend)
            size, offsets = len(anchor), encoding.offsets
            border = next((i for i, (_, end) in enumerate(offsets) if end > size), None)
            if border and offsets[border][0] >= size and offsets[border - 1][1] == size:
                return encoding, border, size
        return plain, 0, 0

    def marks(self) -> tuple[frozenset[int], frozenset[int]]:
        """(ids of special tokens, ids whose text is punctuation alone, but for spaces)."""
        if self._marks is None:
            ids = [i for i in range(self.vocab_max_id + 1) if i not in self.special_ids]
            texts = self.backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
            found = (i for i, text in zip(ids, texts) if only_punctuation(text.strip()))
            self._marks = self.special_ids, frozenset(found)
        return self._marks

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids without special tokens, as transformers does with skip_special_tokens=True."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a dialogue as the model's text, to be encoded with special=False, as transformers
        does: control tokens that a message spells look like the template's own (see `write`).
        more: variables of the template.

        Raises TemplateError if the model has no chat template.
        """
        if self.template is None:
            raise TemplateError(
                "this model has no chat template (it is a base model): give it text to complete"
            )
        return self.template.render(messages, add_generation_prompt, tools, more)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Written:
        """Write a dialogue for `encode_spans`: control tokens that a message, a tool or a variable
        spells stay text.

        Raises TemplateError as `render`.
        """
        listed = checked_messages(messages)
        beside = {"tools": list(tools or ()), "more": dict(more or {})}
        marked, mark = self.controls.marked([*listed, beside])
        found = marked.pop()
        text = self.render(marked, add_generation_prompt, found["tools"], found["more"])
        return self.controls.written(text, mark)

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


def only_punctuation(text: str) -> bool:
    """Whether a text is one or more characters of Unicode's punctuation."""
    return bool(text) and all(unicodedata.category(character)[0] == "P" for character in text)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json over special_tokens_map.json; {} if there is neither."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if present(folder / name):
            merged.update(read_object(inside(folder, name)))
    return merged


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json, with no truncation and no padding."""
    path = folder / "tokenizer.json"
    if not present(path):
        others = [name for name in OTHERS if path.with_name(name).is_file()]
        if others:
            raise UnsupportedCheckpoint(
                f"{path}: not found, only {others[0]}; make it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        raise BadCheckpoint(f"{path}: not found, expected the model's tokenizer")
    file = inside(folder, path.name)
    text = read_tokenizer(file)
    require_endings(file, text)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    # tokenizers raises a bare Exception for anything wrong in the file, and panics at some of it
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
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
