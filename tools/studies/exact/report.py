"""Markdown of docs/EXACT.md: what is accepted by text, length and budget, and what that promises on
a GPU by counted bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine import Exact, OmniKV
from engine.methods.exact import MOST_DRAFTS
from engine.plan.exact_costs import ExactCosts
from tools.bench.shapes import shape_config, shape_filters, short_size
from tools.common.page import line, table
from tools.studies.exact.starts import cycles

LENGTHS = (2, 4, 6, 7)  # draft lengths whose cycles the table shows
ITEMSIZE = 2  # bfloat16


def survival(accepted: Sequence[int]) -> list[float]:
    """Share of drafts whose first 1, 2, ... 7 tokens are all right."""
    return [sum(n >= i for n in accepted) / len(accepted) for i in range(1, MOST_DRAFTS + 1)]


def acceptance_table(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a table, a row per cell of `python -m tools.studies.exact starts`, in the file's
    order.
    """
    head = ["text", "tokens", "filter layers", "budget"]
    head += [str(i) for i in range(1, MOST_DRAFTS + 1)]
    head += [f"of {n}" for n in LENGTHS] + ["copied"]
    yield from table(head, ())
    for row in records:
        right, copies = row["accepted"], [n for n in row["looked_up"] if n >= 0]
        choice = "" if row["choice"] == "first draft" else f" ({row['choice']})"
        cells = [row["kind"] + choice, f"{row['length']:,}", f"{{{row['filters']}}}"]
        cells.append(f"{100 * row['share']:.2f}".rstrip("0").rstrip(".") + "%")
        cells += [f"{share:.2f}" for share in survival(right)]
        for draft in LENGTHS:
            kept = cycles(right, draft)
            cells.append(f"{sum(kept) / len(kept):.1f}" if kept else "-")
        mean = f"{sum(copies) / len(copies):.1f} x {len(copies)}" if copies else "none"
        yield line([*cells, mean])


def counted_table(
    shape: str, contexts: Sequence[int], share: float, reached: Sequence[float]
) -> Iterator[str]:
    """Lines of a table of what a GPU reads, in bfloat16, all on the device: full attention, the
    drafter alone, and exact mode with the draft length that pays best.

    reached: share of drafts whose first 1, 2, ... 7 tokens are right (`survival`).
    """
    config = shape_config(shape)
    method = Exact(OmniKV(filter_layers=shape_filters(shape), wait_layers=0, share=share))
    plan = method.plan(config)
    costs = ExactCosts.of(config, plan, ITEMSIZE, "cuda")
    yield from table(["tokens", "full, GB a token", "drafter alone", "drafts", "exact"], ())
    for context in contexts:
        needs = method.needs(plan, config, context, ITEMSIZE)
        read = needs.selected + needs.tail
        drafts, gain = costs.predicted(context, read, MOST_DRAFTS, reached=reached)
        full = costs.full([context] * config.num_layers) / 1e9
        alone = f"{costs.alone(context, read):.2f}x"
        yield line([short_size(context), f"{full:.1f}", alone, str(drafts), f"{gain:.2f}x"])
