"""The page of a run of benchmarks: scores by task with intervals, and differences from full
attention on the same questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools.common.page import table
from tools.common.records import Record
from tools.compare.stats import against, by_question, cells, pooled, reads
from tools.suites.registry import TITLES, brought

NOTES = """## How it was measured

- Greedy answers of as many tokens as the benchmark allows, behind the beginning of an answer where
  it gives one, through the model's chat template where there is one and the benchmark uses it. The
  length of a made prompt counts the answer.
- A score is the benchmark's own, in per cent (docs/SUITES.md). In brackets its 95% interval by
  Wilson's formula, which is wide for scores between 0 and 1. mean: over the tasks.
- against full: the mean paired difference on the same questions with its 95% interval, several
  questions about one document taken together.
- omnikv_random draws its tokens by chance, oracle_topk takes those that each layer attends to most.
- One reading by full attention serves all methods that leave prompts alone. The question is read
  densely, and the answer is the method's; where it says "questions read sparsely", the method's own
  steps read the question too, and what it loses there is lost."""


def markdown(records: Sequence[Record], config: dict[str, Any], differs: Sequence[str]) -> str:
    """The page. records: answers (tools.suites.run); differs: what is not the original's."""
    settings = config["settings"]
    suites = [name for name in TITLES if any(_suite(r) == name for r in records)]
    lines = [
        f"# {' and '.join(TITLES[name] for name in suites)}",
        "",
        f"- model: {settings['model']}, {config['dtype']} on {config['device']}",
        f"- {config['hardware']}; commit {config['commit']}; seed {settings['seed']}",
        f"- `python -m tools.suites {config['flags']}`",
    ]
    for suite in suites:
        parts: dict[tuple[int, str, bool, str], list[Record]] = {}
        for record in (r for r in records if _suite(r) == suite):
            parts.setdefault(_part(record), []).append(record)
        for part, here in sorted(parts.items(), key=lambda found: found[0]):
            lines += ["", f"## {_title(suite, *part)}", "", *_table(here)]
            lines += _notes(here)
    if config["why"]:
        lines += ["", "Not run", ""]
        lines += [f"- {label}: {why}" for label, why in config["why"].items()]
    lines += ["", "## What differs from the original", "", *(f"- {line}" for line in differs)]
    return "\n".join([*lines, "", NOTES]) + "\n"


def _suite(record: Record) -> str:
    return str(record.get("suite", "ruler"))  # answers of before there were others have none


def _setup(record: Record) -> str:
    return str(record.get("setup", "dense"))


def _part(record: Record) -> tuple[int, str, bool, str]:
    """What a table holds: answers of one length and set-up, of made prompts or of a file's, and of
    one part of a test set.
    """
    return record["length"], _setup(record), _brought(record), record.get("part", "")


def _brought(record: Record) -> bool:
    return brought(_suite(record), record["task"])


def _title(suite: str, length: int, setup: str, files: bool, part: str) -> str:
    what = f"prompts cut to {length:,} tokens" if files else f"{length:,} tokens"
    read = "" if setup == "dense" else ", questions read sparsely"
    return f"{TITLES[suite]}, {what}{read}" + (f", {part}" if part else "")


def _table(records: Sequence[Record]) -> list[str]:
    here = [r for r in records if "skipped" not in r]
    tasks = list(dict.fromkeys(r["task"] for r in here))
    rows = {(row["variant"], row["task"]): row for row in cells(here)}
    full = by_question(here, "full", 1)
    lines = []
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
        lines.append((label, budget, count, *shown, mean, shift))
    names = [task.rpartition("/")[2] for task in tasks]
    head = ["method", "a sparse layer reads", "answers", *names, "mean", "against full"]
    return table(head, lines)


def _notes(records: Sequence[Record]) -> list[str]:
    """How many prompts were cut, and which answers there are none of."""
    lines = []
    if _brought(records[0]):
        prompts = {(r["task"], r["seed"]): r["cut"] for r in records if "cut" in r}
        cut = Counter(task for (task, _), lost in prompts.items() if lost)
        by_task = ", ".join(f"{task.rpartition('/')[2]} {n}" for task, n in sorted(cut.items()))
        mean = sum(prompts.values()) / max(1, sum(cut.values()))
        lines += ["", f"Cut: {sum(cut.values())} of {len(prompts)} documents"]
        lines[-1] += f" ({by_task}), by {mean:,.0f} tokens on average." if cut else "."
    skipped = Counter((r["variant"], r["skipped"]) for r in records if "skipped" in r)
    lines += [""] if skipped else []
    lines += [
        f"- {label}: no answer to {count} questions: {why}"
        for (label, why), count in sorted(skipped.items())
    ]
    return lines
