"""LongBench v2 (Bai and others, 2024, arXiv 2412.15204; github.com/THUDM/LongBench, MIT, its data
Apache-2.0): one choice of four about a document, its prompt without reasoning, its cut in the
middle and its way to find the letter, over a local file (a JSON list, or JSON lines).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.text.tokenizer import Tokenizer
from tools.suites.local.rows import TEXT, Table, find, read
from tools.suites.metrics.matches import letter_named
from tools.suites.prompts.cutting import middle_out, within
from tools.suites.prompts.task import Prompt, Task

FOLDERS = ("longbench2", "longbench_v2", "LongBench-v2")
NAMES = ("data.json", "data.jsonl", "longbench_v2.json", "longbench_v2.jsonl")
CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")
FIELDS = dict.fromkeys(("context", "question", *CHOICES, "answer", "difficulty"), TEXT)
# the prompt is LongBench v2's own (MIT)
BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
QUESTION = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}"
    '\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The '
    'correct answer is (insert answer here)".'
)
WRITTEN = 128
DIFFERS = ("answers are greedy (the original: temperature 0.1)",)


def tasks(folder: Path, levels: Sequence[str]) -> dict[str, Task]:
    """{name: Task} of these difficulties; empty where the folder has no file of it. Raises
    UsageError for a file that cannot be read or a row without a field.
    """
    path = next((p for name in NAMES if (p := find(folder, FOLDERS, name))), None)
    if path is None:
        return {}
    table, found = read(path, FIELDS), {}
    for level in levels:
        part = Table(path, [r for r in table.rows if r["difficulty"] == level], table.digest)
        if not part.rows:
            continue
        found[level] = Task(
            "longbench2",
            f"longbench2/{level}",
            WRITTEN,
            partial(_prompt, part),
            sizes=tuple(len(row["context"]) for row in part.rows),
            data={path.name: table.digest},
            differs=DIFFERS,
        )
    return found


def _prompt(table: Table, tokenizer: Tokenizer, length: int, number: int, room: int) -> Prompt:
    """The prompt of a row, cut in the middle to `length` tokens before the chat template."""
    row = {name: value.strip() for name, value in table.rows[number].items()}
    question = QUESTION.format(**row)
    text = BEFORE + row["context"] + question
    found = within(tokenizer, text, question, True, middle_out, length, room)
    own = found.ids[found.shared :]
    score = partial(letter_named, expected=row["answer"])
    return Prompt(found.ids[: found.shared], [own], [[row["answer"]]], [score], cut=found.cut)
