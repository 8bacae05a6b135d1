"""LongBench's 21 tasks (Bai and others, "LongBench: A Bilingual, Multitask Benchmark for Long
Context Understanding", ACL 2024, arXiv 2308.14508; github.com/THUDM/LongBench, MIT): its prompts,
lengths of answers, cut in the middle and metrics, over the rows of a local folder of its data.

A row has `input`, `context`, `answers` and `all_classes`; an answer's score is that of the
reference that it is nearest to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from engine.base.errors import UsageError
from engine.text.tokenizer import Tokenizer
from tools.suites.local.rows import TEXT, TEXTS, Row, Table, find, read
from tools.suites.metrics.chinese import segmenter
from tools.suites.metrics.matches import class_named, code_like, count_named, paragraph_named
from tools.suites.metrics.overlap import chinese_f1, word_f1
from tools.suites.metrics.rouge import chinese_rouge_l, rouge_l
from tools.suites.prompts.cutting import halves, within
from tools.suites.prompts.task import Prompt, Task

FOLDERS = ("longbench", "data", "LongBench", "LongBench/data")  # where its files may lie
# the chat template is left out for these, and the first line of an answer counts
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
AS_TEXT = (*FIRST_LINE, "lcc", "repobench-p")
BY_CLASS = ("trec", "lsht")
Compare = Callable[..., float]
# the prompts are LongBench's own (MIT)
PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
BRIEF = (
    " the question {on}{as_}concisely as you can, using a single phrase {kind}if possible. {more}"
    "Do not provide any explanation."
)
UNANSWERABLE = (
    "If the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
)
STORY = BRIEF.format(on="{on}", as_="as", kind="", more="")  # without a space, as published
ARTICLE = BRIEF.format(on="{on}", as_="as ", kind="or sentence ", more=UNANSWERABLE)


@dataclass(frozen=True)
class Kind:
    """prompt: with {context} and {input}; written: tokens of an answer; compare: its metric."""

    prompt: str
    written: int
    compare: Compare
    chinese: bool = False


KINDS = {
    "narrativeqa": Kind(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer{STORY.format(on='')}\n\nStory: {{context}}\n\nNow, answer"
        f"{STORY.format(on='based on the story ')}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        word_f1,
    ),
    "qasper": Kind(
        f"You are given a scientific article and a question. Answer{ARTICLE.format(on='')}\n\n"
        f"Article: {{context}}\n\n Answer{ARTICLE.format(on='based on the above article ')}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        word_f1,
    ),
    "multifieldqa_en": Kind(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        word_f1,
    ),
    "multifieldqa_zh": Kind(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我"
        "答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        chinese_f1,
        chinese=True,
    ),
    "hotpotqa": Kind(PASSAGES, 32, word_f1),
    "2wikimqa": Kind(PASSAGES, 32, word_f1),
    "musique": Kind(PASSAGES, 32, word_f1),
    "dureader": Kind(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
        128,
        chinese_rouge_l,
        chinese=True,
    ),
    "gov_report": Kind(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        rouge_l,
    ),
    "qmsum": Kind(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\nQuery: {input}\n"
        "Answer:",
        512,
        rouge_l,
    ),
    "multi_news": Kind(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
    "vcsum": Kind(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n"
        "会议总结：",
        512,
        chinese_rouge_l,
        chinese=True,
    ),
    "trec": Kind(
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        64,
        class_named,
    ),
    "triviaqa": Kind(
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        word_f1,
    ),
    "samsum": Kind(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        rouge_l,
    ),
    "lsht": Kind(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        class_named,
        chinese=True,
    ),
    "passage_count": Kind(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is: ",
        32,
        count_named,
    ),
    "passage_retrieval_en": Kind(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        paragraph_named,
    ),
    "passage_retrieval_zh": Kind(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        "下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"
        '"段落1"，"段落2"等格式\n\n答案是：',
        32,
        paragraph_named,
        chinese=True,
    ),
    "lcc": Kind(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, code_like
    ),
    "repobench-p": Kind(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        code_like,
    ),
}
DIFFERS = (
    "samsum's answers are not stopped at a line's end; their first line is scored, as there",
    "an answer that names no class scores 0, as by the original's code (it never comes to look for "
    "the nearest)",
)


def task(folder: Path, name: str) -> Task | None:
    """A task over the rows of its file; None where the folder has none. Raises UsageError for a
    file that cannot be read or a row without a field.
    """
    path = find(folder, FOLDERS, f"{name}.jsonl")
    return None if path is None else over("longbench", name, rows_of(path, name))


def rows_of(path: Path, name: str, more: Mapping[str, str] = MappingProxyType({})) -> Table:
    """The rows of a task's file. more: fields beside those that every row has."""
    fields = {"context": TEXT, "input": TEXT, "answers": TEXTS, **more}
    return read(path, fields | ({"all_classes": TEXTS} if name in BY_CLASS else {}))


def over(suite: str, name: str, table: Table, make: Callable[..., Prompt] | None = None) -> Task:
    """A task over rows of a file. make: another than `prompt`."""
    kind = KINDS[name]
    words = kind.compare in (chinese_f1, chinese_rouge_l)
    said = f"Chinese words are {segmenter()} (the original: jieba's)"
    return Task(
        suite,
        f"{suite}/{name}",
        kind.written,
        partial(make or prompt, name, table),
        sizes=tuple(len(row["context"]) for row in table.rows),
        data={table.path.name: table.digest} | ({"Chinese words": segmenter()} if words else {}),
        differs=(*DIFFERS, said) if words else DIFFERS,
    )


def prompt(
    name: str, table: Table, tokenizer: Tokenizer, length: int, number: int, room: int
) -> Prompt:
    """The prompt of a row, cut in the middle to `length` tokens before the chat template."""
    kind, row = KINDS[name], table.rows[number]
    before, _, question = kind.prompt.partition("{context}")
    question = question.replace("{input}", row["input"])
    if length < 2:
        raise UsageError(f"--max-length: found {length}, expected at least 2")
    text = before + row["context"] + question
    found = within(tokenizer, text, question, name not in AS_TEXT, halves, length, room)
    own = found.ids[found.shared :]
    score = partial(_score, name, row)
    return Prompt(found.ids[: found.shared], [own], [row["answers"]], [score], cut=found.cut)


def _score(name: str, row: Row, answer: str) -> float:
    if name in FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    more: Sequence[Sequence[str]] = [row["all_classes"]] if name in BY_CLASS else []
    return max(KINDS[name].compare(answer, each, *more) for each in row["answers"])
