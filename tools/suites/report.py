"""The page of a run of RULER: scores by task with intervals, and differences from full attention on
the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.compare.stats import against, by_question, cells, pooled, reads
from tools.eval.answers import Record

NOTES = """## How it was measured

- Greedy answers of as many tokens as the benchmark allows, behind the beginning of an answer that
  it gives, through the model's chat template where there is one. A length counts prompt and answer.
- A score is the share of the strings asked for that stand in the answer (qa: whether one does), in
  per cent. In brackets its 95% interval by Wilson's formula, which is wide for scores between 0
  and 1. mean: over the tasks.
- against full: the mean paired difference on the same prompts with its 95% interval.
- One reading by full attention serves all methods that leave prompts alone: the question is read
  densely, and the answer is the method's."""


def markdown(records: Sequence[Record], config: dict[str, Any], differs: Sequence[str]) -> str:
    """The page. records: answers (tools.suites.run); differs: what is not the original's."""
    settings = config["settings"]
    lines = [
        "# RULER",
        "",
        f"- model: {settings['model']}, {config['dtype']} on {config['device']}",
        f"- {config['hardware']}; commit {config['commit']}; seed {settings['seed']}",
        f"- `python -m tools.suites {config['flags']}`",
    ]
    for length in sorted({r["length"] for r in records}):
        lines += ["", f"## {length:,} tokens", "", *_table(records, length)]
    if config["why"]:
        lines += ["", "Not run", ""]
        lines += [f"- {label}: {why}" for label, why in config["why"].items()]
    lines += ["", "## What differs from the original", "", *(f"- {line}" for line in differs)]
    return "\n".join([*lines, "", NOTES]) + "\n"


def _table(records: Sequence[Record], length: int) -> list[str]:
    here = [r for r in records if r["length"] == length]
    tasks = list(dict.fromkeys(r["task"] for r in here))
    rows = {(row["variant"], row["task"]): row for row in cells(here)}
    full = by_question(here, "full", 1)
    lines = [
        "| method | a sparse layer reads | prompts | "
        + " | ".join(tasks)
        + " | mean | against full |",
        "|---" * (len(tasks) + 5) + "|",
    ]
    for label in dict.fromkeys(r["variant"] for r in here):
        found = [rows.get((label, task)) for task in tasks]
        known = [row for row in found if row]
        shown = [
            f"{100 * c['accuracy']:.0f} [{100 * c['low']:.0f}, {100 * c['high']:.0f}]" if c else ""
            for c in found
        ]
        mean = f"**{100 * pooled(known)['accuracy']:.1f}**" if all(found) else ""
        beside = None if label == "full" else against(by_question(here, label, 1), full)
        count = sum(row["asked"] for row in known)
        budget = reads(pooled(known))
        shift = beside.points() if beside else ""
        lines.append(
            f"| {label} | {budget} | {count} | " + " | ".join(shown) + f" | {mean} | {shift} |"
        )
    return lines
