"""python -m tests.programs.identical: compare cells that have no record yet, or sum the records
up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.programs.identical.cells import TOKENS, Cell, cells, llm_of, prompt_of
from tests.programs.identical.judge import Difference, compare, full_answer

MODELS = ("real", "pocket", "random")


def records(path: Path) -> dict[str, dict[str, Any]]:
    """{name of a cell: record} of a file, which may be absent."""
    if not path.exists():
        return {}
    return {row["cell"]: row for row in map(json.loads, path.read_text().splitlines())}


def run(todo: Iterable[Cell], folder: str | None, tokens: int = TOKENS) -> Iterator[dict[str, Any]]:
    """Compare cells and yield their records. Full attention answers a prompt once in each tier:
    rows that stream from host memory are added up part by part, so in 16 bits a tie may fall
    otherwise.
    """

    def shared(cell: Cell) -> tuple[Any, ...]:
        return cell.model, cell.dtype, cell.offload, cell.prompt

    for _, group in groupby(todo, key=shared):
        own = list(group)
        llm = llm_of(own[0], folder)
        ids = prompt_of(own[0], llm)
        wanted, logits = full_answer(llm, ids, tokens, own[0].offload)
        for cell in own:
            began = time.thread_time()
            answer = compare(llm, cell.method, cell.offload, ids, wanted, logits)
            yield {
                "cell": cell.name,
                "kind": cell.kind,
                "method": cell.method.method.name,
                "budget": cell.budget,
                "draft": cell.draft,
                "lookup": cell.method.lookup,
                "seconds": round(time.thread_time() - began, 2),
                **answer.to_dict(),
            }


def summary(rows: dict[str, dict[str, Any]], models: tuple[str, ...] = MODELS) -> tuple[str, bool]:
    """A Markdown table by model, dtype and tier, and whether every difference is a tie, none is in
    float32, drafts read a part, and every record is of a planned cell.
    """
    lines = [
        "| model | dtype | tier | answers | of | tokens | differ | ties | largest gap | logits "
        "differ by | drafted | accepted | answers with a wrong draft | rows read |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    planned: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells(models):
        planned.setdefault((cell.model, cell.dtype, cell.offload), []).append(cell.name)
    good = set(rows) <= {name for names in planned.values() for name in names}
    for (model, dtype, offload), names in planned.items():
        done = [rows[name] for name in names if name in rows]
        if not done:
            continue
        found = [Difference(**d) for row in done for d in row["differences"]]
        ties = sum(d.is_tie for d in found)
        good &= all(row["least_read"] < row["length"] for row in done)
        good &= ties == len(found) and not (dtype == "float32" and found)
        # one cycle may have been left open by the end of the answer
        wrong = sum(row["drafted"] > row["accepted"] + row["draft"] for row in done)
        read = sum(row["least_read"] for row in done) / sum(row["length"] for row in done)
        lines.append(
            f"| {model} | {dtype} | {offload} | {len(done)} | {len(names)} | "
            f"{sum(row['tokens'] for row in done)} | {len(found)} | {ties} | "
            f"{max((d.gap for d in found), default=0):.2g} | "
            f"{max(row['logits_differ'] for row in done):.2g} | "
            f"{sum(row['drafted'] for row in done)} | {sum(row['accepted'] for row in done)} | "
            f"{wrong} | {read:.0%} |"
        )
    return "\n".join(lines), good


def main(arguments: list[str] | None = None) -> int:
    """Run or sum up; 1 where a token differs that is no tie, or any in float32."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.identical")
    parser.add_argument("--model", help="folder of the real checkpoint; none: the other models")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines, one a cell")
    parser.add_argument("--cpu-minutes", type=float, default=float("inf"))
    parser.add_argument("--summary", action="store_true", help="sum up what is there")
    chosen = parser.parse_args(arguments)
    rows = records(chosen.out)
    if not chosen.summary:
        models = MODELS if chosen.model else MODELS[1:]
        todo = (cell for cell in cells(models) if cell.name not in rows)
        end = time.process_time() + 60 * chosen.cpu_minutes
        for row in run(todo, chosen.model):
            rows[row["cell"]] = row
            with chosen.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{row['cell']}: {len(row['differences'])} differ", file=sys.stderr, flush=True)
            if time.process_time() > end:
                break
    text, good = summary(rows)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
