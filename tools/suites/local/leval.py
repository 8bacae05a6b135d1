"""L-Eval (An and others, "L-Eval: Instituting Standardized Evaluation for Long Context Language
Models", ACL 2024, arXiv 2307.11088) over a local folder of its data: documents with several
questions each, read once for all of them.

L-Eval is under the GPL: the format and what its metrics count are told here in our own words, and
so are the prompts. A row has `instructions` and as many `outputs`, `input` (the document) and
`evaluation` (exam, f1 or rouge; rows that people or a model judge are left out, and counted).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.suites.local.rows import TEXT, TEXTS, Row, Table, find, read
from tools.suites.metrics.exam import letters, number, output, topic, truth
from tools.suites.metrics.overlap import word_f1
from tools.suites.metrics.rouge import whole_rouge_l
from tools.suites.prompts.cutting import head_kept, ids_of, tail_kept
from tools.suites.prompts.instance import altered
from tools.suites.prompts.task import Prompt, Score, Task
from tools.tasks.prompts import common_start

FOLDERS = tuple(
    f"{root}{part}"
    for root in ("", "leval/", "LEval-data/", "leval/LEval-data/")
    for part in ("Closed-ended-tasks", "Open-ended-tasks", "Exam", "Generation", "")
)
WRITTEN = 512
FIELDS = {"input": TEXT, "instructions": TEXTS, "outputs": TEXTS, "evaluation": TEXT}
EXAMS = {
    "coursera": partial(letters, several=True),
    "quality": partial(letters, several=False),
    "tpo": partial(letters, several=False),
    "gsm100": number,
    "codeU": output,
    "sci_fi": truth,
    "topic_retrieval_longchat": topic,
}
OPEN = (
    *("financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa"),
    *("narrative_qa", "natural_question", "news_summ", "paper_assistant", "patent_summ"),
    *("review_summ", "scientific_qa", "tv_show_summ"),
)
NAMES = (*EXAMS, *OPEN)
METRICS = {"f1": word_f1, "rouge": whole_rouge_l, "exam": topic}
CHOICE = "Read the document below, then answer a multiple-choice question about it. "
RULES = {
    "coursera": CHOICE + "One option or several are right: write their letters alone, as A or BD.",
    "quality": CHOICE + "Exactly one option is right: write its letter alone.",
    "tpo": CHOICE + "Exactly one option is right: write its letter alone.",
    "gsm100": "Below are problems with their solutions, and then one more. Solve that one in the "
    "same way, and end with the words: The answer is, and the number.",
    "codeU": "Below is a code base with comments. Functions of it are called at the end: work out "
    "the final output.",
    "sci_fi": "Read the story below, then say whether a statement is true in its world, whatever "
    "is true in ours. Answer True or False.",
    "topic_retrieval_longchat": "Below is the record of our conversation about many topics, each "
    "of which begins where I say that I would like to discuss it. Keep them in mind: I will ask "
    "for the name of one.",
}
OTHERWISE = "Read the document below, then do what is asked about it."
CUT_BEGIN = ("codeU",)  # these lose their beginning, others their end
DIFFERS = (
    "L-Eval's prompts are in our own words (its own are under the GPL)",
    "a document too long loses tokens (the original: 250 words at a time)",
    "rouge is ROUGE-L alone (the original's script: its geometric mean with ROUGE-1 and ROUGE-2); "
    "an answer without a letter is wrong (there: A)",
)


def task(folder: Path, name: str) -> Task | None:
    """A task over the rows of its file; None where the folder has none. Raises UsageError for a
    file that cannot be read, a row without a field, or without any row that can be scored.
    """
    path = find(folder, FOLDERS, f"{name}.jsonl")
    if path is None:
        return None
    table = read(path, FIELDS)
    for place, row in enumerate(table.rows, 1):
        if len(row["instructions"]) != len(row["outputs"]):
            raise UsageError(
                f"{path}, row {place}: found {len(row['instructions'])} instructions and "
                f"{len(row['outputs'])} outputs, expected as many of both"
            )
    rows = [row for row in table.rows if row["evaluation"].lower() in METRICS]
    if not rows:
        raise UsageError(f"{path}: found no row judged by {', '.join(METRICS)}, expected one")
    left = len(table.rows) - len(rows)
    said = (f"{left} documents of {name} that people or a model judge are left out",)
    facts = ("sci_fi asks for the story alone (the original asks once more for the real world)",)
    return Task(
        "leval",
        f"leval/{name}",
        WRITTEN,
        partial(_prompt, name, Table(path, rows, table.digest)),
        sizes=tuple(len(row["input"]) for row in rows),
        asked=tuple(len(row["instructions"]) for row in rows),
        data={path.name: table.digest},
        differs=(*DIFFERS, *(said if left else ()), *(facts if name == "sci_fi" else ())),
    )


def _prompt(
    name: str, table: Table, tokenizer: Tokenizer, length: int, number: int, room: int
) -> Prompt:
    """The prompts of a document, cut to `length` tokens, and to fewer where one of its questions
    would not fit `room`.
    """
    row, cut = table.rows[number], tail_kept if name in CUT_BEGIN else head_kept
    keep = length
    while True:
        document, lost = cut(tokenizer, row["input"], keep)
        whole = [
            ids_of(tokenizer, _text(name, row, document, place), True)
            for place in range(len(row["instructions"]))
        ]
        over = max(map(len, whole)) - room
        if over <= 0:
            break
        keep = min(keep, len(tokenizer.encode(row["input"], special=False))) - over
        if keep < 1:
            raise UsageError(
                f"leval/{name}: found {room} tokens of room for a prompt, expected more: a "
                "question does not fit; give a model with a longer context"
            )
    if len(whole) == 1:  # where the question begins is known by another one
        asked = altered(row["instructions"][0])
        other = ids_of(tokenizer, _text(name, row, document, 0, asked), True)
        shared = common_start([*whole, other])
    else:
        shared = common_start(whole)
    own = [ids[shared:] for ids in whole]
    scores = [_score(name, row, expected) for expected in row["outputs"]]
    return Prompt(whole[0][:shared], own, [[o] for o in row["outputs"]], scores, cut=lost)


def _text(name: str, row: Row, document: str, place: int, asked: str | None = None) -> str:
    """The text of a prompt: a rule, the document, the question; for what n-grams judge, of how many
    words the answer should be.
    """
    asked = row["instructions"][place] if asked is None else asked
    if name not in EXAMS and row["evaluation"].lower() != "exam":
        asked += f"\nAnswer in about {len(row['outputs'][place].split())} words."
    return f"{RULES.get(name, OTHERWISE)}\n\n{document}\n\n{asked}"


def _score(name: str, row: Row, expected: str) -> Score:
    return partial(EXAMS.get(name) or METRICS[row["evaluation"].lower()], expected=expected)
