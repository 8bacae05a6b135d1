"""Benchmarks of local files: whether tools.suites reads one, what is missing where it does not, and
the columns that the papers' tables have of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from tools.paper.programs import HOME

FORMATS = {
    "longbench": "LongBench's files: NAME.jsonl of each data set, a line {input, context, answers, "
    "length, dataset, language, all_classes, _id}",
    "infinitebench": "InfiniteBench's files: NAME.jsonl of each task, a line {id, context, input, "
    "answer, options}",
    "leval": "L-Eval's files: NAME.jsonl of each task, a line {instructions, outputs, input, "
    "source, evaluation}",
}
GROUPS: dict[str, Sequence[str]] = {
    "single-doc": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "multi-doc": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "summary": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "few-shot": ("trec", "triviaqa", "samsum", "lsht"),
    "synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    "code": ("lcc", "repobench-p"),
}
# InfiniteBench's, as the OmniKV paper has them: two of its twelve are not there
TEN = (
    *("longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "longdialogue_qa_eng"),
    *("longbook_qa_chn", "code_debug", "math_find", "passkey", "number_string", "kv_uuid"),
)
RENAMED = {"kv_retrieval": "kv_uuid"}  # as generated documents are called


def readable() -> set[str]:
    """Suites whose local files tools.suites reads."""
    try:
        return set(importlib.import_module(f"{HOME}.suites.registry").FILES)
    except ImportError:
        return set()


def missing(suite: str, data: Path | None) -> str:
    """A line that says what is missing for a benchmark; empty where nothing is."""
    if suite not in readable():
        return f"not measured: tools.suites does not read {FORMATS[suite].split(':')[0]}"
    if data is None:
        return f"not measured: no files here; give --data DIR with {FORMATS[suite]}"
    if not any(data.rglob("*.jsonl")):
        return f"not measured: no .jsonl file below {data}, expected {FORMATS[suite]}"
    return ""


def column_of(task: str) -> str:
    """A task's column: LongBench's and L-Eval's by suite and name, as their groups stand beside
    them; InfiniteBench's by name, as the papers have it.
    """
    suite, _, name = task.rpartition("/")
    return RENAMED.get(name, name) if suite == "infinitebench" else task


def means_of(suite: str, scores: dict[str, float]) -> dict[str, float]:
    """Columns that are means over a suite's {column: score}."""
    if suite == "longbench":
        return grouped(scores)
    if suite == "infinitebench" and all(name in scores for name in TEN):
        return {"average": sum(scores[name] for name in TEN) / len(TEN)}
    return {}


def grouped(scores: dict[str, float]) -> dict[str, float]:
    """{group: mean of its data sets that are there} of LongBench's {data set: score}, and the
    average of the groups where every one is there.
    """
    plain = {name.rpartition("/")[2]: value for name, value in scores.items()}
    out = {}
    for group, names in GROUPS.items():
        found = [plain[name] for name in names if name in plain]
        if found:
            out[group] = sum(found) / len(found)
    if len(out) == len(GROUPS):
        out["average"] = sum(out.values()) / len(out)
    return out
