"""The tokenizer of a GGUF file as tokenizer.json: byte-level BPE ("gpt2") and four ways to split a
text into words, each compared with transformers' own (tests/tools/test_convert_gguf.py).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from engine.model.config.fields import Fields
from weights.jsonfile import shown

KEY = "tokenizer.ggml."
CONTROL, USER = 3, 4  # types of tokens: never shown as text; matched whole, shown
TEMPLATE_LIMIT = 1 << 20  # characters

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# letters with the marks that combine with them
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|"
    r"%s| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """How a family splits a text. digits: the expression for a number, or None for GPT-2's words
    with every digit alone. ignore_merges: a word that is a token is taken whole. bos: put it in
    front of every text unless the file says otherwise. nfc: compose characters first. words: the
    expression for words around it.
    """

    digits: str | None
    ignore_merges: bool = False
    bos: bool = False
    nfc: bool = False
    words: str = _WORDS

    def pre_tokenizer(self) -> pre.PreTokenizer:
        """The pre-tokenizer of tokenizer.json."""
        if self.digits is None:
            return pre.Sequence(
                [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
            )
        split = pre.Split(Regex(self.words % self.digits), "isolated")
        return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITTINGS = {
    "smollm": Splitting(None),
    "llama-bpe": Splitting(r"\p{N}{1,3}", ignore_merges=True, bos=True),
    "qwen2": Splitting(r"\p{N}", nfc=True),
    "qwen35": Splitting(r"\p{N}", nfc=True, words=_MARKED),
}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, the content of tokenizer_config.json, the number of tokens, the ids that begin
    and end a text (`eos` as generation_config.json has it).
    """

    tokenizer: Tokenizer
    settings: dict[str, Any]
    size: int
    bos: int | None
    eos: int | list[int] | None


def read_vocabulary(keys: dict[str, Any], source: str, context: int) -> Vocabulary:
    """The vocabulary of a file's keys. context: the model's length in tokens.

    Raises UnsupportedCheckpoint for another tokenizer or splitting, BadCheckpoint for tokens,
    merges or ids that contradict each other.
    """
    fields = Fields(keys, source)
    kind, splitting = fields.text(KEY + "model", ""), fields.text(KEY + "pre", "default")
    if kind != "gpt2":
        fields.unsupported(KEY + "model", kind or None, '"gpt2" (byte-level BPE)')
    if splitting not in SPLITTINGS:
        fields.unsupported(KEY + "pre", splitting, "one of " + ", ".join(SPLITTINGS))
    way, tokens = SPLITTINGS[splitting], _strings(fields, "tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        fields.refuse(KEY + "tokens", "a token twice", "different tokens")
    merges = _merges(fields, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=way.ignore_merges))
    if way.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = way.pre_tokenizer(), decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, _types(fields, tokens))
            if kind in (CONTROL, USER)
        ]
    )

    def ident(name: str) -> int | None:
        return fields.integer(f"{KEY}{name}_token_id", 0, len(tokens) - 1, None)

    bos, ends = ident("bos"), [i for i in (ident("eos"), ident("eot")) if i is not None]
    begins = fields.flag(KEY + "add_bos_token", way.bos) and bos is not None
    if begins and bos is not None:
        try:
            tokenizer.post_processor = _begin_with(tokens[bos], bos)
            sound = tokenizer.encode("").ids == [bos]
        except ValueError:
            sound = False
        if not sound:
            found = f"the token {shown(tokens[bos])}"
            fields.refuse(KEY + "bos_token_id", found, "a token to begin with")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": begins,
    }
    named = {
        "bos_token": bos,
        "eos_token": ends[0] if ends else None,
        "pad_token": ident("padding"),
    }
    settings |= {name: tokens[i] for name, i in named.items() if i is not None}
    template = _template(fields)
    if template:
        settings["chat_template"] = template
    ends = list(dict.fromkeys(ends))
    eos = ends if len(ends) > 1 else ends[0] if ends else None
    return Vocabulary(tokenizer, settings, len(tokens), bos, eos)


def _strings(fields: Fields, name: str) -> list[str]:
    """A list of strings that is not empty."""
    found = fields.data.get(KEY + name)
    if not isinstance(found, list) or not found:
        fields.refuse(KEY + name, type(found).__name__ if found else None, "a list of strings")
    return found


def _merges(fields: Fields, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens; both and what they make are in the vocabulary."""
    merges = []
    for merge in _strings(fields, "merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            fields.refuse(KEY + "merges", merge, "two tokens that make a third")
        merges.append((left, right))
    return merges


def _types(fields: Fields, tokens: list[str]) -> array[int]:
    """The type of each token. An empty control token would lose its id, so it is refused."""
    types = fields.data.get(KEY + "token_type")
    if not isinstance(types, array) or types.typecode == "f" or len(types) != len(tokens):
        fields.refuse(
            KEY + "token_type",
            f"{len(types)} values" if isinstance(types, array) else None,
            f"an integer for each of {len(tokens)} tokens",
        )
    if any(not token and kind in (CONTROL, USER) for token, kind in zip(tokens, types)):
        fields.refuse(KEY + "tokens", "an empty control token", "text")
    return types


def _begin_with(name: str, bos: int) -> processors.TemplateProcessing:
    """Put the bos in front of every text. Raises ValueError for a name that the template's language
    reads otherwise ("$A"); others ("a:1") are read as something else.
    """
    return processors.TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, bos)]
    )


def _template(fields: Fields) -> str:
    """The chat template, copied and never run here: the engine renders it in a process apart."""
    template = fields.text("tokenizer.chat_template", "")
    if len(template) > TEMPLATE_LIMIT:
        expected = f"at most {TEMPLATE_LIMIT}"
        fields.refuse("tokenizer.chat_template", f"{len(template)} characters", expected)
    return template
