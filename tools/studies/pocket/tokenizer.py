"""The shipped model's tokenizer: byte-level BPE trained on the task generators' own text, with one
token per number of one to three digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tools.tasks import TASKS, words
from tools.tasks.talk import outside

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIALS = ["<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, USER, ASSISTANT, END = range(5)
VOCABULARY = 5120
# a space before a number belongs to the word or sign before it: a number is the same token
# everywhere, and one token at most stands between a key and its value
SPLIT = r" ?\p{L}+(?: (?=\p{N}))?|\p{N}{1,3}|\n| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s"
# A message may carry a document before its question: everything up to its last empty line is read
# as plain text, as in training.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'].rstrip() + '\\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{% set parts = message['content'].rstrip().split('\\n\\n') %}"
    "{% if parts | length > 1 %}{{ (parts[:-1] | join('\\n\\n')).rstrip() + '\\n' }}{% endif %}"
    "{{ '<|user|>' + parts[-1].strip() }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'].strip() + '<|end|>' }}"
    "{% else %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _corpus(rng: Random) -> Iterator[str]:
    pools = [v for v in vars(words).values() if isinstance(v, list)]
    for _ in range(60):
        for pool in pools:
            for word in pool:
                yield f"{word} {word}\n{word} {word}"
    for number in range(1000):
        yield "\n".join([str(number), f"{number:03d}", f"{number % 100:02d}"] * 400)
    for name, task in sorted(TASKS.items()):
        if task.trained:
            for seed in range(60):
                questions = min(task.max_questions, 4)
                draft = task.build(
                    Random(f"{name}{seed}"), max(40, task.needed(questions)), questions, None
                )
                yield "\n".join([draft.document, *draft.questions, *draft.answers])
    for _ in range(2000):
        yield " ".join(outside(rng))
    for _ in range(3000):
        yield f"{words.invented(rng)} met {words.invented(rng)}"


def train_tokenizer() -> Tokenizer:
    """The tokenizer, the same in every run: special tokens 0..4, at most VOCABULARY entries."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_corpus(Random(1)), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
