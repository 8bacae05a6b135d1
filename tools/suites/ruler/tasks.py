"""The thirteen tasks by name, with the published parameters, and one prompt of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.suites.prompts.fitting import SEED, fitted
from tools.suites.prompts.instance import Instance
from tools.suites.ruler.chains import Chains
from tools.suites.ruler.counts import CommonWords, FrequentWords
from tools.suites.ruler.documents import Documents
from tools.suites.ruler.metrics import match_all, match_part
from tools.suites.ruler.needles import Needles
from tools.suites.ruler.sources import texts

SHORT = 4096  # tokens below which lists of words are thinner, as published


@dataclass(frozen=True)
class Task:
    """builder(length, number, files) makes what builds its prompts. written: tokens that an answer
    may have. sources: what of `Texts.differs` it uses. file: the key of the data that it needs.
    """

    builder: Callable[[int, int, Mapping[str, Path]], Any]
    written: int
    score: Callable[[str, Sequence[str]], float] = match_all
    sources: tuple[str, ...] = ()
    file: str = ""


def _needles(*given: Any, **more: Any) -> Task:
    made = Needles(*given, **more)
    sources = ("essay", "sentences") if made.haystack == "essay" else ()
    words = ("words",) if "words" in (made.keys, made.values) else ()
    return Task(lambda length, number, files: made, 128, sources=sources + words)


def _common(length: int, number: int, files: Mapping[str, Path]) -> CommonWords:
    return CommonWords() if length >= SHORT else CommonWords(6, 1, 20, 3, 1)


def _documents(kind: str) -> Task:
    return Task(lambda n, i, files: Documents(files[kind], kind, i), 32, match_part, file=kind)


TASKS: dict[str, Task] = {
    "niah_single_1": _needles("noise"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", values="uuids"),
    "niah_multikey_1": _needles("essay", hidden=4),
    "niah_multikey_2": _needles("needle"),
    "niah_multikey_3": _needles("needle", "uuids", "uuids"),
    "niah_multivalue": _needles("essay", each=4),
    "niah_multiquery": _needles("essay", hidden=4, asked=4),
    "vt": Task(lambda length, number, files: Chains(), 30),
    "cwe": Task(_common, 120, sources=("words",)),
    "fwe": Task(lambda length, number, files: FrequentWords((length - 50) // 50), 50),
    "qa_1": _documents("squad"),
    "qa_2": _documents("hotpotqa"),
}
DEFAULT = tuple(name for name, task in TASKS.items() if not task.file)


def make(
    name: str,
    length: int,
    number: int,
    tokenizer: Tokenizer,
    seed: int = SEED,
    files: Mapping[str, Path] | None = None,
) -> Instance:
    """Prompt `number` of a task, with its answer of at most `length` tokens: as much context as
    fits. The same in every process for the same tokenizer, packages and files.

    files: {"squad" | "hotpotqa": a local file}. Raises UsageError for an unknown task, a length
    that is too short, or data that is not there.
    """
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}: one of {', '.join(TASKS)}")
    task = TASKS[name]
    if task.file and task.file not in (files or {}):
        raise UsageError(f"task {name} needs a file of {task.file}: give --{task.file} FILE")
    build = task.builder(length, number, files or {})
    return fitted("ruler", name, build, task.written, length, number, tokenizer, seed)


def differs(names: Sequence[str]) -> list[str]:
    """Lines that say what of these tasks is not the original's."""
    lines = {key: texts().differs[key] for name in names for key in TASKS[name].sources}
    found = [
        "each prompt is fitted by itself and is its own seed's (the original fits the first and "
        "cuts others in steps); no key or value is there twice",
        *lines.values(),
    ]
    if any(TASKS[name].file for name in names):
        found.append("the last document that a question is not about is cut to fit")
    return found
