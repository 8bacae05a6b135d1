"""The texts that a model is measured on: the user's files, or documents of tools/tasks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine import LLM
from engine.base.errors import EngineError, UsageError
from tools.common.arguments import add_flags
from tools.tasks import make_sample

# retrieval, multi-hop, dictionary, many evidence
MADE = ("kv", "chains", "two_stage", "facts", "listing", "mixed", "frequent")
LONG = ("mixed", "listing", "frequent")  # tasks that need documents of at least 1,024 tokens


def add_text_flags(
    parser: argparse.ArgumentParser, texts: int | None = 10, why: str = "10"
) -> None:
    """The flags that say which model is measured on which texts, and where. texts: their default
    number, which `why` says in words.
    """
    made = dict(help="of the texts that are made")
    model = dict(required=True, default=None, help="alias, hub id or folder")
    add_flags(parser, "model dtype device seed", model=model, seed=made)
    add = parser.add_argument
    about = "measure on this text (repeatable; - is stdin)"
    add("--text", action="append", default=[], metavar="FILE", help=about)
    about = f"how many texts to take where no --text is given (default {why})"
    add("--texts", type=int, default=texts, help=about)


def read_text(file: str, flag: str = "--text") -> str:
    """The text of a file, or of stdin where the name is "-". Raises UsageError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {file}: found {error}, expected a readable UTF-8 file") from error


def texts_for(
    llm: LLM, files: Sequence[str], count: int, length: int, seed: int
) -> list[tuple[str, list[int]]]:
    """(name, token ids) of every text: the user's files cut to `length` tokens, or `count` made
    documents of about that length.
    """
    found = []
    for file in files:
        ids = llm.encode(read_text(file))
        if len(ids) < 128:
            raise UsageError(f"--text {file}: found {len(ids)} tokens, expected at least 128")
        found.append((Path(file).name, ids[:length]))
    kinds = [name for name in MADE if length >= 1024 or name not in LONG]
    for number in range(0 if files else count):
        name = kinds[number % len(kinds)]
        found.append((name, _made(llm, name, length, seed + number)[: llm.max_context]))
    return found


def pieces_of(
    llm: LLM, files: Sequence[str], length: int
) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
    """(name, token ids) of the pieces of `length` tokens of the user's files, in turn for a search
    and held out from it. Raises UsageError where there are fewer than two.
    """
    found = []
    for file in files:
        ids = llm.encode(read_text(file))
        starts = range(0, len(ids) - length + 1, length)
        found += [(f"{Path(file).name}:{start}", ids[start : start + length]) for start in starts]
    if len(found) < 2:
        raise UsageError(
            f"--text: found {len(found)} pieces of {length} tokens, expected at least 2, one of "
            "them held out; give longer texts or a smaller --length"
        )
    return found[::2], found[1::2]


def _made(llm: LLM, task: str, length: int, seed: int) -> list[int]:
    """Token ids of a document, its question and its right answer, as the chat template writes
    them where the model has one.
    """
    tokenizer = llm.tokenizer

    def size(text: str) -> int:
        return len(tokenizer.encode(text, special=False))

    sample = make_sample(task, length - 96, size, seed)
    asked = f"{sample.document}\n{sample.questions[0]}"
    try:
        rendered = tokenizer.render([{"role": "user", "content": asked}])
    except EngineError:
        return tokenizer.encode(f"{asked}\n{sample.answers[0]}")
    return tokenizer.encode(rendered + sample.answers[0], special=False)
