"""LongBench-E (Bai and others, ACL 2024; github.com/THUDM/LongBench, MIT): 13 of LongBench's tasks
with about as many rows in each of three classes of length, scored by class. Prompts, lengths of
answers, cut and metrics are LongBench's.

A row's `length` counts words of context, question and answers, of code too.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from engine.text.tokenizer import Tokenizer
from tools.suites.local import longbench
from tools.suites.local.rows import WHOLE, Row, Table, find
from tools.suites.prompts.task import Prompt, Task

NAMES = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
    *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
# (words that are too many for it, its name)
CLASSES = ((4000, "0-4k words"), (8000, "4-8k words"), (None, "8k+ words"))
DIFFERS = (
    "LongBench-E's rows come in turn from its three classes of length, so that a part of them has "
    "all three (the original reads all)",
)


def task(folder: Path, name: str) -> Task | None:
    """A task over the rows of its file; None where the folder has none. Raises UsageError for a
    file that cannot be read or a row without a field.
    """
    path = find(folder, longbench.FOLDERS, f"{name}_e.jsonl")
    if path is None:
        return None
    table = longbench.rows_of(path, name, {"length": WHOLE})
    classes = [[row for row in table.rows if class_of(row) == each] for _, each in CLASSES]
    rows: list[Row] = [row for turn in zip_longest(*classes) for row in turn if row is not None]
    found = longbench.over("longbench_e", name, Table(path, rows, table.digest), _prompt)
    return replace(found, differs=(*found.differs, *DIFFERS))


def class_of(row: Row) -> str:
    """A row's class of length."""
    return next(name for below, name in CLASSES if below is None or row["length"] < below)


def _prompt(
    name: str, table: Table, tokenizer: Tokenizer, length: int, number: int, room: int
) -> Prompt:
    """LongBench's prompt of a row, which knows its class."""
    found = longbench.prompt(name, table, tokenizer, length, number, room)
    return replace(found, part=class_of(table.rows[number]))
