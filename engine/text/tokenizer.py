"""Between text and token ids: the tokenizer, text that appears token by token, and stop strings.

Text to ids to text is not the identity, so a conversation lives on ids: only new text is ever
encoded (engine/chat/conversation.py).
"""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from engine.errors import BadCheckpoint, TemplateError, UnsupportedCheckpoint
from engine.text.detokenizer import ByteStream, FallbackStream
from engine.text.template import ChatTemplate

ANCHORS = ("\n", ".", "a", "0")


class Tokenizer:
    """A model folder's tokenizer.json, its tokenizer_config.json where there is one, and its chat
    template.

    Raises BadCheckpoint where a file is damaged and UnsupportedCheckpoint where only a slow
    tokenizer is there.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = [
                name
                for name in ("tokenizer.model", "vocab.json", "tiktoken.model")
                if (folder / name).is_file()
            ]
            if others:
                raise UnsupportedCheckpoint(
                    f"{path}: not found, only {others[0]}; make it once with transformers: "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
            raise BadCheckpoint(f"{path}: not found, expected the model's tokenizer")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        # tokenizers raises bare Exception for whatever is wrong in the file
        except Exception as error:
            raise BadCheckpoint(
                f"{path}: not a tokenizer that can be read: {_first_line(error)}"
            ) from error
        self.backend.no_truncation()  # stored in the file by some: a silent cut
        self.backend.no_padding()
        self.settings = read_settings(folder)
        self.bos_token, self.eos_token = (
            _token_text(self.settings, f"{name}_token") for name in ("bos", "eos")
        )
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_max_id = max(vocabulary.values(), default=-1)
        added = self.backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        try:
            self.prefix_ids = self._find_prefix(vocabulary)
        # a Rust panic is no Exception: a post-processor that names an unknown token
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise BadCheckpoint(
                f'{path}: found a tokenizer that fails on "a": {_first_line(error)}, expected ids'
            ) from error
        first = self.backend.encode("x", add_special_tokens=False).ids[:1]
        # Llama 2's tokenizer and its kin write a space in front of every text; a continuation must
        # not get one.
        self._adds_space = bool(first) and self.backend.id_to_token(first[0]).startswith(("▁", "Ġ"))
        self._decoders = _decoder_types(self.backend)
        self.template = ChatTemplate.load(folder, self.settings)

    def _find_prefix(self, vocabulary: dict[str, int]) -> tuple[int, ...]:
        """What goes before every text: what the post-processor puts there, else bos if the settings
        ask for it.
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
        """Ids of a text. special: with the bos in front, as the model was trained (once, if the
        text has it already).

        Special tokens written in the text are recognised either way; nothing is ever cut.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if special and tuple(ids[: len(self.prefix_ids)]) != self.prefix_ids:
            return [*self.prefix_ids, *ids]
        return ids

    def encode_spans(
        self, text: str, special: bool = True, continues: bool = False
    ) -> tuple[list[int], array]:
        """Ids, and for each the position in `text` where its characters end (array of int64,
        ascending).

        continues: the text goes on where an earlier one ended, so no space is invented in front of
        it. Tokens that share a character have the same end; the bos ends at 0.
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

    def _anchored(self, text: str, plain) -> tuple:
        """An encoding of an anchor and the text with a token border between them, and what to skip
        of it.
        """
        for anchor in ANCHORS:
            encoding = self.backend.encode(anchor + text, add_special_tokens=False)
            size, offsets = len(anchor), encoding.offsets
            border = next((i for i, (_, end) in enumerate(offsets) if end > size), None)
            if border and offsets[border][0] >= size and offsets[border - 1][1] == size:
                return encoding, border, size
        return plain, 0, 0

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out, as transformers decodes with
        skip_special_tokens=True.
        """
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = True) -> str:
        """A dialogue as the model's text, to be encoded with special=False; TemplateError without a
        chat template.
        """
        if self.template is None:
            raise TemplateError(
                "this model has no chat template (a base model): give it text to complete"
            )
        return self.template.render(messages, add_generation_prompt)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of one id; None where it has none (a padded embedding row)."""
        return self.backend.id_to_token(token_id)

    def stream(self, context: Sequence[int] = ()) -> "ByteStream | FallbackStream":
        """An incremental decoder: push(id) -> text, flush() -> the rest; joined, exactly decode()
        of all ids.

        context: the ids before; only the last few are looked at, so that a continuation keeps its
        leading space.
        """
        only_bytes = "ByteLevel" in self._decoders and self._decoders <= {"ByteLevel", "Fuse"}
        kind = ByteStream if only_bytes else FallbackStream
        return kind(
            self,
            [i for i in context[-8:] if i not in self.special_ids and self.token(i) is not None],
        )


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
