"""InfiniteBench's tasks that have files (Zhang and others, "InfiniteBench: Extending Long Context
Evaluation Beyond 100K Tokens", ACL 2024, arXiv 2402.13718; github.com/OpenBMB/InfiniteBench, MIT):
books, dialogues, code and numbers; its prompts for open models, lengths of answers, cut in the
middle and metrics, over the rows of a local folder of its data.

A row has `context`, `input`, `answer` and, where something is chosen, four `options`. The prompts
end with the beginning of an answer, which stands behind a chat template where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.suites.local.rows import EITHER, FOUR, NUMBERS, TEXT, Row, find, numbers, read
from tools.suites.metrics.infinitebench import (
    function_named,
    number_found,
    option_named,
    speaker_named,
    value_last,
    values_begun,
)
from tools.suites.metrics.overlap import character_f1, word_f1
from tools.suites.metrics.rouge import summary_rouge_l
from tools.suites.prompts.cutting import middle_out, within
from tools.suites.prompts.task import Prompt, Task

FOLDERS = ("infinitebench", "InfiniteBench", "data", "data/InfiniteBench", "InfiniteBench/data")
CALL = re.compile(r"func_[0-9]+\(-?[0-9]+\)")
SOUGHT = re.compile("The .+ of")
LETTERS = "ABCD"
OPTIONS = "\nA. {option_A}\nB. {option_B}\nC. {option_C}\nD. {option_D}"
DIALOGUE = (
    "Below is a dialogue script where one random occurrence of a character name is replaced with "
    '"$$MASK$$", and you should try to guess who that character is.\n\n'
)
SUMS = (
    "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: "
    "[1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: "
)


def nearest(compare: Callable[[str, str], float]) -> Callable[[str, list[Any]], float]:
    """The score of the reference that an answer is nearest to."""
    return lambda answer, expected: max(compare(answer, each) for each in expected)


@dataclass(frozen=True)
class Kind:
    """before, after: the prompt around the context, with {names} of what a row has; prefix: how the
    answer begins. written: tokens of an answer. score: by all that `answer` has. answer: its kind.
    differs: what a reader must know of its score.
    """

    before: str
    after: str
    prefix: str
    written: int
    score: Callable[[str, list[Any]], float]
    answer: str = EITHER
    options: bool = False
    differs: tuple[str, ...] = ()


# the prompts are InfiniteBench's own (MIT)
KINDS = {
    "longbook_sum_eng": Kind(
        "Summarize the book below.\n\n", "", "\n\nSummary:", 1200, nearest(summary_rouge_l)
    ),
    "longbook_qa_eng": Kind(
        "Read the book and answer the question. Be very concise in your answer.\n\n",
        "\n\nQuestion: {input}",
        "\nAnswer:",
        40,
        nearest(word_f1),
    ),
    "longbook_choice_eng": Kind(
        "Read the book and answer the question.\n\n",
        "\n\nQuestion: {input}" + OPTIONS,
        "\n\nThe letter of the correct answer is",
        40,
        option_named,
        options=True,
        differs=(
            "an answer that begins with a capital A to D chooses it, as by the original's code",
        ),
    ),
    "longbook_qa_chn": Kind(
        "阅读以下书籍然后回答问题。\n\n",
        "\n\n问题：{input}",
        "\n答案：",
        40,
        nearest(character_f1),
    ),
    "longdialogue_qa_eng": Kind(
        DIALOGUE,
        "",
        "\n\nThe name that has been replaced with $$MASK$$ is likely",
        40,
        speaker_named,
        differs=(
            "longdialogue_qa_eng looks for the first of a row's names, in capital letters, and "
            "never finds one of several words, as by the original's code",
        ),
    ),
    "code_debug": Kind(
        "Following is a Python code where exactly one of the functions/methods has a deliberate "
        "error that makes it crash.\n\n",
        "\n\nOptions:" + OPTIONS,
        "\n\nThe correct option is:",
        5,
        function_named,
        options=True,
        differs=(
            "code_debug counts a letter only with a point or a colon behind it, or behind words "
            'such as "answer is:", as by the original\'s code',
        ),
    ),
    "code_run": Kind(
        "There is a function called {func} in the following Python code.\n\n",
        "\n\nPlease compute the exact value of {func_call}.",
        " The value of {func_call} is",
        5,
        value_last,
        NUMBERS,
        differs=("code_run counts the last word of an answer, as by the original's code",),
    ),
    "math_find": Kind(
        "What is {sought} in the following list?\n\n",
        "\n\n{input}",
        "",
        3,
        number_found,
        NUMBERS,
        differs=(
            "math_find: a number with a fraction is wrong where a whole one is asked for (the "
            "original's code fails on it)",
        ),
    ),
    "math_calc": Kind(
        SUMS,
        "",
        "\nValues:",
        30000,
        values_begun,
        NUMBERS,
        differs=(
            "math_calc passes over an answer's first number: the values in its prompt begin with "
            "the expression's first number, the expected ones behind it, and the original's code "
            "passes it over for GPT-4 alone, so that no right answer of another model counts",
        ),
    ),
}
NAMES = tuple(KINDS)
UNASKED = ("longbook_sum_eng", "longdialogue_qa_eng", "math_calc")  # every row asks the same
DIFFERS = (
    "InfiniteBench's prompts are those that it has for open models; after a chat template the "
    "answer begins as they end",
)


@dataclass(frozen=True)
class Question:
    """A row: its context, what its prompt names, and what answers are compared with."""

    context: str
    fields: Mapping[str, str]
    expected: list[Any]


def task(folder: Path, name: str) -> Task | None:
    """A task over the rows of its file; None where the folder has none. Raises UsageError for a
    file that cannot be read, a row without a field, or one that asks for nothing.
    """
    path = find(folder, FOLDERS, f"{name}.jsonl")
    if path is None:
        return None
    kind = KINDS[name]
    fields = {"context": TEXT, "answer": kind.answer}
    fields |= {"input": TEXT} if name not in UNASKED else {}
    fields |= {"options": FOUR} if kind.options else {}
    table = read(path, fields)
    asked = [
        _question(name, f"{path}, row {place}", row) for place, row in enumerate(table.rows, 1)
    ]
    return Task(
        "infinitebench",
        f"infinitebench/{name}",
        kind.written,
        partial(_prompt, name, asked),
        sizes=tuple(len(each.context) for each in asked),
        data={path.name: table.digest},
        differs=(*DIFFERS, *kind.differs),
    )


def _question(name: str, place: str, row: Row) -> Question:
    fields = {"input": row.get("input", "")}
    if name == "code_run":
        call = _found(place, CALL, row["input"], "the call of a function, as func_1(-2)")
        fields |= {"func_call": call, "func": call.partition("(")[0]}
    elif name == "math_find":
        sought = _found(place, SOUGHT, row["input"], "the number that is sought, as The median of")
        fields["sought"] = sought.lower().removesuffix(" of")
    answer = row["answer"]
    if KINDS[name].answer == NUMBERS:
        return Question(row["context"], fields, numbers(answer))
    expected = [answer] if isinstance(answer, str) else answer
    if KINDS[name].options:
        fields |= {f"option_{x}": text for x, text in zip(LETTERS, row["options"])}
        expected = _chosen(place, expected, row["options"])
    return Question(row["context"], fields, expected)


def _found(place: str, rule: re.Pattern[str], text: str, what: str) -> str:
    found = rule.search(text)
    if found is None:
        raise UsageError(f"{place}: field 'input': found {text[:40]!r}, expected {what} in it")
    return found[0]


def _chosen(place: str, answer: list[str], options: list[str]) -> list[str]:
    """The right option and its letter."""
    if len(answer) == 2 and answer[1] in list(LETTERS):
        return answer
    if len(answer) != 1 or answer[0] not in options:
        raise UsageError(
            f"{place}: field 'answer': found {answer!r:.60}, expected one of its four options"
        )
    return [answer[0], LETTERS[options.index(answer[0])]]


def _prompt(
    name: str, asked: list[Question], tokenizer: Tokenizer, length: int, number: int, room: int
) -> Prompt:
    """The prompt of a row, cut in the middle to `length` tokens before the chat template."""
    kind, row = KINDS[name], asked[number]
    before, after, prefix = (
        text.format(**row.fields) for text in (kind.before, kind.after, kind.prefix)
    )
    if length < 2:
        raise UsageError(f"--max-length: found {length}, expected at least 2")
    text = before + row.context + after
    found = within(tokenizer, text, after, True, middle_out, length, room, prefix)
    own = found.ids[found.shared :]
    score = partial(kind.score, expected=row.expected)
    expected = [str(each) for each in row.expected]
    return Prompt(found.ids[: found.shared], [own], [expected], [score], cut=found.cut)
