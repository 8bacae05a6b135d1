"""Small tokenizers of every kind the engine meets: byte-level, byte-fallback, metaspace, word
pieces.
"""

import json
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Once upon a time there was a little girl named Lily. "
    "She liked to play outside, and the sun was warm.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 22))  # 23",
    "Grüße aus München, où le café est à côté. Привет мир. 你好世界 1234567890 "
    "<b>x</b> \t tabs  and   spaces",
] * 3
SPECIALS = ["<pad>", "<s>", "</s>", "<|user|>", "<|end|>"]


def _train(tokenizer: Tokenizer, alphabet=(), size=420) -> Tokenizer:
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=SPECIALS,
            initial_alphabet=list(alphabet),
            show_progress=False,
        ),
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """Llama 3's kind: byte-level BPE with a regular expression in front, bos from the
    post-processor.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r" ?\p{L}+|\p{N}{1,3}|\n| ?[^\s\p{L}\p{N}]+|\s"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    _train(made, pre_tokenizers.ByteLevel.alphabet())
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def _with_byte_tokens(made: Tokenizer) -> Tokenizer:
    state = json.loads(made.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    state["model"].update(byte_fallback=True, unk_token="<pad>", fuse_unk=False)
    return Tokenizer.from_str(json.dumps(state))


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: a space put in front, spaces as ▁, unknown characters as byte tokens."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _with_byte_tokens(_train(made, size=300))


def metaspace(scheme: str = "first") -> Tokenizer:
    """The metaspace kind: a pre-tokenizer writes ▁ and its decoder takes it away; unknown
    characters as byte tokens.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    return _with_byte_tokens(_train(made, size=300))


def word_pieces() -> Tokenizer:
    """BERT's kind, which no Llama uses: the plain path must still be right."""
    made = Tokenizer(models.WordPiece(unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False),
    )
    return made


MADE = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
    "metaspace-never": lambda: metaspace("never"),
    "word-pieces": word_pieces,
}


def save(made: Tokenizer, folder: Path, **settings) -> Path:
    """Write tokenizer.json and a tokenizer_config.json with the given settings."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|end|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
