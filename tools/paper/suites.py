"""Whether tools.suites can read a benchmark's local files, and what is missing where it cannot."""

from __future__ import annotations

from pathlib import Path

from tools.suites import cli

FORMATS = {
    "longbench": "LongBench: NAME.jsonl of each data set, a line {input, context, answers, length, "
    "dataset, language, all_classes, _id}",
    "infinitebench": "InfiniteBench: NAME.jsonl of each task, a line {id, context, input, answer, "
    "options}",
    "leval": "L-Eval: NAME.jsonl of each task, a line {instructions, outputs, input, source, "
    "evaluation}",
}


def missing(suite: str, data: Path | None) -> str:
    """A line that says what is missing for a benchmark; empty where nothing is."""
    if data is None:
        return f"not measured: no files here; give --data DIR with {FORMATS[suite]}"
    if not any(data.rglob("*.jsonl")):
        return f"not measured: no .jsonl file below {data}, expected {FORMATS[suite]}"
    if suite not in getattr(cli, "SUITES", {}):
        return f"not measured: tools.suites does not read {suite} yet"
    return ""
